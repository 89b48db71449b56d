"""Processes that compile while a run starts: the run finds what they made, and goes on without it."""

import hashlib
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax._src import cache_key
from jax.experimental.compilation_cache import compilation_cache

from lorafusion_jax import sealed_programs
from lorafusion_jax.cli.main import run
from lorafusion_jax.machine import MEMORY_FRACTION
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
        monkeypatch.setattr(ahead, "Worker", lambda card: made.append(Inside(problem)) or made[-1])
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


@pytest.mark.parametrize(("gib", "processes"), [(139.8, 2), (94.0, 1), (79.2, 1), (44.4, 0), (22.0, 0)])
def test_processes_fit_beside_the_pool_of_the_run(gib, processes):
    card = int(gib * ahead.GIB)
    pool = int(card * MEMORY_FRACTION)
    assert ahead.processes_beside(pool, card) == processes
    taken = processes * (ahead.CONTEXT_BYTES + ahead.TRIES_BYTES)
    assert pool + taken + ahead.RESERVE_BYTES <= card or processes == 0


@pytest.mark.parametrize(("visible", "shown"), [(None, "1"), ("3,5", "5"), ("GPU-8d1, GPU-9c2", "GPU-9c2")])
def test_a_process_sees_the_card_of_its_stage(monkeypatch, visible, shown):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ahead.environment_of(SimpleNamespace(local_hardware_id=1))["CUDA_VISIBLE_DEVICES"] == shown


def test_handles_are_there_before_a_process_hears_of_its_program(monkeypatch):
    order = []
    monkeypatch.setattr(ahead, "create_handles", lambda cards: order.append(f"handles of {len(cards)} cards"))
    worker = SimpleNamespace(send=lambda line: order.append("request"), close=lambda: None)
    request = SimpleNamespace(stage=1, program="backward", line=str)
    ahead.Ahead([(0, worker), (1, worker)], ["card", "card"]).compile(lambda: [request])
    assert order == ["handles of 2 cards", "request"]


def test_another_process_keeps_programs_under_the_keys_of_the_run(monkeypatch):
    """A process that sees one card describes its devices otherwise: what it compiled was not found."""
    described = sealed_programs.topology()
    digests = [hashlib.sha256(), hashlib.sha256(), hashlib.sha256()]
    cache_key._hash_accelerator_config(digests[0], np.array(jax.local_devices()[:1]))
    monkeypatch.setattr(cache_key, "_hash_accelerator_config", lambda digest, devices: digest.update(b"one card"))
    cache_key._hash_accelerator_config(digests[1], np.array(jax.local_devices()[:1]))
    sealed_programs.use_topology(described)
    cache_key._hash_accelerator_config(digests[2], np.array(jax.local_devices()[:1]))
    assert digests[0].digest() == digests[2].digest() != digests[1].digest()


def test_what_a_process_said_last_is_told():
    worker = ahead.Worker(jax.devices()[0])
    worker.send("no request\n")
    assert "JSONDecodeError" in worker.wait()
    worker.close()
