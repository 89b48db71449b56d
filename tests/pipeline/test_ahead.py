"""Processes that compile while a run starts: the run finds what they made, and goes on without it."""

import json

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from lorafusion_jax.cli.main import run
from lorafusion_jax.session import ahead, ahead_worker, lowered
from lorafusion_jax.training import launch


class Inside:
    """A process that does its work in this one."""

    def __init__(self, problem=None):
        self.problem, self.requests = problem, []

    def send(self, line):
        self.requests.append(ahead.Request.read(line))
        for rows in self.requests[-1].rows if self.problem is None else ():
            ahead_worker.compile_program(self.requests[-1], rows)

    def wait(self):
        return self.problem

    def close(self):
        pass


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(job, run, problem) → the row "started-up" and the processes, which fail with that problem."""
    monkeypatch.setattr(lowered, "lowered_folder", lambda: tmp_path / "programs" / "lowered")
    monkeypatch.setattr(ahead, "CORES", 0.25)
    compile_ahead = ahead.compile_ahead
    monkeypatch.setattr(launch, "compile_ahead", lambda config: compile_ahead(config, platform="gpu"))

    def begin(job, name, problem=None):
        made = []
        monkeypatch.setattr(ahead, "Worker", lambda: made.append(Inside(problem)) or made[-1])
        assert run(["train", str(job), "--out", str(tmp_path / name)]) == 0
        rows = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        return next(row for row in rows if row["kind"] == "started-up"), made

    return begin


@pytest.fixture
def empty_cache(tmp_path):
    """Nothing of what other tests have compiled."""
    shared, update = jax.config.jax_compilation_cache_dir, jax.config.update
    update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    compilation_cache.reset_cache()
    yield
    update("jax_compilation_cache_dir", shared)
    compilation_cache.reset_cache()


@pytest.fixture
def job(write_job, write_rows):
    rows = {name: write_rows(name, 6, longest=9) for name in ("yew", "fir")}
    adapters = [
        {"name": "yew", "data": {"train": rows["yew"], "eval": rows["fir"]}, "lora": {"rank": 3, "dropout": 0.1}},
        {"name": "fir", "data": {"train": rows["fir"]}, "lora": {"rank": 3, "dropout": 0.1}},
    ]
    return write_job(adapters, train={"max_steps": 1, "log_every_s": 0, "block_layers": 1})


def test_a_run_lowers_nothing_that_processes_have_made(empty_cache, start, job, monkeypatch):
    lower, by_run = lowered._lower, []
    monkeypatch.setattr(lowered, "_lower", lambda *call: by_run.append(call) or lower(*call))
    started, workers = start(job, "run")
    assert sorted(worker.requests[0].program for worker in workers) == ["backward", "evaluate"]
    assert len(by_run) == 3  # two by the processes, and forward by the run
    assert started["from_cache"] >= 2
    assert {f"{program} of stage 0 ahead" for program in ahead.PROGRAMS} <= started["parts"].keys()
    again, workers = start(job, "again")
    assert workers == []  # all was kept
    assert again["compiled"] == 0


def test_a_process_that_fails_costs_no_run(start, job):
    started, workers = start(job, "run", problem="no memory")
    assert len(workers) == 2
    assert not any("ahead" in part for part in started["parts"])
    assert started["ahead_failures"] == {f"{program} of stage 0 ahead": "no memory" for program in ahead.PROGRAMS}


def test_what_a_process_said_last_is_told():
    worker = ahead.Worker()
    worker.send("no request\n")
    assert "JSONDecodeError" in worker.wait()
    worker.close()
