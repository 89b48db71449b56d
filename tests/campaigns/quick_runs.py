"""Commands of the command line in this process, on runs without devices, and what must be true of a run at its end."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from campaigns.quick_session import MODULUS, WEIGHTS, QuickSession, alone, export

from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.requests import request_files
from lorafusion_jax.checkpoint.saved_states import read_position
from lorafusion_jax.checkpoint.verify_folder import verify_folder
from lorafusion_jax.cli.main import run as lorafusion
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.optim.schedules import learning_rates
from lorafusion_jax.report.recorder import Recorder
from lorafusion_jax.session import adapter_state, task
from lorafusion_jax.training import exports, launch

ENDED = ("done", "cancelled", "failed")
MOST_RESUMES = 25
CODE = re.compile(r"error\[([\w.-]+)\]")


@contextmanager
def quick_runs() -> Iterator[pytest.MonkeyPatch]:
    """Runs of this process need no devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "Session", QuickSession)
        patch.setattr(exports, "write_adapter", export)
        patch.setattr(adapter_state, "check_optimizer", lambda *state: None)  # a number has none
        patch.setattr(yaml, "SafeLoader", yaml.CSafeLoader)  # this and what follows is nearly all time of a tiny run
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        patch.setattr(task, "learning_rates", _kept(learning_rates))
        yield patch


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function once for equal arguments, which need not be hashable."""
    results: dict[str, Any] = {}

    def call(*arguments: Any) -> Any:
        key = repr(arguments)
        if key not in results:
            results[key] = function(*arguments)
        return results[key]

    return call


@contextmanager
def listening(listener: Callable[[Any], None]) -> Iterator[None]:
    """Passes every event of a run to a listener, after it is written."""
    record = Recorder.__call__

    def call(recorder: Recorder, event: Any) -> None:
        record(recorder, event)
        listener(event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "__call__", call)
        yield


@dataclass(frozen=True, slots=True)
class Said:
    """What a command came to."""

    code: int
    text: str

    @property
    def error(self) -> str:
        """Code of its first error; empty if there is none."""
        match = CODE.search(self.text)
        return match[1] if match else ""


def command(*arguments: object) -> Said:
    """Runs a command of the command line in this process."""
    heard = io.StringIO()
    with redirect_stdout(heard), redirect_stderr(heard):
        code = lorafusion([str(argument) for argument in arguments])
    return Said(code, heard.getvalue())


def resume_to_the_end(run: Path) -> list[str]:
    """Resumes and continues what is paused until nothing is left. Returns the adapters that it continued.

    Raises:
        AssertionError: the run cannot go on.
    """
    continued: list[str] = []
    for _ in range(MOST_RESUMES):
        outcome = command("resume", run)
        assert not outcome.error, outcome.text
        assert outcome.code in (0, 1, 3), f"resume ended with {outcome.code}: {outcome.text[-1500:]}"
        rows = run_numbers(run)["adapters"]
        paused = [name for name, row in rows.items() if row["status"] == "paused"]
        for name in paused:
            outcome = command("continue", run, name)
            assert outcome.code == 0, outcome.text
        continued += paused
        if not paused and all(row["status"] in ENDED for row in rows.values()) and not request_files(run):
            return continued
    raise AssertionError(f"the run does not end: {run_numbers(run)}")


def losses(run: Path, *, shortened: Collection[str] = (), spoilt_logs: bool = False) -> list[str]:
    """What is wrong with a finished run: an adapter that is not where it would be undisturbed, damage, leftovers.

    Args:
        shortened: adapters that were asked to finish.
        spoilt_logs: whether metrics.jsonl and events.jsonl are not as they were written.
    """
    folder, numbers, problems = RunFolder(run), run_numbers(run), []
    config, position = folder.read_config(), read_position(folder.state) or {}
    prepared = prepare(config)
    steps: dict[str, dict[int, float]] = {name: {} for name in numbers["adapters"]}
    for row in read_rows(run / "metrics.jsonl"):
        if row["kind"] == "step":
            if row["step"] in steps[row["adapter"]]:
                problems.append(f"{row['adapter']} step {row['step']} is there twice")
            steps[row["adapter"]][row["step"]] = row["loss"]
    for name, row in numbers["adapters"].items():
        weights = alone(config.adapter(name), prepared.adapters[name])
        taken = position["adapters"][name]["step"]
        steps_of_data = row["steps"] if name in shortened else len(weights) - 1
        if row["status"] == "done" and not taken == row["steps"] == steps_of_data:
            problems.append(f"{name} took {taken} of {row['steps']} steps, and its data has {steps_of_data}")
        if not spoilt_logs:
            expected = {step: weights[step] / MODULUS for step in range(1, taken + 1)}
            if steps[name] != expected:
                problems.append(f"{name}: its losses are {steps[name]} instead of {expected}")
        latest = folder.latest(name)
        # A run that goes back to an older checkpoint keeps a folder that an adapter left later, before it was dropped.
        step = 0 if latest is None else int(latest.name.removeprefix("step-"))
        exact = row["status"] == "done"
        if taken and (latest is None or (step != taken if exact else step < taken)):
            problems.append(f"{name}: its newest folder {latest} is not that of step {taken}")
        elif taken and latest is not None and int(np.load(latest / WEIGHTS)) != weights[step]:
            problems.append(f"{name}: its newest folder {latest} does not hold its weights")
        if (best := run / "adapters" / name / "best").is_symlink() and not (best / WEIGHTS).exists():
            problems.append(f"{name}: its best folder is gone")
    # A request that was killed while it was written may be one that another process writes now: nobody removes it.
    left = (path.relative_to(run) for path in run.rglob(".*"))
    problems += [f"{path} is left over" for path in left if path.parts[0] != "control"]
    return problems


def damage(run: Path, but: Collection[str] = ()) -> list[str]:
    """What `lorafusion verify` finds, but in files of these names."""
    texts = [text for verdict in verify_folder(run) for text in verdict.damage]
    return [text for text in texts if not any(name in text for name in but)]
