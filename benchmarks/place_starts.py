"""How long does an adapter take to start in a free place of a session that trains? And how dense are its windows?

    python -m benchmarks.place_starts --out results/place_starts --work /dev/shm   # one H200, 8B, about four minutes
    python -m benchmarks.place_starts --out /tmp/try --small                       # in miniature on a CPU

Writes a model of Llama-3.1-8B's shape with random weights, opens a session with places, and trains some adapters.
Others start in free places, stop, and start again from their states while the first train on. Before it times, it
checks that an adapter that moved equals one that stayed. `place_starts.jsonl` has a row for each start: seconds of
`start` and until its first step is read, and the programs that it compiled. The density of a window stands beside
that of an offline plan.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.conditions import conditions
from benchmarks.random_job import SHAPE, SMALL, write_data
from benchmarks.starting import write_base
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import source_of
from lorafusion_jax.config.schema import BaseSettings, BatchSettings, MeshSettings
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.session import AdapterState, LiveSession, Places, Task
from lorafusion_jax.session.compiles import CompileCounter
from scheduling import make_plan

CHECK_STEPS = 3
LIMIT_S = 420


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="where files of the model are written; default: the system's folder")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    prepare_machine()
    began, small = time.monotonic(), options.small
    shape = SMALL if small else SHAPE
    with tempfile.TemporaryDirectory(prefix="place_starts_", dir=options.work) as folder:
        work = Path(folder)
        write_base(work / "base", shape, shape["num_layers"])
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(examples_directory() / "base" / name, work / "base" / name)
        tasks = [make_task(work, number, small) for number in range(6)]
        session = LiveSession.open(
            BaseSettings(model=str(work / "base"), dtype="float32" if small else "bfloat16"),
            MeshSettings(),
            Places.of({4: 4} if small else {16: 8}),
            batch=BatchSettings(capacity_tokens=256 if small else 8192, tile_tokens=16 if small else 128),
            on_progress=lambda text: print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True),
        )
        print(f"{time.monotonic() - began:6.1f} s  open", flush=True)
        check_moves(session, tasks[0])
        rows = [densities(session, tasks[:3])]
        for number in range(3):
            rows.append(time_start(session, tasks[3], None, f"new {number}"))
            rows.append(time_start(session, tasks[3], session.stop(place_of(session, tasks[3])), f"state {number}"))
            session.forget(place_of(session, tasks[3]))
            if time.monotonic() - began > LIMIT_S:
                break
        session.close()
    with (options.out / "place_starts.jsonl").open("a", encoding="utf-8") as file:
        for row in rows:
            print(row)
            file.write(json.dumps(row | {"small": small} | conditions()) + "\n")
    return 0


def make_task(work: Path, number: int, small: bool) -> Task:
    """An adapter with its own data."""
    mean, spread, longest = (40, 20, 100) if small else (500, 400, 2000)
    file = work / f"rows-{number}.jsonl"
    write_data(file, mean, spread, 64 if small else 1500, work / "base" / "tokenizer.json", longest)
    adapter = {
        "name": f"adapter-{number}",
        "data": {"train": str(file), "max_length": 256 if small else 4096},
        "lora": {"rank": 4 if small else 16, "dropout": 0.0},
        "batch": {"global_samples": (4, 8, 16)[number % 3]},
        "seed": number,
    }
    batch = {"capacity_tokens": 256 if small else 8192, "tile_tokens": 16 if small else 128}
    config = parse_config(source_of({"base": {"model": str(work / "base")}, "batch": batch, "adapters": [adapter]}))
    return Task.of(config, prepare(config))


def place_of(session: LiveSession, task: Task) -> int:
    return next(index for index, running in session.tasks.items() if running is task)


def start(session: LiveSession, task: Task, state: AdapterState | None = None) -> None:
    index = session.find_place(task.spec)
    assert index is not None
    session.start(index, task, state)


def run_until(session: LiveSession, task: Task, step: int) -> None:
    while task.step < step:  # slot by slot: a slot ends at most one batch of an adapter
        session.run(session.plan(1))
        session.drain()


def check_moves(session: LiveSession, task: Task) -> None:
    """An adapter that moves to another place between its steps equals one that stays."""
    states = []
    for moves in (False, True):
        start(session, task)
        for step in range(1, CHECK_STEPS + 1):
            run_until(session, task, step)
            if moves and step < CHECK_STEPS:
                index = place_of(session, task)
                state = session.stop(index)
                session.start((index + 1) % len(session.places.ranks), task, state)
        states.append(session.stop(place_of(session, task)))
    pairs = [(states[0].weights[name], states[1].weights[name]) for name in states[0].weights]
    worst = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
    assert worst <= 1e-5 or jax.default_backend() != "cpu", worst
    print(f"moved and stayed differ by {worst:.1e}", flush=True)


def densities(session: LiveSession, tasks: list[Task]) -> dict[str, object]:
    """Starts the adapters that train on, and compares a window of 48 slots with an offline plan of their jobs."""
    for task in tasks:
        start(session, task)
    window, batch = session.plan(48), session.config.batch
    began = time.perf_counter()
    slots = session.run(session.plan(8))
    session.drain()
    slot_s = (time.perf_counter() - began) / max(slots, 1)
    plan = make_plan(
        [task.source.job for task in tasks], capacity_tokens=batch.largest, num_stages=1, tile_tokens=batch.tile_tokens
    )
    return {"what": "density", "window": window.density, "offline": plan.density, "slot_s": round(slot_s, 4)}


def time_start(session: LiveSession, task: Task, state: AdapterState | None, what: str) -> dict[str, object]:
    """Starts an adapter while others have slots in flight."""
    session.run(session.plan(2))
    with CompileCounter() as programs:
        began = time.perf_counter()
        start(session, task, state)
        started = time.perf_counter()
        first = task.step + 1
        run_until(session, task, first)
        stepped = time.perf_counter()
    return {
        "what": f"start, {what}",
        "start_s": round(started - began, 3),
        "first_step_s": round(stepped - began, 3),
        "compiled": programs.compiled + programs.from_cache,
    }


if __name__ == "__main__":
    raise SystemExit(main())
