"""Do many small adapters train as fast as a few on one card?

    python -m benchmarks.thousand --out results/thousand --budget 200      # one H200, Llama-3.1-8B's shape
    python -m benchmarks.thousand --out results/thousand --adapters 4096 --rank 4
    python -m benchmarks.thousand --out results/thousand --tile 64 --most 15 --base DIR    # of benchmarks.random_base
    python -m benchmarks.thousand --out /tmp/try --small                   # in miniature on a CPU

Rows of `thousand.jsonl`:
    {"part": "microbatch", ...}  seconds of a microbatch with 8 adapters and with 64, of as many rows
    {"part": "few", ...}         useful tokens per second of 4 adapters
    {"part": "first", ...}       of many on the same rows that take turns in 64 places: the first step of each, for
                                 which its weights are drawn
    {"part": "later", ...}       each leaves after its first step and comes again with its moments: the most moving.
                                 `of_few` is the ratio to the tokens per second of 4
`moving_s` is how long the host moved adapters, while the devices worked on; `peak_bytes` the memory of the card so far.
One session does all of it. Weights of the base and words are random; seconds of each round are bounded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import conditions
from benchmarks.harness import add_row, command_line
from benchmarks.random_base import add_base_option, random_base
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import source_of
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.sweep import MOST_ADAPTERS
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.planning.training_plan import train_jobs
from lorafusion_jax.planning.turns import NextUses
from lorafusion_jax.session import Session
from lorafusion_jax.session.assembler import Batches
from lorafusion_jax.session.loop import SlotHooks
from scheduling import Plan, SampleRef, Slot, issue_order, make_plan
from scheduling.pipeline import one_forward_one_backward

BATCH, WARM, TIMES, FEW = 4, 3, 10, 4
TARGETS = ["q_proj", "v_proj"]  # a state of rank 8 has 41 MB: a thousand of them wait in the memory of a small host
SECONDS = {"few": 15.0, "first": 45.0, "later": 30.0}  # at most
BUDGET = 200.0


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds; nothing new starts after them")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--adapters", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tile", type=int, default=128, help="rows of a tile: 64 pads short rows less")
    parser.add_argument("--most", type=float, default=max(SECONDS.values()), help="seconds of a round, at most")
    add_base_option(parser)
    options = parser.parse_args()
    stop = time.monotonic() + options.budget
    for row in measure(options):
        add_row(options.out / "thousand.jsonl", row)
        if time.monotonic() > stop:
            break
    return 0


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prepare_machine()
    small, rank = options.small, options.rank
    many, places, tile = (24, 16, 16) if small else (options.adapters, 64, options.tile)
    many = min(many, MOST_ADAPTERS - places - FEW)  # of a job, with the others
    with tempfile.TemporaryDirectory() as name:
        base = random_base(options.base or Path(name) / "base", small=small)
        training = Training(write_inputs(Path(name), base, small, many, places, rank, tile))
        yield {"part": "microbatch", **microbatches(training, places), "rank": rank, "tile": tile, **conditions()}
        few_rate = 0.0
        for group in ("few", "user"):
            for row in turns(training, group, places, options.most):
                few_rate = few_rate or row["tokens_per_s"]
                peak = training.session.facts.peak_bytes
                of_few = row["tokens_per_s"] / few_rate
                yield {**row, "rank": rank, "tile": tile, "of_few": of_few, "peak_bytes": peak, **conditions()}
        training.session.close()


def write_inputs(folder: Path, base: Path, small: bool, many: int, places: int, rank: int, tile: int) -> JobConfig:
    """A job of many adapters with two batches each, and of a few with as many rows of the same lengths."""
    draw, entries = np.random.default_rng(0), []
    capacity, scale = (512, 0.1) if small else (8192, 1.0)
    lengths = draw.integers(round(64 * scale), round(512 * scale), (many, BATCH * 2))
    few = lengths[: min(many, 256)].reshape(FEW, -1)
    for name, rows in [
        *((f"user-{n}", row) for n, row in enumerate(lengths)),
        *((f"few-{n}", row) for n, row in enumerate(few)),
        *((f"tile-{n}", [tile - 8] * max(BATCH * 2, capacity // tile // 8)) for n in range(places)),
    ]:
        path = folder / f"{name}.jsonl"
        data = [{"input_ids": draw.integers(300, 3000, length).tolist()} for length in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
        entries.append({"name": name, "data": {"train": str(path), "max_length": capacity // 2}})
    job = {
        "base": {"model": str(base)},
        "batch": {"capacity_tokens": capacity, "tile_tokens": tile, "global_samples": BATCH},
        "lora": {"rank": rank, "dropout": 0.0, "targets": TARGETS},
        "train": {"resident": places},
        "adapters": entries,
    }
    return parse_config(source_of(job))


class Training:
    """A session with the adapters of a job, which runs slots of plans."""

    def __init__(self, config: JobConfig):
        self.config, self.prepared = config, prepare(config)
        self.session = Session.open(config, self.prepared)
        self.session.start_all({})
        self.session.finish_loading()
        self.moving_s, self.moves = 0.0, 0

    def run(self, plan: Plan, first: int, end: int, seconds: float) -> tuple[int, float]:
        """Runs slots [first, end) until so many seconds have passed. Returns the slot it came to, and the seconds."""
        session, uses = self.session, NextUses.of(plan)
        batches = Batches(self.config, self.prepared, plan, session.assembler, session.tasks)
        session.executor.warm_up(batches.empty())
        names = [slot.adapters for slot in plan.slots]
        began = time.perf_counter()

        def must_pause(slot: int) -> bool:
            return slot >= end or not session.holds(names[slot]) or time.perf_counter() - began > seconds

        session.loop.hooks = SlotHooks(must_pause=must_pause)
        session.send_ahead(uses, first)
        todo = [event for event in issue_order(one_forward_one_backward(plan), 1) if event.slot >= first]
        while todo:
            todo = session.run(todo, names.__getitem__, batches.of)
            slot = todo[0].slot if todo else plan.num_slots
            if slot >= end or time.perf_counter() - began > seconds:
                session.drain()
                return slot, time.perf_counter() - began
            before, held = time.perf_counter(), set(session.index)
            session.take_places(uses, slot)
            self.moves += len(session.index.keys() - held)
            self.moving_s += time.perf_counter() - before
        return plan.num_slots, time.perf_counter() - began

    def slot_seconds(self, plan: Plan) -> float:
        """Seconds of a slot after the first ones."""
        session = self.session
        batches = Batches(self.config, self.prepared, plan, session.assembler, session.tasks)
        session.executor.warm_up(batches.empty())
        events = [event for event in issue_order(one_forward_one_backward(plan), 1) if event.kind != "update"]
        session.loop.hooks = SlotHooks()
        began = 0.0
        for first, end in ((0, WARM), (WARM, plan.num_slots)):
            began = time.perf_counter()
            session.run(
                [event for event in events if first <= event.slot < end],
                lambda slot: plan.slots[slot].adapters,
                batches.of,
            )
            session.drain()
        return (time.perf_counter() - began) / (plan.num_slots - WARM)


def microbatches(training: Training, places: int) -> dict[str, Any]:
    """Times full microbatches of 8 adapters and of many: forward and backward passes, without steps of adapters."""
    batch, result = training.config.batch, dict[str, Any]()
    jobs = [job for job in train_jobs(training.config, training.prepared) if job.name.startswith("tile")]
    training.session.hold([job.name for job in jobs])
    for adapters, key in ((8, "few"), (places, "many")):
        samples = range(batch.largest // batch.tile_tokens // adapters)
        part = tuple(SampleRef(job.name, 0, n // BATCH, n) for job in jobs[:adapters] for n in samples)
        plan = Plan(
            jobs=tuple(jobs),
            slots=(Slot(replicas=(part,)),) * (WARM + TIMES),
            capacity_tokens=batch.largest,
            num_stages=1,
            tile_tokens=batch.tile_tokens,
        )
        result |= {f"{key}_adapters": adapters, f"{key}_s": training.slot_seconds(plan)}
    return result | {"ratio": result["many_s"] / result["few_s"]}


def turns(training: Training, group: str, places: int, most_s: float) -> Iterator[dict[str, Any]]:
    """Trains the adapters of a group; where they are more than places, they leave after each step. Yields rounds."""
    jobs = [job for job in train_jobs(training.config, training.prepared) if job.name.startswith(group)]
    batch, in_turn = training.config.batch, len(jobs) > places
    began = time.perf_counter()
    plan = make_plan(
        jobs,
        capacity_tokens=batch.sizes,
        num_stages=1,
        tile_tokens=batch.tile_tokens,
        time_limit_s=0,
        most_open=places if in_turn else None,
        rests={job.name: (1,) for job in jobs} if in_turn else {},
    )
    plan_s = time.perf_counter() - began
    firsts = [index for index, slot in enumerate(plan.slots) if any(ref.batch == 0 for ref in slot.samples)]
    ends = {"first": firsts[-1] + 1, "later": plan.num_slots} if in_turn else {"few": plan.num_slots}
    tokens = [sum(plan.job_of[ref.adapter].sample_tokens[ref.sample] for ref in slot.samples) for slot in plan.slots]
    slot, _ = training.run(plan, 0, WARM, 1e9)  # compiles
    for name, end in ends.items():
        training.moving_s, training.moves = 0.0, 0
        reached, took = training.run(plan, slot, end, min(SECONDS[name], most_s))
        figures = {"slots": reached - slot, "tokens_per_s": sum(tokens[slot:reached]) / took, "seconds": took}
        figures |= {"moving_s": training.moving_s, "moves": training.moves, "plan_s": plan_s}
        yield {"part": name, "adapters": len(jobs), "places": places, "slots_of_plan": plan.num_slots, **figures}
        slot = end  # what a round of too many seconds has left is left out


if __name__ == "__main__":
    raise SystemExit(main())
