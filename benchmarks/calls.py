"""How fast do training clients train by calls, beside jobs of the same rows in the same session?

    python -m benchmarks.calls --out results/calls --budget 200      # one GPU, Llama-3.1-8B's shape, random weights
    python -m benchmarks.calls --out /tmp/try --small                # in miniature on a CPU

`calls`: one session trains, in turn, 16 jobs, 16 clients with the same rows, and one client with 64 rows a call. Each
client sends a call and a step, and the next of both before it reads the results. A row of `calls.jsonl` has the useful
tokens per second of one way, after a step of each adapter that is not timed; one row has the time of a forward call of
one short row on an idle session.

`share`: the jobs alone, 64 samples at a time alone, and both in turn as in a worker, each with half of the time. A
sample that ends is followed by another. A row has the part of its own rate that each keeps, and another how far log p
of 16 samples is from that of a forward call on them, and how far that is from calls on one of them at a time: largest
and median.

`idle`: 16 clients in a session that has 64 more places of rank 8, without and with a model in each that asks nothing,
in turns; the last row has the mean of the turns.

All parts share one session; what it does is printed with the seconds since its start.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.conditions import conditions
from benchmarks.harness import add_row, command_line
from benchmarks.random_base import add_base_option, random_base
from benchmarks.random_job import SHAPE, SMALL
from benchmarks.workloads import sample_lengths
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import source_of
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.generation.requests import Answer, Request
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.serve.worker.loop import WorkerLoop
from lorafusion_jax.serve.worker.samples import Bank
from lorafusion_jax.session import Places, Session, Task, WindowPlanner
from lorafusion_jax.session.calls import ForwardBackward, OptimStep, Row
from lorafusion_jax.session.stream import Stream

PARTS = ("calls", "share", "idle")
STEPS, FORWARDS, IDLE, TURNS = 2, 20, 64, 2
ADAPTERS, ROWS, ROWS_ALONE = 16, 12, 64  # rows of a step: more take minutes
ALONE = "alone"
BEGAN = time.monotonic()


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--budget", type=float, default=200.0, help="seconds; nothing new starts after them")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["calls"])
    parser.add_argument("--rows", type=int, default=ROWS, help="of a step of each of the 16")
    add_base_option(parser)
    options = parser.parse_args()
    stop = time.monotonic() + options.budget
    for row in measure(options):
        add_row(options.out / "calls.jsonl", row)
        if time.monotonic() > stop:
            break
    return 0


def note(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:.0f} s: {text}", file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prepare_machine()
    small, parts = options.small, options.parts
    adapters, rows, rows_alone = (2, 6, 6) if small else (ADAPTERS, options.rows, ROWS_ALONE)
    count, idle_rank = (6, 2) if small else (IDLE, 8)
    with tempfile.TemporaryDirectory() as name:
        base = random_base(options.base or Path(name) / "base", small=small)
        config = write_inputs(Path(name), base, small, adapters, rows, rows_alone)
        names = [adapter.name for adapter in config.adapters if adapter.name != ALONE]
        note("the base and the rows are written")
        places = {config.adapters[0].lora.rank: adapters} | ({idle_rank: count} if "idle" in parts else {})
        with opened(config, places) as windows:
            yield run_forwards(windows)
            if "idle" in parts:
                yield from run_beside_idle(windows, config, names, rows, count, idle_rank)
            if {"calls", "share"} & {*parts}:
                jobs = {"adapters": adapters, "rows": rows, **run_jobs(windows, config, names)}
                yield jobs | conditions()
                if "calls" in parts:
                    yield from run_losses(windows, config, names, rows, rows_alone)
                if "share" in parts:
                    bank = Bank(windows.session, len(names))
                    yield compare_samples(windows, bank, *((8, 8) if small else (256, 64))) | conditions()
                    yield run_in_turn(windows, bank, config, names, jobs["tokens_per_s"], small) | conditions()


@contextmanager
def opened(config: JobConfig, places: dict[int, int]) -> Iterator[WindowPlanner]:
    session = Session.open_places(
        config.base, config.mesh, Places.of(places, dropout=False), batch=config.batch, train=config.train,
        directory=config.directory, row_targets=1,
    )  # fmt: skip
    note(f"a session with places {places} is open")
    yield WindowPlanner(session)
    session.close()


def run_beside_idle(
    windows: WindowPlanner, config: JobConfig, names: Sequence[str], rows: int, count: int, rank: int
) -> Iterator[dict[str, Any]]:
    """Clients without and with idle models in other places, in turns."""
    rates: dict[int, list[float]] = {0: [], count: []}
    idle = [f"idle-{number}" for number in range(count)]
    for turn in range(TURNS):
        for models in rates:
            for name in idle[:models]:
                start_client(windows.session, name, rank)
            row = run_clients(windows, config, names, rows, "cross_entropy")
            for name in idle[:models]:
                windows.session.forget(name)
            rates[models].append(row["tokens_per_s"])
            yield {"clients": len(names), "rows": rows, "idle": models, "turn": turn, **row}
    without, beside = (statistics.mean(values) for values in rates.values())
    yield {"clients": len(names), "rows": rows, "idle": count, "of_none": beside / without, **conditions()}


def run_losses(
    windows: WindowPlanner, config: JobConfig, names: Sequence[str], rows: int, rows_alone: int
) -> Iterator[dict[str, Any]]:
    for loss in ("cross_entropy", "importance_sampling"):
        together = run_clients(windows, config, names, rows, loss)
        yield {"clients": len(names), "rows": rows, "loss": loss, **together}
        yield {
            "clients": 1,
            "rows": rows_alone,
            "loss": loss,
            **run_clients(windows, config, [ALONE], rows_alone, loss),
        }


class KeptBusy:
    """Samples of which as many run at all times. In the place of `WorkerLoop.samples`, which reads them from files.

    Attributes:
        busy: some wait.
    """

    def __init__(self, bank: Bank, adapters: int, rows: int, prompt: int, new: int):
        self.busy, self._engine, self._draw = True, bank.engine, np.random.default_rng(0)
        self._samplers = [bank.snapshot({}) for _ in range(adapters)]
        self._shape, self._ended, self._asked = (prompt, new), 0, 0
        self._answers = [self._submit() for _ in range(rows)]

    @property
    def tokens(self) -> int:
        """Tokens that were sampled so far."""
        return self._ended + sum(len(answer.tokens) for answer in self._answers)

    def advance(self) -> None:
        self._engine.step()
        for at, answer in enumerate(self._answers):
            if answer.end is not None:
                assert answer.error is None, answer.error
                self._ended += len(answer.tokens)
                self._answers[at] = self._submit()

    def wait(self) -> None:
        self._engine.wait()

    def start(self) -> None:
        """Lets three times as many end as run at a time: their prompts, of one to all rows, compile what is needed."""
        while self._asked < 4 * len(self._answers):
            self.advance()

    def run(self, seconds: float) -> float:
        """Returns the tokens per second of nothing else."""
        self.wait()
        began, before = time.perf_counter(), self.tokens
        while time.perf_counter() - began < seconds:
            self.advance()
        return (self.tokens - before) / (time.perf_counter() - began)

    def _submit(self) -> Answer:
        prompt, new = self._shape
        self._asked += 1
        length = int(self._draw.integers(new // 4, 2 * new - new // 4 + 1))
        tokens = self._draw.integers(1, self._engine.model.vocab_size, prompt).tolist()
        sampler = self._samplers[self._asked % len(self._samplers)]
        return self._engine.submit(Request(tokens=tokens, sampler=sampler, sampling=Sampling(max_tokens=length)))


def compare_samples(windows: WindowPlanner, bank: Bank, prompt: int, new: int) -> dict[str, Any]:
    """Log p of samples of the base beside that of a forward call of an adapter that is not trained yet."""
    note("samples are compared with a forward call")
    engine, draw = bank.engine, np.random.default_rng(1)
    answers = []
    for seed in range(16):
        tokens = draw.integers(1, engine.model.vocab_size, prompt).tolist()
        sampling = Sampling(max_tokens=new, temperature=1.0, seed=seed, stop_tokens=())
        answers.append((tokens, engine.submit(Request(tokens=tokens, sampling=sampling))))
    while engine.busy:
        engine.step()
    stream, rows = start_client(windows.session, "compared", windows.session.places.ranks[0]), []
    for tokens, answer in answers:
        whole = np.array([*tokens, *answer.tokens])
        rows.append(Row(tokens=whole[:-1], inputs={"target_tokens": whole[1:]}))

    def forward(rows: list[Row]) -> list[np.ndarray]:
        future = stream.submit(ForwardBackward(rows=rows, forward_only=True))
        run_all(windows, [future])
        return [output["logprobs"][prompt - 1 :] for output in future.result().outputs]

    together, alone = forward(rows), [logprobs for row in rows for logprobs in forward([row])]
    windows.session.forget("compared")
    sampled = [np.array(answer.logprobs) for _, answer in answers]
    gaps, of_packing = np.abs(np.stack([sampled, alone]) - np.array(together)).reshape(2, -1)
    return {
        "compared_tokens": len(gaps), "gap_median": float(np.median(gaps)), "gap_max": float(gaps.max()),
        "packing_gap_median": float(np.median(of_packing)), "packing_gap_max": float(of_packing.max()),
    }  # fmt: skip


def run_in_turn(
    windows: WindowPlanner, bank: Bank, config: JobConfig, names: Sequence[str], jobs_alone: float, small: bool
) -> dict[str, Any]:
    """The jobs again, while samples have half of the time."""
    rows, prompt, new, seconds = (4, 8, 8, 2.0) if small else (64, 256, 128, 6.0)
    samples = KeptBusy(bank, len(names), rows, prompt, new)
    note("the first samples run")
    samples.start()
    note("samples are timed")
    samples_alone = max(samples.run(seconds) for _ in range(2))  # a program of another size may compile in one
    link: Any = SimpleNamespace(commands=queue.Queue(), refused="", emit=lambda *_, **more: None)
    turns: Any = WorkerLoop(windows.session, windows, link, {}, save_s=1e9, sampling_share=0.5)
    turns.samples.close()
    turns.samples = samples
    row = run_jobs(windows, config, names, turn=turns.run_in_turn, count=lambda: samples.tokens)
    jobs, sampled = row["tokens_per_s"], row["counted"] / row["seconds"]
    return {
        "sampling_share": 0.5, "adapters": len(names), "samples": rows, "seconds": row["seconds"],
        "jobs_tokens_per_s": jobs, "of_jobs_alone": jobs / jobs_alone, "sampled_per_s": sampled,
        "samples_alone_per_s": samples_alone, "of_samples_alone": sampled / samples_alone,
    }  # fmt: skip


def write_inputs(folder: Path, base: Path, small: bool, adapters: int, rows: int, rows_alone: int) -> JobConfig:
    shape, capacity, tile, scale = (SMALL, 512, 16, 0.05) if small else (SHAPE, 8192, 128, 1.0)
    draw, entries = np.random.default_rng(0), []
    for number in range(adapters + 1):
        name, count = (ALONE, rows_alone) if number == adapters else (f"job-{number}", rows)
        lengths = sample_lengths(draw, "mix", number, count * (STEPS + 1), scale, capacity // 2)
        data = [{"input_ids": draw.integers(300, shape["vocab_size"], length).tolist()} for length in lengths]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
        entries.append({"name": name, "data": {"train": str(path), "max_length": capacity // 2}})
    job = {
        "base": {"model": str(base)},
        "batch": {"capacity_tokens": capacity, "tile_tokens": tile, "global_samples": rows},
        "lora": {"rank": 4 if small else 32, "dropout": 0.0},
        "adapters": entries,
    }
    return parse_config(source_of(job))


def run_jobs(
    windows: WindowPlanner, config: JobConfig, names: Sequence[str], *, turn: Callable[[], bool] | None = None,
    count: Callable[[], int] = lambda: 0,
) -> dict[str, Any]:  # fmt: skip
    """Rate of the jobs, and what `count` counts meanwhile.

    Args:
        turn: runs a window, or something else; it returns whether it had anything to run.
    """
    session, tasks = windows.session, []
    for name in names:
        job = select_adapters(config, [name])
        tasks.append(Task.of(job, prepare(job)))
        free_place = session.find_place(tasks[-1].spec)
        assert free_place is not None
        session.start(free_place, tasks[-1])
    note("jobs begin")
    until(windows, lambda: all(task.step >= 1 for task in tasks), turn)
    note("jobs are timed")
    first, before, began = sum(map(tokens_left, tasks)), count(), time.perf_counter()
    until(windows, lambda: all(task.status == "done" for task in tasks), turn)
    seconds, counted = time.perf_counter() - began, count() - before
    for task in tasks:
        session.forget(task.name)
    return {"tokens": first, "seconds": seconds, "tokens_per_s": first / seconds} | (
        {"counted": counted} if turn else {}
    )


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


def until(windows: WindowPlanner, is_done: Callable[[], bool], turn: Callable[[], bool] | None = None) -> None:
    def run_window() -> bool:
        window = windows.plan(48)
        windows.run(window, pause=is_done)
        return bool(window.slots)

    while not is_done():
        if not (turn or run_window)() and not windows.has_calls:
            windows.session.drain()


if __name__ == "__main__":
    raise SystemExit(main())
