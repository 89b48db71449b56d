"""Runs that stand still and are asked to change: adapters join, are extended or dropped, or the run moves."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import small_jobs
from campaigns.quick_runs import command, damage, listening, losses, resume_to_the_end

from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.checkpoint.requests import request_files

ROWS = {"ask": 5, "law": 4, "tax": 5}
SHARED = {"optim": {"lr": 1e-3, "schedule": "cosine", "warmup": 0.0}, "data": {"max_length": 32}}

# Whether the run is done, what is asked of it, and with what it is resumed.
EXTEND_ASK = ("extend", "ask", "--steps", "2")
ADD_TAX = ("add", "more.yaml")
CHANGES: dict[str, tuple[bool, list[tuple[str, ...]], list[str]]] = {
    "add": (False, [ADD_TAX], []),
    "extend": (False, [EXTEND_ASK], []),
    "extend what is done": (True, [EXTEND_ASK], []),
    "extend what is done, elsewhere": (True, [EXTEND_ASK], ["mesh.stages=2"]),
    "add, elsewhere": (False, [ADD_TAX], ["mesh.data=2"]),
    "move": (False, [], ["mesh.stages=2", "mesh.data=2"]),
    "all": (False, [ADD_TAX, EXTEND_ASK, ("pause", "law"), ("weight", "ask", "3")], ["mesh.data=2"]),
    "drop": (False, [ADD_TAX], ["--drop", "law"]),
}


def write_jobs(home: Path, base: Path) -> None:
    """The job of a run, and more.yaml of an adapter that joins it."""
    for name, count in ROWS.items():
        small_jobs.write_rows(home, name, count, longest=6)
    small_jobs.write_rows(home, "held", 2, longest=4)
    batch = {"capacity_tokens": 48, "tile_tokens": 16, "global_samples": 2}
    train = {"plan_seconds": 0.01, "log_every_s": 0, "eval_every_steps": 1}  # most steps are the best so far
    entries = [_entry("ask"), _entry("law")]
    small_jobs.write_job(home, base, entries, batch=batch, save={"every_steps": 2, "keep": 1}, train=train, **SHARED)
    (home / "more.yaml").write_text(json.dumps({"adapters": [_entry("tax")], **SHARED}))


def stop_after_a_step(home: Path, *, done: bool) -> Path:
    """A run that stands still after its first step, or that is done."""
    run = home / f"stopped-{done}"

    def stop(event: Any) -> None:
        if event.kind == "step" and not done:
            signal.raise_signal(signal.SIGTERM)

    with listening(stop):
        assert command("train", home / "jobs.yaml", "--out", run).code == (0 if done else 130)
    return run


def ask(home: Path, change: str, to: Path | None = None) -> Path:
    """A new copy of the run that stands still, with the requests of the change."""
    done, requests, _ = CHANGES[change]
    run = to or home / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(home / f"stopped-{done}", run, symlinks=True)
    for action, *more in requests:
        rest = [home / text if text.endswith(".yaml") else text for text in more]
        assert command(action, run, *rest).code == 0
    return run


def assert_nothing_lost(run: Path, change: str) -> None:
    """Resumes to the end, where every adapter must be where it would be undisturbed."""
    resume_to_the_end(run)
    problems = losses(run) + damage(run)
    assert not problems, problems
    names = {"ask", "law"} | ({"tax"} if ADD_TAX in CHANGES[change][1] else set())
    assert set(run_numbers(run)["adapters"]) == names
    assert request_files(run) == []


def _entry(name: str) -> dict[str, Any]:
    data = {"train": f"{name}.jsonl", "eval": "held.jsonl"}
    return {"name": name, "data": data, "seed": list(ROWS).index(name) + 1, "batch": {"global_samples": 2}}
