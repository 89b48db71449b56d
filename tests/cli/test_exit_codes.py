"""Exit codes: 0 all done · 1 all failed · 3 some adapters failed · 130 interrupted, and resumed bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cli_helpers import weights
from forked_commands import Command

from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training.loop import PlanRun

DIVERGING = {
    "name": "sgd",
    "lr": 1e30,
    "clip": 0,
    "schedule": "constant",
}  # the second step sees weights beyond float32


def test_one_adapter_fails_and_the_other_is_done(lorafusion, job, finished):
    job.adapter("law")["optim"] = DIVERGING
    out = job.folder / "run"
    outcome = lorafusion("train", job.write(), "--out", out)
    assert outcome.code == 3, outcome.err
    assert "law  FAILED: " in outcome.out
    assert "others unaffected" in outcome.out
    assert weights(out)["med"] == weights(finished[1])["med"]
    assert outcome.last_line.startswith(f"next: lorafusion export {out} ")
    status = json.loads(lorafusion("status", out, "--json").out)["adapters"]
    assert (status["law"]["status"], status["med"]["status"]) == ("failed", "done")
    assert "not finite" in status["law"]["reason"]
    assert status["law"]["step"] < status["law"]["steps"]
    exported = lorafusion("export", out, "law", "--to", job.folder / "law")
    assert exported.code == 0
    assert re.search("law failed in training: .*not finite.*; check these weights", exported.out)
    assert "failed" not in lorafusion("export", out, "med", "--to", job.folder / "med").out
    assert lorafusion("resume", out, "--drop", "nobody").errors == ["resume.unknown-adapter"]
    assert lorafusion("resume", out, "--drop", "med").errors == ["resume.done"]
    assert lorafusion("resume", out, "--drop", "law").code == 3


def test_every_adapter_fails(lorafusion, job):
    for name in ("law", "med"):
        job.adapter(name)["optim"] = DIVERGING
    outcome = lorafusion("train", job.write(), "--out", job.folder / "run")
    assert outcome.code == 1
    assert outcome.out.count("FAILED") == 2
    assert outcome.out.count(", slot ") == 4, "as it happens, and at the end"


def test_nothing_is_computed_for_adapters_that_have_all_failed(lorafusion, job):
    """The devices would go through the rest of the plan and change nothing."""
    for name in ("law", "med"):
        job.adapter(name)["optim"] = DIVERGING
    job.values["epochs"] = 6
    run = job.folder / "run"
    outcome = lorafusion("train", job.write(), "--out", run, "mesh.stages=2")
    assert outcome.code == 1, outcome.err
    assert "stage 0" in outcome.out or "stage 1" in outcome.out
    plan, timeline = (json.loads((run / name).read_text()) for name in ("plan.json", "timeline.json"))
    ran = {span[2] for span in timeline["spans"]}
    failed = [row["slot"] for row in read_rows(run / "events.jsonl") if row["kind"] == "adapter-failed"]
    assert len(failed) == 2
    assert max(failed) <= len(ran) < max(failed) + 6 < len(plan["slots"]), "those in the pipeline, and no others"
    assert "no adapter was left to train" in outcome.out
    assert json.loads(lorafusion("status", run, "--json").out)["adapters"]["law"]["status"] == "failed"
    again = lorafusion("resume", run)
    assert (again.code, again.out.count("compil")) == (1, 0)
    assert f"{run} had already finished (2 failed)" in again.out


@pytest.fixture
def long_job(job):
    """The same job for many steps: epochs enough to be interrupted."""
    job.values["epochs"] = 6
    job.values["save"] = {}
    job.write()
    return job


# The command line in a process that compiles nothing: it traces as this process does, whose programs are on the disk.
COMMAND_LINE = """
from lorafusion_jax.__main__ import main
from lorafusion_jax.session import lowered
lowered.lowered_folder = lambda: None
main()
"""


@contextmanager
def started(job_path, run) -> Iterator[Command]:
    """A process that trains and has taken a step; killed at the end."""
    process = Command(
        ["-c", COMMAND_LINE, "train", str(job_path), "--out", str(run)],
        os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_NUM_CPU_DEVICES": "8"},
    )
    with process:
        try:
            deadline = time.monotonic() + 120
            while not any(row["kind"] == "step" for row in read_rows(run / "metrics.jsonl")):
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.005)
            yield process
        finally:
            process.kill()


def test_interrupt_saves_and_resume_continues_bitwise(lorafusion, long_job):
    whole, parts = long_job.folder / "whole", long_job.folder / "parts"
    assert lorafusion("train", long_job.path, "--out", whole).code == 0
    with started(long_job.path, parts) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "the state is saved" in err
    assert out.rstrip().splitlines()[-1] == f"next: lorafusion resume {parts}"
    status = lorafusion("status", parts)
    assert re.findall(r"(law|med) +interrupted", status.out) == ["law", "med"]
    assert "running" not in status.out
    assert status.last_line == f"next: lorafusion resume {parts}"
    stopped_at = json.loads(lorafusion("status", parts, "--json").out)["slot"]
    resumed = lorafusion("resume", parts)
    assert resumed.code == 0, resumed.err
    assert f"resumed at microbatch {stopped_at}" in resumed.out
    first = next(line for line in resumed.out.splitlines() if " mb  " in line)
    assert all(int(step) > 0 for step in re.findall(r"(?:law|med) (\d+)/", first)), first
    assert weights(parts) == weights(whole)
    assert _steps(parts) == _steps(whole)


@pytest.fixture
def listens_to_ctrl_c():
    """As a terminal's processes do: those that a script starts in the background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_ctrl_c")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_before_the_first_microbatch(lorafusion, job, monkeypatch, kind):
    def interrupted(*arguments, **named):
        os.kill(os.getpid(), kind)
        time.sleep(10)

    monkeypatch.setattr("lorafusion_jax.session.base.open_frozen", interrupted)
    outcome = lorafusion("train", job.path, "--out", job.folder / "run")
    assert outcome.code == 130
    assert outcome.last_line.startswith("next: lorafusion train")
    assert not (job.folder / "run").exists()


