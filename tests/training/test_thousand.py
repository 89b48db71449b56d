"""A thousand adapters in a few places: with joins, ends and kills, each trains as it does alone."""

from __future__ import annotations

import itertools
import json
import random
import shutil

import numpy as np
import pytest
import small_jobs
from watched_runs import crash_after, events_of, losses_of, weights_of

from lorafusion_jax.checkpoint.requests import write_addition, write_request
from lorafusion_jax.config import load_config
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import resume, train

COUNT, JOINED, PLACES, DRAWN = 1024, 48, 32, 20
pytestmark = pytest.mark.nightly  # trains a thousand adapters, twice


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_base):
    """The job of all adapters: those of a column, and after them those that join, of other ranks."""
    folder, draw = tmp_path_factory.mktemp("thousand"), random.Random(0)
    rows = [
        {
            "customer": f"c{number}",
            "prompt": " ".join(draw.choices(small_jobs.WORDS, k=draw.randint(1, 4))),
            "completion": " " + " ".join(draw.choices(small_jobs.WORDS, k=draw.randint(1, 4))),
        }
        for number in range(COUNT - JOINED)
        for _ in range(draw.randint(2, 5))
    ]
    draw.shuffle(rows)
    (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    joining = [
        {
            "name": f"joined-{number}",
            "data": {"train": small_jobs.write_rows(folder, f"joined-{number}", draw.randint(2, 5), longest=4)},
            "lora": {"rank": draw.randint(2, 4)},
            "seed": number,
        }
        for number in range(JOINED)
    ]
    sections = {
        "batch": {"capacity_tokens": 64, "tile_tokens": 16, "global_samples": 2},
        "data": {"max_length": 32},
        "save": {"every_steps": COUNT // 7, "keep": 2},
        "lora": {"rank": 4, "dropout": 0.1, "targets": ["q_proj"]},
        "optim": {"lr": 0.02, "schedule": "constant", "warmup": 0.0},
    }
    adapters = {"from": "all.jsonl", "split_by": "customer"}
    train = {"plan_seconds": 0.01, "resident": PLACES}
    first = load_config(small_jobs.write_job(folder, tiny_base, adapters, train=train, **sections))
    second = load_config(small_jobs.write_job(folder, tiny_base, joining, train={"plan_seconds": 0.01}, **sections))
    return first, second


def requests_of(first, second):
    """Joins, and ends of random others."""
    draw = random.Random(1)
    joins = [("add", list(second.adapters[at : at + 8])) for at in range(0, JOINED, 8)]
    whom = draw.sample([adapter.name for adapter in first.adapters], 12)
    ends = [(draw.choice(["cancel", "finish", "pause"]), name) for name in whom]
    draw.shuffle(requests := [*joins, *ends])
    return requests, set(whom)


def losses_by_adapter(run):
    """The losses of all adapters, read once: {adapter: {step: loss}}."""
    losses = {}
    for row in read_rows(run / "metrics.jsonl"):
        if row["kind"] == "step":
            losses.setdefault(row["adapter"], {})[row["step"]] = row["loss"]
    return losses


def asks_in_turn(run, requests):
    """A listener that asks one after another while the first half of a thousand steps is told."""
    waiting = iter(requests)
    every, steps = COUNT // (2 * len(requests)), itertools.count(1)

    def listen(event):
        if event.kind == "step" and next(steps) % every == 0 and (request := next(waiting, None)):
            action, whom = request
            if action == "add":
                write_addition(run, whom)
            else:
                write_request(run, action, whom)

    return listen


@pytest.fixture(scope="module")
def runs(job, tmp_path_factory):
    """A run, and another that is killed again and again; and who was ended early.

    Both go on from one state in which all requests have been taken: the slot at which one is taken is not the same in
    two runs, and a microbatch of other adapters rounds otherwise.
    """
    folder, draw = tmp_path_factory.mktemp("runs"), random.Random(2)
    requests, ended = requests_of(*job)
    with pytest.raises(KeyboardInterrupt):
        train(
            job[0],
            begun := folder / "begun",
            listeners=[asks_in_turn(begun, requests), crash_after("step", COUNT * 3 // 4)],
        )
    assert events_of(begun, "replanned"), "no request was taken"
    for name in ("whole", "killed"):
        shutil.copytree(begun, folder / name, symlinks=True)
    resume(whole := folder / "whole")
    killed = folder / "killed"
    for _ in range(4):
        try:
            resume(killed, listeners=[crash_after("step", draw.randint(COUNT // 8, COUNT // 4))])
        except KeyboardInterrupt:
            continue
        break
    else:
        resume(killed)
    return whole, killed, ended


def test_a_killed_run_resumes_bitwise(runs, job):
    whole, killed, _ = runs
    losses = losses_by_adapter(whole)
    assert losses == losses_by_adapter(killed)
    for adapter in (*job[0].adapters, *job[1].adapters):
        for key, array in weights_of(whole, adapter.name).items() if adapter.name in losses else ():
            np.testing.assert_array_equal(array, weights_of(killed, adapter.name)[key], err_msg=f"{adapter.name} {key}")


def test_each_trains_as_it_does_alone(runs, job, tmp_path):
    whole, _, ended = runs
    draw, counts = random.Random(3), (DRAWN * 3 // 4, DRAWN // 4)
    for config, count in zip(job, counts, strict=True):
        for name in draw.sample([adapter.name for adapter in config.adapters if adapter.name not in ended], count):
            train(select_adapters(config, [name]), alone := tmp_path / name)
            assert losses_of(whole, name).keys() == losses_of(alone, name).keys() > set()
            arrays = weights_of(whole, name)
            for key, array in weights_of(alone, name).items():
                np.testing.assert_allclose(arrays[key], array, rtol=0, atol=2e-5, err_msg=f"{name} {key}")
