"""lorafusion export: adapters of a run as PEFT folders, or one merged into a full model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lorafusion_jax.checkpoint.base_files import base_digests, check_base
from lorafusion_jax.cli.common import RunPath, next_command
from lorafusion_jax.digests import FILE as SUMS
from lorafusion_jax.digests import Damage, find_damage, has_digests, refuse_damage
from lorafusion_jax.errors import CheckpointError, ConfigError, install_line, quoted, raise_all
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.new_folder import new_folder
from lorafusion_jax.readable import RECORD, NotReadableError, check_regular
from lorafusion_jax.report.console import MOST_LINES, out, say
from lorafusion_jax.report.format import loss_text
from lorafusion_jax.report.servers import base_if_here, commands, type_of, why_not_in_vllm

MOST_ROWS = 12
BARS = "▁▂▃▄▅▆▇█"

if TYPE_CHECKING:
    from rich.console import Console

    from lorafusion_jax.adapters.spec import AdapterSpec
    from lorafusion_jax.checkpoint.folder import RunFolder
    from lorafusion_jax.config.schema import JobConfig

DTYPES = ("float32", "bfloat16")
MOST_COMMANDS = 3
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def command(
    run: RunPath,
    adapter: Annotated[str | None, typer.Argument(metavar="ADAPTER", help="name of the adapter")] = None,
    to: Annotated[
        Path | None, typer.Option("--to", "--out", "-o", help="folder to write, new or empty; required")
    ] = None,
    all_adapters: Annotated[bool, typer.Option("--all", help="every adapter, to TO/NAME")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="write the full model with the adapter merged in")] = False,
    step: Annotated[int | None, typer.Option(help="exported step", show_default="the newest")] = None,
    best: Annotated[bool, typer.Option("--best", help="the step with the best held-out result")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16", show_default="float32, as trained")] = None,
    push: Annotated[
        str | None, typer.Option(help="ORG/NAME on the hub, for the written folder; needs the hf extra")
    ] = None,
) -> None:
    """Writes an adapter as a PEFT folder or merged into a full model, with a card of its settings and results.

    Example: lorafusion export runs/exp1 law --to out/law
    """
    from lorafusion_jax.checkpoint.base_model import base_directory
    from lorafusion_jax.checkpoint.folder import RunFolder
    from lorafusion_jax.families.model import ModelConfig
    from lorafusion_jax.families.multimodal import auto_class

    folder = RunFolder(run)
    config = folder.read_config()
    names = [entry.name for entry in config.adapters]
    _check_options(
        f"lorafusion export {quoted(run)} {adapter or names[0]}",
        adapter,
        to,
        all_adapters=all_adapters,
        merge=merge,
        dtype=dtype,
        push=push,
    )
    assert to is not None
    if push is not None:
        hub()
    exports = [name for name in names if folder.latest(name) is not None] if all_adapters else [adapter or ""]
    sources = {name: exported_folder(folder, names, name, step, best=best) for name in exports}
    if not merge:
        _refuse_merge_only(config, list(sources))
    for source in sources.values():
        _no_link(folder.path, source)
    targets = {name: to / name if all_adapters else to for name in sources}
    if full_folders := [str(target) for target in targets.values() if target.is_dir() and any(target.iterdir())]:
        message = f"{', '.join(full_folders)} already exists and is not empty."
        raise CheckpointError("export.exists", message, fix="choose another folder, or remove this one")
    console = out()
    metrics, events = (rows_by_adapter(folder.path / log) for log in ("metrics.jsonl", "events.jsonl"))
    for name, source in sources.items():
        export = Export(
            folder=folder,
            config=config,
            name=name,
            source=source,
            to=targets[name],
            metrics=metrics.get(name, []),
            events=events.get(name, []),
            is_brief=len(sources) > MOST_LINES,
        )
        export.merge(console) if merge else export.copy(console, dtype)
        if push is not None:
            upload(targets[name], f"{push}-{name}" if all_adapters else push)
    if len(sources) > MOST_LINES:
        say(console, f"exported {len(sources)} adapters: {to}/NAME, each read again")
    if merge:
        wrapper = ModelConfig.from_hf(base_directory(config)).wrapper
        load = f"from transformers import {auto_class(wrapper)} as M; M.from_pretrained('{to}')"
        next_command(console, f'python -c "{load}"')
        return
    _show_servers(console, config, targets)
    if all_adapters:
        next_command(console, f"lorafusion generate {quoted(run)} 'a prompt'")
    else:
        next_command(console, f"lorafusion export {quoted(run)} {adapter} --merge --to {quoted(f'{to}-merged')}")


def _show_servers(console: Console, config: JobConfig, targets: Mapping[str, Path]) -> None:
    """Prints the commands that serve the folders of these adapters, or why a server does not take them."""
    from lorafusion_jax.checkpoint.base_model import base_in_commands
    from lorafusion_jax.config.specs import adapter_spec
    from lorafusion_jax.peft.leaves import exported_spec

    names = [*targets] if len(targets) <= MOST_LINES else [*targets][:MOST_COMMANDS]
    specs = {name: exported_spec(adapter_spec(config.adapter(name))) for name in names}
    model_type = type_of(base_if_here(config))
    folders = {name: (specs[name], targets[name]) for name in names}
    lines = commands(base_in_commands(config), folders, model_type)[:MOST_COMMANDS]
    reasons = {name: why_not_in_vllm(specs[name], model_type) for name in names}
    lines += [f"no command of vLLM for {name}: {why}" for name, why in reasons.items() if why][:MOST_COMMANDS]
    for line in lines:
        console.print(f"  {line}", style="dim", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """One adapter of a run that is exported.

    Attributes:
        source: its PEFT folder.
        to: the folder to write.
        metrics, events: its rows of the run's logs.
        is_brief: without lines of its own, as one of many.
    """

    folder: RunFolder
    config: JobConfig
    name: str
    source: Path
    to: Path
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    is_brief: bool = False

    @property
    def spec(self) -> AdapterSpec:
        from lorafusion_jax.config.specs import adapter_spec
        from lorafusion_jax.peft.leaves import exported_spec

        return exported_spec(adapter_spec(self.config.adapter(self.name)))

    def copy(self, console: Console, dtype: str | None) -> None:
        """Copies the folder, adds results to its card, and reads it back."""
        from lorafusion_jax.checkpoint.folder import step_of
        from lorafusion_jax.families.multimodal import auto_class, loads_whole, root_in_peft
        from lorafusion_jax.peft.folder import cast_tensors, name_for_multimodal, read_adapter

        self._warn(console)
        with new_folder(self.to) as draft:
            _copy(self.source, draft)
            (draft / SUMS).unlink(missing_ok=True)  # those of the new files are written at the end
            card, model = draft / "README.md", base_if_here(self.config)
            text = card.read_text("utf-8") + results(self.metrics) if card.is_file() else ""
            if model is not None and loads_whole(
                model.wrapper, scored=self.spec.head is not None and self.spec.head.task == "SEQ_CLS"
            ):
                name_for_multimodal(draft, self.spec.kind, self.spec.head, root_in_peft(model.wrapper))
                text = text.replace(auto_class(""), auto_class(model.wrapper))  # of a run of an earlier version
            if card.is_file():
                card.write_text(text, "utf-8")
            if dtype is not None:
                cast_tensors(draft, dtype)
            spec, _ = read_adapter(draft, self.spec.kind, self.spec.head)
        if self.is_brief:
            return
        if model is None:
            say(console, f"  {self.config.base.model} is not here: as the run wrote it", "yellow")
        console.print(f"exported {self.name} (step {step_of(self.source)}): {self.to}", highlight=False, markup=False)
        console.print(
            f"  re-read: rank {spec.rank}, alpha {spec.alpha:g}, targets {', '.join(spec.targets)}", highlight=False
        )

    def merge(self, console: Console) -> None:
        """Writes the full model with the adapter merged in."""
        from lorafusion_jax.checkpoint.base_model import base_directory
        from lorafusion_jax.checkpoint.folder import step_of
        from lorafusion_jax.peft.merge import merge_adapter
        from lorafusion_jax.weights.table import NONE

        self._warn(console)
        if self.spec.head is not None:
            heads = ", ".join(self.spec.head.modules)
            raise ConfigError(
                "export.head",
                f"{self.name} has a head of its own ({heads}), which a merged model cannot hold.",
                fix="without --merge; PeftModel.merge_and_unload merges it into a model that has such a head",
            )
        base = base_directory(self.config)
        check_base(self.folder.read_record()["base_files"], base_digests(base), base)
        report = merge_adapter(base, self.source, self.to, kind=self.spec.kind)
        console.print(
            f"merged {self.name} (step {step_of(self.source)}) into a full model: {self.to}",
            highlight=False,
            markup=False,
        )
        if self.config.base.quantize != NONE:
            base_note = f"{self.name} was trained on the base quantised as {self.config.base.quantize}"
            say(console, f"  {base_note}; the original weights are merged, so outputs differ a little", "yellow")
        console.print(f"  {report.num_changed} tensors changed, largest change {report.max_delta:.3g}", highlight=False)

    def _warn(self, console: Console) -> None:
        failure = _failure(self.events)
        if failure is not None:
            text = f"{self.name} failed in training: {failure}; check these weights before you use them"
            say(console, text, "yellow")


def _check_options(
    command: str,
    adapter: str | None,
    to: Path | None,
    *,
    all_adapters: bool,
    merge: bool,
    dtype: str | None,
    push: str | None,
) -> None:
    checks = (
        (to is not None, "--to is missing.", f"{command} --to out/NAME, a folder that is new or empty"),
        ((adapter is None) == all_adapters, "name one adapter, or give --all.", f"{command} --to out/NAME"),
        (dtype in (None, *DTYPES), f"--dtype is {dtype!r}.", " or ".join(DTYPES)),
        (not merge or dtype is None, "--dtype is for PEFT folders: a merged model has the base's.", "without --dtype"),
        (not (merge and all_adapters), "--merge writes one full model, not --all.", "one adapter at a time"),
        (push is None or HUB_NAME.fullmatch(push) is not None, f"--push {push} is no hub name.", "ORG/NAME"),
    )
    raise_all([ConfigError("export.options", message, fix=fix) for holds, message, fix in checks if not holds])


def exported_folder(folder: RunFolder, names: list[str], adapter: str, step: int | None, *, best: bool = False) -> Path:
    from lorafusion_jax.checkpoint.folder import step_of

    if adapter not in names:
        raise ConfigError(
            "export.unknown-adapter",
            f"there is no adapter '{adapter}' in {folder.path}.",
            fix=f"one of: {', '.join(names)}",
        )
    source = folder.exported_step(adapter, step, best=best)
    if source is None or not source.is_dir():
        steps = [step_of(path) for path in folder.exported(adapter)]
        raise CheckpointError(
            "export.no-step",
            f"{adapter} has no exported weights"
            + (" of a best step." if best else " yet." if step is None else f" of step {step}."),
            fix=f"--step {' or '.join(map(str, steps))}" if steps else f"lorafusion resume {quoted(folder.path)}",
        )
    return source


def _refuse_merge_only(config: JobConfig, names: list[str]) -> None:
    from lorafusion_jax.adapters.table import adapter_kind

    kinds = {name: config.adapter(name).lora.adapter_kind for name in names}
    raise_all(
        [
            CheckpointError(
                "peft.kind",
                f"{name}: an adapter of kind {kind} has no form in PEFT.",
                why="it scales the columns of a projection, which LoRA cannot hold",
                fix=f"lorafusion export RUN {name} --merge --to FOLDER, which is exact",
            )
            for name, kind in kinds.items()
            if adapter_kind(kind).merge_only
        ]
    )


def _failure(events: Sequence[Mapping[str, Any]]) -> str | None:
    """The reason of an adapter's failure, if it failed."""
    ends = [event for event in events if event["kind"] in ("adapter-done", "adapter-failed")]
    return ends[-1].get("reason", "") if ends and ends[-1]["kind"] == "adapter-failed" else None