def test_status_tells_running_and_killed_runs_apart(lorafusion, long_job):
    out = long_job.folder / "run"
    long_job.values["epochs"] = 200
    long_job.write()
    with started(long_job.path, out) as process:
        metrics = (out / "metrics.jsonl").read_text()
        refused = lorafusion("resume", out)
        assert (refused.code, refused.errors) == (2, ["run.in-use"])
        assert f"process {process.pid} on " in refused.err
        assert (out / "metrics.jsonl").read_text().startswith(metrics)
        assert json.loads(lorafusion("status", out, "--json").out)["state"] == "running"
        assert process.poll() is None
    watched = lorafusion("status", out, "--watch")  # ends, though nobody has told an end
    words = " ".join(watched.out.split())  # a long name of a folder breaks the line
    assert f"stopped without notice: process {process.pid} has ended" in words
    assert watched.last_line == f"next: lorafusion resume {out}"


def test_second_signal_stops_at_once(lorafusion, job, monkeypatch):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    out = job.folder / "run"
    with monkeypatch.context() as patch:
        patch.setattr(PlanRun, "run", interrupted)
        outcome = lorafusion("train", job.path, "--out", out)
    assert outcome.code == 130
    assert "stopped at once" in outcome.err
    watched = lorafusion("status", out, "--watch")
    assert "stopped at once, by a signal" in " ".join(watched.out.split())
    assert watched.last_line == f"next: lorafusion resume {out}"
    assert lorafusion("resume", out).code == 0


def test_what_is_stopped_before_it_starts_is_started_as_it_was_typed(lorafusion, job, monkeypatch):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("lorafusion_jax.training.train", interrupted)
    outcome = lorafusion("train", job.path, "epochs=2", "--out", job.folder / "new run")
    assert outcome.code == 130
    assert outcome.last_line == f"next: lorafusion train {job.path} epochs=2 --out '{job.folder / 'new run'}'"


def _steps(run_folder) -> list[tuple]:
    return [
        (row["adapter"], row["step"], row["loss"])
        for row in read_rows(run_folder / "metrics.jsonl")
        if row["kind"] == "step"
    ]
