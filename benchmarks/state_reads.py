"""How to copy trainable state to the host while training goes on: what each way costs the steps meanwhile.

    python -m benchmarks.state_reads --out results/reads            # one GPU with 40 GB, two minutes
    python -m benchmarks.state_reads --out /tmp/try --small         # in miniature on a CPU, to try the script

Steps of 0.3 s are dispatched one ahead, each with a small array from the host and a number back, as the trainer does.
A thread reads 1 G parameters in float32, which are arrays like those of six layers of Llama-3.1-8B's shape with four
adapters of rank 512. Ways that hold more pinned memory at a time come later, since XLA keeps what it has pinned. A row
has the longest step meanwhile, the time that steps lost, and the longest time in which no other thread could run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.conditions import conditions

WIDTHS = ((4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096))
LAYERS, RANKS, MB = 6, 2048, 2**20
PARTS = (16, 64, 128, 256)  # MB
QUIET = 5  # steps before and after a read


class Steps(threading.Thread):
    """Training: products of matrices until `stop`."""

    def __init__(self, size: int, count: int):
        super().__init__()
        self.ended: list[float] = []  # when each step was done
        self.dispatched_s: list[float] = []
        self.stop = False
        self._x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
        self._rows = np.arange(size, dtype=np.int32)

        def step(x, rows):
            x = jax.lax.fori_loop(0, count, lambda _, y: (x @ y) / jnp.linalg.norm(y).astype(y.dtype), x + rows[0] * 0)
            return x, x[0, 0]

        self._step = jax.jit(step).lower(self._x, self._rows).compile()

    def run(self) -> None:
        x, waiting = self._x, deque()
        while not self.stop:
            rows, began = jax.device_put(self._rows), time.perf_counter()
            x, number = self._step(x, rows)
            self.dispatched_s.append(time.perf_counter() - began)
            waiting.append((x, number))
            if len(waiting) > 1:
                done, number = waiting.popleft()
                done.block_until_ready()
                np.asarray(number)
                self.ended.append(time.perf_counter())


class Beats(threading.Thread):
    """Notes how long the interpreter kept this thread from running."""

    def __init__(self):
        super().__init__(daemon=True)
        self.gaps: list[tuple[float, float]] = []

    def run(self) -> None:
        last = time.perf_counter()
        while True:
            time.sleep(0.002)
            now = time.perf_counter()
            self.gaps.append((now, now - last))
            last = now


def state(small: bool) -> list[jax.Array]:
    layers, ranks, scale = (2, 16, 64) if small else (LAYERS, RANKS, 1)
    shapes = [(layers, i // scale, ranks) for i, _ in WIDTHS] + [(layers, ranks, o // scale) for _, o in WIDTHS]
    return [jax.random.normal(jax.random.key(number), shape) for number, shape in enumerate(shapes)]


def copy_program(arrays: list[jax.Array], size: int | None) -> Callable[[], list[list[jax.Array]]]:
    """Copies on the device, in parts of up to `size` bytes along the first axis that allows it."""

    def cut(x: jax.Array) -> list[jax.Array]:
        if size is None or x.nbytes <= size:
            return [jnp.copy(x)]
        axis = 0 if x.nbytes // x.shape[0] <= size else 1
        return jnp.array_split(x, min(-(-x.nbytes // size), x.shape[axis]), axis)

    program = jax.jit(lambda tree: [cut(x) for x in tree]).lower(arrays).compile()
    return lambda: program(arrays)


def read_in_turn(copies: list[list[jax.Array]]) -> Any:
    return [[np.asarray(part) for part in parts] for parts in copies]


def read_at_once(copies: list[list[jax.Array]]) -> Any:
    for part in jax.tree.leaves(copies):
        part.copy_to_host_async()
    return read_in_turn(copies)


def read_pinned(copies: list[list[jax.Array]]) -> Any:
    return [
        [np.asarray(jax.device_put(part, part.sharding.with_memory_kind("pinned_host"))) for part in parts]
        for parts in copies
    ]


def read_and_join(copies: list[list[jax.Array]]) -> Any:
    found = []
    for parts in copies:
        axis = next((axis for axis in (0, 1) if len(parts) > 1 and parts[0].shape[axis] < LAYERS), 1)
        found.append(np.concatenate([np.asarray(part) for part in parts], axis))
    return found


def observe(steps: Steps, beats: Beats, copy: Callable, read: Callable) -> dict:
    """Reads once while steps go on."""
    time.sleep(QUIET * 0.3)
    first, began, before = len(steps.ended), time.perf_counter(), len(beats.gaps)
    with ThreadPoolExecutor(1) as reader:
        held = reader.submit(lambda: read(copy())).result()
    took, beaten = time.perf_counter() - began, len(beats.gaps)
    time.sleep(3 * 0.3)
    ended = steps.ended[max(first - QUIET, 1) - 1 :]
    spans = [(b, b - a) for a, b in pairwise(ended)]
    usual = statistics.median(seconds for at, seconds in spans if at < began)
    during = [seconds for at, seconds in spans if at >= began]
    size = sum(x.nbytes for x in jax.tree.leaves(held))
    return {
        "gb": round(size / 1e9, 2),
        "copy_s": round(took, 3),
        "usual_step_s": round(usual, 4),
        "steps": [round(seconds, 3) for seconds in during],
        "longest_step_s": round(max(during), 3),
        "lost_s": round(sum(during) - usual * len(during), 3),
        "longest_dispatch_s": round(max(steps.dispatched_s[first:], default=0), 4),
        "longest_silence_s": round(max((gap for _, gap in beats.gaps[before:beaten]), default=0), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--budget", type=float, default=110, help="seconds; nothing new starts after them")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    stop = time.monotonic() + options.budget
    unit = 2**12 if options.small else MB
    arrays = state(options.small)
    whole = copy_program(arrays, None)
    parts = {size: copy_program(arrays, size * unit) for size in PARTS}
    ways = [
        ("parts of 16 MB, joined", parts[16], read_and_join),
        ("parts of 64 MB in turn", parts[64], read_in_turn),
        ("parts of 64 MB through pinned_host", parts[64], read_pinned),
        ("parts of 128 MB, joined", parts[128], read_and_join),
        ("parts of 256 MB in turn", parts[256], read_in_turn),
        ("arrays in turn", whole, read_in_turn),
        ("arrays through pinned_host", whole, read_pinned),
        ("arrays at once", whole, read_at_once),
    ]
    steps, beats = Steps(64 if options.small else 8192, 100 if options.small else 190), Beats()
    steps.start()
    beats.start()
    with (options.out / "state_reads.jsonl").open("a") as file, suppress(StopIteration):
        for name, copy, read in ways:
            for turn in (1, 2):
                row: dict = {"way": name, "turn": turn, "small": options.small}
                try:
                    row |= observe(steps, beats, copy, read)
                except Exception as problem:  # the other ways go on
                    row["error"] = repr(problem)[:500]
                file.write(json.dumps(row | conditions()) + "\n")
                file.flush()
                print(json.dumps(row), flush=True)
                if time.monotonic() > stop:
                    raise StopIteration
    steps.stop = True
    steps.join()


if __name__ == "__main__":
    main()
