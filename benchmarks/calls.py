"""How fast do training clients train by calls, beside jobs of the same rows in the same session?

    python -m benchmarks.calls --out results/calls --budget 200      # one GPU, Llama-3.1-8B's shape, random weights
    python -m benchmarks.calls --out /tmp/try --small                # in miniature on a CPU

One session trains, in turn, 16 jobs, 16 clients with the same rows, and one client with 64 rows a call. Each client
sends a call and a step, and the next of both before it reads the results. A row of `calls.jsonl` has the useful tokens
per second of one way, after a step of each adapter that is not timed; one row has the time of a forward call of one
short row on an idle session. What it does is printed with the seconds since its start.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import conditions
from benchmarks.harness import write_within_budget
from benchmarks.random_job import SHAPE, SMALL
from benchmarks.starting import write_base
from benchmarks.workloads import sample_lengths
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import source_of
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.session import Places, Session, Task, WindowPlanner
from lorafusion_jax.session.calls import ForwardBackward, OptimStep, Row
from lorafusion_jax.session.stream import Stream

STEPS, FORWARDS = 2, 20
ADAPTERS, ROWS, ROWS_ALONE = 16, 12, 64  # rows of a step: more take minutes
ALONE = "alone"
BEGAN = time.monotonic()


def main() -> int:
    return write_within_budget("calls", __doc__ or "", 200.0, measure)


def note(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:.0f} s: {text}", file=sys.stderr, flush=True)


def measure(small: bool) -> Iterator[dict[str, Any]]:
    prepare_machine()
    adapters, rows, rows_alone = (2, 6, 6) if small else (ADAPTERS, ROWS, ROWS_ALONE)
    with tempfile.TemporaryDirectory() as name:
        config = write_inputs(Path(name), small, adapters, rows, rows_alone)
        names = [adapter.name for adapter in config.adapters if adapter.name != ALONE]
        note("the base and the rows are written")
        places = Places.of({config.adapters[0].lora.rank: adapters}, dropout=False)
        session = Session.open_places(
            config.base, config.mesh, places, batch=config.batch, train=config.train, directory=name, row_targets=1
        )
        note("the session is open")
        windows = WindowPlanner(session)
        yield run_forwards(windows)
        yield {"adapters": adapters, "rows": rows, **run_jobs(windows, config, names), **conditions()}
        for loss in ("cross_entropy", "importance_sampling"):
            yield {"clients": adapters, "rows": rows, "loss": loss, **run_clients(windows, config, names, rows, loss)}
            one = run_clients(windows, config, [ALONE], rows_alone, loss)
            yield {"clients": 1, "rows": rows_alone, "loss": loss, **one}
        session.close()


def write_inputs(folder: Path, small: bool, adapters: int, rows: int, rows_alone: int) -> JobConfig:
    shape, capacity, tile, scale = (SMALL, 512, 16, 0.05) if small else (SHAPE, 8192, 128, 1.0)
    write_base(folder / "base", shape, shape["num_layers"])
    draw, entries = np.random.default_rng(0), []
    for number in range(adapters + 1):
        name, count = (ALONE, rows_alone) if number == adapters else (f"job-{number}", rows)
        lengths = sample_lengths(draw, "mix", number, count * (STEPS + 1), scale, capacity // 2)
        data = [{"input_ids": draw.integers(300, shape["vocab_size"], length).tolist()} for length in lengths]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
        entries.append({"name": name, "data": {"train": str(path), "max_length": capacity // 2}})
    job = {
        "base": {"model": str(folder / "base")},
        "batch": {"capacity_tokens": capacity, "tile_tokens": tile, "global_samples": rows},
        "lora": {"rank": 4 if small else 32, "dropout": 0.0},
        "adapters": entries,
    }
    return parse_config(source_of(job))


def run_jobs(windows: WindowPlanner, config: JobConfig, names: Sequence[str]) -> dict[str, Any]:
    session, tasks = windows.session, []
    for number, name in enumerate(names):
        job = select_adapters(config, [name])
        tasks.append(Task.of(job, prepare(job)))
        session.start(number, tasks[-1])
    note("jobs begin")
    until(windows, lambda: all(task.step >= 1 for task in tasks))
    note("jobs are timed")
    first, began = sum(map(tokens_left, tasks)), time.perf_counter()
    until(windows, lambda: all(task.status == "done" for task in tasks))
    seconds = time.perf_counter() - began
    for task in tasks:
        session.forget(task.name)
    return {"tokens": first, "seconds": seconds, "tokens_per_s": first / seconds}


def tokens_left(task: Task) -> int:
    assert task.cursor is not None
    lengths, start = task.cursor.job.sample_tokens, task.cursor.job.batch_positions(task.cursor.batch).start
    return sum(lengths[start:]) - sum(lengths[at] for at in task.cursor.done)


def run_clients(
    windows: WindowPlanner, config: JobConfig, names: Sequence[str], size: int, loss: str
) -> dict[str, Any]:
    session, clients = windows.session, []
    for name in names:
        stream = start_client(session, f"client-{name}", config.adapters[0].lora.rank)
        clients.append((stream, rows_of(select_adapters(config, [name]), loss)))

    def call(stream: Stream, rows: list[Row], step: int) -> Future[Any]:
        stream.submit(ForwardBackward(rows=rows[step * size : (step + 1) * size], loss=loss))
        return stream.submit(OptimStep())

    note(f"{len(names)} clients begin with {loss}")
    run_all(windows, [call(stream, rows, 0) for stream, rows in clients])
    note("they are timed")
    began, tokens = time.perf_counter(), sum(len(row.tokens) for _, rows in clients for row in rows[size:])
    waiting = [deque(call(stream, rows, step) for step in (1, 2)) for stream, rows in clients]
    for step in range(1, STEPS + 1):
        for (stream, rows), futures in zip(clients, waiting, strict=True):
            run_all(windows, [futures.popleft()])
            if step + 2 <= STEPS:
                futures.append(call(stream, rows, step + 2))
    seconds = time.perf_counter() - began
    for name in names:
        session.forget(f"client-{name}")
    return {"tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}


def rows_of(config: JobConfig, loss: str) -> list[Row]:
    """The samples of an adapter as rows; three quarters of those of a policy have no advantage."""
    (data,) = prepare(config).adapters.values()
    rows = []
    for number in data.order:
        tokens, _ = data.train.sample(int(number))
        inputs: dict[str, np.ndarray] = {"target_tokens": tokens[1:]}
        if loss != "cross_entropy":
            sampled = np.arange(len(tokens) - 1) >= 3 * len(tokens) // 4
            inputs |= {"logprobs": np.where(sampled, -11.0, 0.0), "advantages": np.where(sampled, 1.0, 0.0)}
        rows.append(Row(tokens=tokens[:-1], inputs=inputs))
    return rows


def run_forwards(windows: WindowPlanner) -> dict[str, Any]:
    note("forward calls begin")
    stream = start_client(windows.session, "short", windows.session.places.ranks[0])
    row = Row(tokens=np.arange(300, 308), inputs={"target_tokens": np.arange(301, 309)})
    seconds = []
    for _ in range(FORWARDS):
        began = time.perf_counter()
        run_all(windows, [stream.submit(ForwardBackward(rows=[row], forward_only=True))])
        seconds.append(time.perf_counter() - began)
    windows.session.forget("short")
    return {"forward_ms_p50": 1e3 * statistics.median(seconds[2:])}


def start_client(session: Session, name: str, rank: int) -> Stream:
    task = session.new_stream(name, rank=rank)
    free_place = session.find_place(task.spec)
    assert free_place is not None
    assert isinstance(task.source, Stream)
    session.start(free_place, task)
    return task.source


def run_all(windows: WindowPlanner, futures: list[Future[Any]]) -> None:
    until(windows, lambda: all(future.done() for future in futures))
    for future in futures:
        future.result()


def until(windows: WindowPlanner, is_done: Callable[[], bool]) -> None:
    while not is_done():
        window = windows.plan(48)
        windows.run(window, pause=is_done)
        if not window.slots and not windows.has_calls:
            windows.session.drain()


if __name__ == "__main__":
    raise SystemExit(main())
