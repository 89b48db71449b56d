"""lorafusion export: one adapter of a run as a PEFT folder, or merged into a full model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from lorafusion_jax.checkpoint.base_files import base_digests, check_base
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.checkpoint.digests import FILE as SUMS
from lorafusion_jax.checkpoint.digests import find_damage, has_digests, refuse_damage
from lorafusion_jax.checkpoint.folder import RunFolder, step_of
from lorafusion_jax.checkpoint.new_folder import new_folder
from lorafusion_jax.checkpoint.peft_leaves import exported_spec
from lorafusion_jax.cli.common import RunPath, next_command
from lorafusion_jax.config.specs import adapter_spec, tokenizer_file
from lorafusion_jax.errors import CheckpointError, ConfigError
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.report.console import out, say
from lorafusion_jax.weights.table import NONE

NAME = "export"


def command(
    run: RunPath,
    adapter: Annotated[str, typer.Argument(help="name of the adapter")],
    to: Annotated[Path, typer.Option("--to", help="folder to write, new or empty")],
    merge: Annotated[bool, typer.Option("--merge", help="write the full model with the adapter merged in")] = False,
    step: Annotated[int | None, typer.Option(help="exported step; default the newest")] = None,
) -> None:
    """Writes an adapter as a PEFT folder or merged into a full model.

    Example: lorafusion export runs/exp1 law --to out/law
    """
    folder = RunFolder(run)
    config = folder.read_config()
    source = _source(folder, [entry.name for entry in config.adapters], adapter, step)
    _no_link(folder.path, source)
    exported = exported_spec(adapter_spec(config.adapter(adapter), tokenizer=tokenizer_file(config)))
    console = out()
    failure = _failure(folder, adapter)
    if failure is not None:
        say(console, f"{adapter} failed in training: {failure}; check these weights before you use them", "yellow")
    if merge and exported.head is not None:
        raise ConfigError(
            "export.head",
            f"{adapter} has a head of its own ({', '.join(exported.head.modules)}), which a merged model cannot hold.",
            fix="without --merge; PeftModel.merge_and_unload merges it into a model that has such a head",
        )
    if merge:
        from lorafusion_jax.checkpoint.merge import merge_adapter

        base = base_directory(config)
        check_base(folder.read_record()["base_files"], base_digests(base), base)
        report = merge_adapter(base, source, to, kind=exported.kind)
        console.print(f"merged {adapter} (step {step_of(source)}) into a full model: {to}", highlight=False)
        if config.base.quantize != NONE:
            trained_on = f"{adapter} was trained on the base quantised as {config.base.quantize}"
            say(console, f"  {trained_on}; the original weights are merged, so outputs differ a little", "yellow")
        console.print(f"  {report.num_changed} tensors changed, largest change {report.max_delta:.3g}", highlight=False)
        next_command(
            console, f"python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{to}')\""
        )
        return
    from lorafusion_jax.checkpoint.peft import read_adapter

    with new_folder(to) as draft:
        _copy(source, draft)
        spec, _ = read_adapter(draft, exported.kind, exported.head)
    console.print(f"exported {adapter} (step {step_of(source)}): {to}", highlight=False)
    console.print(
        f"  re-read: rank {spec.rank}, alpha {spec.alpha:g}, targets {', '.join(spec.targets)}", highlight=False
    )
    next_command(console, f"lorafusion export {run} {adapter} --merge --to {to}-merged")


def _source(folder: RunFolder, names: list[str], adapter: str, step: int | None) -> Path:
    if adapter not in names:
        raise ConfigError(
            "export.unknown-adapter",
            f"there is no adapter '{adapter}' in {folder.path}.",
            fix=f"one of: {', '.join(names)}",
        )
    source = folder.latest(adapter) if step is None else folder.adapter_step(adapter, step)
    if source is None or not source.is_dir():
        steps = [step_of(kept) for kept in folder.exported(adapter)]
        raise CheckpointError(
            "export.no-step",
            f"{adapter} has no exported weights" + (" yet." if step is None else f" of step {step}."),
            fix=f"--step {' or '.join(map(str, steps))}" if steps else f"lorafusion resume {folder.path}",
        )
    return source


def _failure(folder: RunFolder, adapter: str) -> str | None:
    """The reason of the adapter's failure, if it failed."""
    ends = [
        event
        for event in read_rows(folder.path / "events.jsonl")
        if event.get("adapter") == adapter and event["kind"] in ("adapter-done", "adapter-failed")
    ]
    return ends[-1].get("reason", "") if ends and ends[-1]["kind"] == "adapter-failed" else None


def _copy(source: Path, draft: Path) -> None:
    """Copies an exported folder and compares the copy with its digests."""
    for file in sorted(source.rglob("*")):
        target = draft / file.relative_to(source)
        if file.is_dir() and not file.is_symlink():
            target.mkdir()
        else:
            shutil.copyfile(file, target)
    if has_digests(draft):
        fix = f"--step another step; if you changed the file yourself, remove {source / SUMS}"
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
