"""lorafusion new: a job file for the user's own data, which `check` passes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lorafusion_jax.errors import ConfigError, DataError, LoraFusionError
from lorafusion_jax.files import make_folders

if TYPE_CHECKING:
    from lorafusion_jax.data.prepare import Prepared

GOALS = {
    "answers": "answer as the rows do",
    "preferences": "prefer the chosen answer of a row to the rejected one",
    "compare": "answer as the rows do, with several ranks and learning rates in one run; the best is named",
}
BASE = "a folder with config.json and *.safetensors, or org/name of a hub"
TITLE = "# Written by lorafusion new. lorafusion init --all shows every key.\n"
USUAL_CAPACITY, SHORTEST = 8192, 128  # tokens
MOST_SAMPLES, STEPS_OF_EPOCH, FEW_ROWS = 16, 20, 2000
HELD_OUT_OF_MANY, HELD_OUT_OF_FEW, MANY_ROWS, FEWEST_TO_SPLIT = 0.05, 0.1, 200, 20


def command(
    more: Annotated[list[str] | None, typer.Argument(metavar="DATA", help="more rows: --data data/*.jsonl")] = None,
    base: Annotated[str | None, typer.Option(help="base model: a folder, or org/name of a hub")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", help="rows: a file, a folder or hf:org/set; each makes an adapter"),
    ] = None,
    goal: Annotated[
        Literal["answers", "preferences", "compare"] | None,
        typer.Option(help="; ".join(f"{name}: {meaning}" for name, meaning in GOALS.items())),
    ] = None,
    held_out: Annotated[
        str | None, typer.Option("--eval", help="held-out rows", show_default="a share of the rows")
    ] = None,
    to: Annotated[Path, typer.Option("--out", "-o", help="the new job file")] = Path("jobs.yaml"),
) -> None:
    """Writes a job file for your data: asks for base, rows and goal, reads them, and checks the job.

    Columns, chat template, lengths and sizes of batches are those that fit the rows.

    Example: lorafusion new

    Example: lorafusion new --base models/Llama-3.1-8B --data law.jsonl --goal answers
    """
    if to.exists():
        raise ConfigError("new.exists", f"{to} exists already.", fix="--out with the name of a new file")
    missing = [f"--{name}" for name, value in (("base", base), ("data", data or more)) if not value]
    if missing and not (sys.stdin and sys.stdin.isatty()):
        fix = "--base FOLDER --data FILE, or a terminal, where it asks"
        raise ConfigError(
            "new.options", f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} needed.", fix=fix
        )
    from lorafusion_jax.checkpoint.base_model import find_base
    from lorafusion_jax.cli.check import command as check

    base = base or _ask("base model (a folder, or org/name of a hub)", lambda text: find_base(Path(), text, fix=BASE))
    find_base(Path(), base, fix=f"--base: {BASE}")
    data = [*(data or []), *(more or [])] or [_ask("rows (a file, a folder, or hf:org/set)", _find_rows)]
    if missing and goal is None:
        for name, meaning in GOALS.items():
            print(f"  {name:<12} {meaning}")
        goal = _ask("goal", _known_goal, default="answers")  # pyright: ignore[reportAssignmentType]
    values = job_for(base, data, goal or "answers", held_out)
    make_folders(to.parent)
    with to.open("x", encoding="utf-8") as file:
        file.write(_text(values, to.absolute().parent))
    print(f"written to {to}\n")
    check(to)


def _ask(question: str, read: Callable[[str], Any], default: str | None = None) -> str:
    """Asks until the answer can be read."""
    while True:
        text = typer.prompt(question, default=default).strip()
        try:
            read(text)
        except LoraFusionError as problem:
            print(problem, file=sys.stderr)
        else:
            return text


def _find_rows(text: str) -> None:
    from lorafusion_jax.config.data_sources import is_file
    from lorafusion_jax.data.sources import find_file

    if is_file(text):
        find_file(text, Path())


def _known_goal(text: str) -> None:
    if text not in GOALS:
        raise ConfigError("new.options", f"there is no goal '{text}'.", fix=f"one of {', '.join(GOALS)}")


def job_for(base: str, data: Sequence[str], goal: str, held_out: str | None = None) -> dict[str, Any]:
    """Returns a job with what its rows need. Paths are relative to the current folder.

    Args:
        base: folder or hub name.
        data: sources of rows; each makes an adapter.
        goal: one of `GOALS`.

    Raises:
        LoraFusionError: base or rows cannot be read, and no setting would help.
    """
    from lorafusion_jax.config.convert import adapter_name

    adapters, lengths, segments, fewest_rows = [], [], 1, sys.maxsize
    for source in data:
        settings: dict[str, Any] = {"train": source}
        values = {
            "base": {"model": base},
            "batch": {"capacity_tokens": "auto", "global_samples": 1},
            "adapters": [{"name": adapter_name(Path(source.removeprefix("hf:")).stem), "data": settings}],
        } | {key: value for key, value in _of_goal(goal).items() if key == "objective"}
        prepared = _fitted(values, settings)
        (rows,) = (entry.train for entry in prepared.adapters.values())
        segments = 1 if rows.segment_lengths is None else rows.segment_lengths.shape[1]
        lengths += rows.lengths.tolist()
        fewest_rows = min(fewest_rows, len(rows.lengths))
        if held_out is not None or len(rows.lengths) >= FEWEST_TO_SPLIT:
            share = HELD_OUT_OF_MANY if len(rows.lengths) >= MANY_ROWS else HELD_OUT_OF_FEW
            settings["eval"] = held_out or share
        settings.pop("max_length")
        adapters += values["adapters"]
    samples = max(1, min(MOST_SAMPLES, fewest_rows // STEPS_OF_EPOCH))
    longest = _power_of_two(-(-max(lengths) // segments))
    capacity = _power_of_two(max(longest * segments, samples * sum(lengths) // len(lengths)))
    values = {
        "base": {"model": base},
        "data": {"max_length": min(longest, _positions(base) or longest)},
        **_of_goal(goal),
        "epochs": 1 if fewest_rows >= FEW_ROWS else 3,
        "batch": {
            "global_samples": samples,
            "capacity_tokens": "auto" if longest * segments > USUAL_CAPACITY else min(capacity, USUAL_CAPACITY),
        },
        "adapters": adapters,
    }
    _check_shares(values)
    return values


def _check_shares(values: dict[str, Any]) -> None:
    """Holds nothing out of rows that are all equal."""
    from lorafusion_jax.api.jobs import load_job
    from lorafusion_jax.planning.checks import checked_data

    try:
        checked_data(load_job(values).config, [])
    except LoraFusionError as problem:
        if {error.code for error in getattr(problem, "errors", [problem])} != {"data.eval-share"}:
            raise
        for adapter in values["adapters"]:
            adapter["data"].pop("eval", None)


def _of_goal(goal: str) -> dict[str, Any]:
    """The sections of a job that its goal decides."""
    match goal:
        case "preferences":
            return {"objective": {"name": "dpo"}, "optim": {"lr": 2e-5}}
        case "compare":
            return {"lora": {"rank": [8, 32]}, "optim": {"lr": [1e-4, 3e-4]}}
        case _:
            return {"lora": {"rank": 16}, "optim": {"lr": 2e-4}}


def _power_of_two(tokens: int) -> int:
    return max(SHORTEST, 1 << (tokens - 1).bit_length())


def _positions(base: str) -> int | None:
    """Positions of the base; None for a base of no known kind, which `check` tells."""
    from lorafusion_jax.checkpoint.base_model import find_base
    from lorafusion_jax.data.model_fit import read_shape

    model = read_shape(find_base(Path(), base))
    return None if model is None else model.positions


def _fitted(values: dict[str, Any], settings: dict[str, Any]) -> Prepared:
    """Reads the rows of a job, and adds to the settings of its data what they need."""
    from lorafusion_jax.api.jobs import load_job
    from lorafusion_jax.planning.checks import checked_data

    settings["max_length"] = _positions(values["base"]["model"]) or USUAL_CAPACITY
    while True:
        try:
            prepared = checked_data(load_job(values).config, [])[1]
            notes = [note for entry in prepared.adapters.values() for note in entry.train.report.notes]
            if "chat_template" in settings or not any(note.startswith("[data.no-template]") for note in notes):
                return prepared
            settings["chat_template"] = _template_for(values["base"]["model"])
        except LoraFusionError as problem:
            errors = getattr(problem, "errors", [problem])
            more = {key: value for error in errors for key, value in _setting_for(error, values).items()}
            if not more.keys() - settings.keys():
                raise
            settings |= more


def _setting_for(error: LoraFusionError, values: dict[str, Any]) -> dict[str, Any]:
    """The setting of `data` that the fix of an error names; empty if there is none."""
    if error.code == "data.no-template":
        return {"chat_template": _template_for(values["base"]["model"])}
    columns = re.findall(r"(\w+): ([^<>{},]+)[,}]", error.fix) if error.fix.startswith("data.columns: {") else []
    is_complete = "<" not in error.fix and isinstance(error, DataError)
    return {"columns": dict(columns)} if columns and is_complete else {}


def _template_for(base: str) -> str:
    """The first named template whose special tokens the base has; `alpaca` has none."""
    from lorafusion_jax.checkpoint.base_model import find_base
    from lorafusion_jax.config.chat_templates import NAMED
    from lorafusion_jax.data.tokenizer import load_tokenizer

    tokens = load_tokenizer(find_base(Path(), base)).special_texts
    marks = {name: set(re.findall(r"<\|\w+\|>|<\w+_of_turn>|\[/?INST\]", text)) for name, text in NAMED.items()}
    return next((name for name, texts in marks.items() if texts and texts <= tokens.keys()), "alpaca")


def _text(values: dict[str, Any], folder: Path) -> str:
    """The job as a file in a folder: a line for each section and each adapter."""
    import yaml

    def line(value: Any) -> str:
        return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True).strip()

    def moved(name: Any) -> Any:
        is_relative = isinstance(name, str) and not os.path.isabs(name) and Path(name).exists()
        return os.path.relpath(name, folder) if is_relative else name

    lines = [f"{key}: {line(values[key])}" for key in values if key not in ("base", "adapters", "epochs")]
    lines = [f"base: {line({'model': moved(values['base']['model'])})}", *lines, f"epochs: {values['epochs']}"]
    lines.append("adapters:")
    for adapter in values["adapters"]:
        settings = {key: moved(value) for key, value in adapter["data"].items()}
        lines.append(f"  - {line({'name': adapter['name'], 'data': settings})}")
    return TITLE + "\n".join(lines) + "\n"