def _copy(source: Path, draft: Path) -> None:
    """Copies an exported folder and compares the copy with its digests."""
    fix = f"--step another step; if you changed the file yourself, remove {source / SUMS}"
    for file in sorted(source.rglob("*")):
        target = draft / file.relative_to(source)
        if file.is_dir() and not file.is_symlink():
            target.mkdir()
            continue
        try:
            check_regular(file, RECORD if file.name == SUMS else None)
        except NotReadableError as problem:
            refuse_damage("export.damaged", [Damage(file=file, why=str(problem))], fix=fix)
        shutil.copyfile(file, target)
    if has_digests(draft):
        refuse_damage("export.damaged", find_damage(draft), fix=fix)


def _no_link(run: Path, source: Path) -> None:
    """Raises on links between a run folder and the files of an adapter: they could point anywhere on this machine.

    Raises:
        CheckpointError: `export.link`.
    """
    folders = [run / part for part in reversed(source.relative_to(run).parents)][1:]
    links = [path for path in (*folders, source, *sorted(source.rglob("*"))) if path.is_symlink()]
    if links:
        raise CheckpointError(
            "export.link",
            f"{links[0].name} is a link, which is not followed.",
            where=str(links[0]),
            fix="put what it points to in its place, or export another --step",
        )


def hub() -> Any:
    """Returns the hub's client.

    Raises:
        ConfigError: `export.no-hub`.
    """
    try:
        import huggingface_hub
    except ImportError:
        message = "--push needs the hf extra, which is not installed."
        raise ConfigError("export.no-hub", message, fix=f"{install_line('hf')}, then: hf auth login") from None
    return huggingface_hub.HfApi()


def upload(folder: Path, name: str) -> None:
    """Creates a private model on the hub, if it is new, and uploads a folder to it.

    Raises:
        CheckpointError: `export.push`; the folder stays.
    """
    client = hub()
    try:
        client.create_repo(name, private=True, exist_ok=True)
        client.upload_folder(repo_id=name, folder_path=str(folder))
    except Exception as problem:  # the client raises many types; each means that nothing or not all was uploaded
        raise CheckpointError(
            "export.push",
            f"{folder} was written, but not uploaded to {name}.",
            why=f"{type(problem).__name__}: {problem}",
            fix=f"hf auth login, then: hf upload {name} {folder}",
        ) from None


def rows_by_adapter(log: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of a log by adapter."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(log):
        rows.setdefault(str(row.get("adapter")), []).append(row)
    return rows


def results(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a section of Markdown about the metrics of an adapter; "" without."""
    train, held_out = {}, {}
    for row in rows:
        if row["kind"] in ("step", "eval"):
            losses, key = (train, "loss") if row["kind"] == "step" else (held_out, "eval_loss")
            if row.get(key) is not None:
                losses[row["step"]] = row[key]
    if not train:
        return ""
    lines = ["", "## Results", "", "| step | training loss | held-out loss |", "|---|---|---|"]
    steps = _spread(sorted(held_out)) if len(held_out) > 1 else _spread(sorted({*train, *held_out}))
    lines += [f"| {step} | {loss_text(train.get(step))} | {loss_text(held_out.get(step))} |" for step in steps]
    lines += ["", f"Training loss of steps {min(train)} to {max(train)}: `{curve([train[s] for s in sorted(train)])}`"]
    return "\n".join(lines) + "\n"


def curve(values: list[float], width: int = 40) -> str:
    """A line of bars, each the mean of its part.

    >>> curve([4.0, 3.0, 2.0, 1.0])
    '█▆▃▁'
    """
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in means)


def _spread(steps: list[int]) -> list[int]:
    """At most `MOST_ROWS` of them, first and last included."""
    if len(steps) <= MOST_ROWS:
        return steps
    return [steps[round(index * (len(steps) - 1) / (MOST_ROWS - 1))] for index in range(MOST_ROWS)]
