"""A decoder layer on a quantised base, forward and backward: times, where they go, then what the results differ by.

    python -m benchmarks.quantised_layer --lower build/lowered            # ahead, on any machine with the same jax
    python -m benchmarks.quantised_layer --out results/quantised_layer [--lowered build/lowered] [--seconds 105]
    python -m benchmarks.quantised_layer --out build/try --small          # a CPU, to try the script

Programs (`quantised_programs.py`) are compiled side by side, and timed with what is compiled after `--compile-seconds`.
Times are medians of interleaved rounds, ratios are over the frozen bfloat16 layer of the same rounds. Every row is
written at once, and a program that fails writes its error. Rows (`quantised_layer.jsonl`):

    layer     case, us, over_frozen_bf16
    product   one product of 8-bit floats by cuBLAS and by our kernel: us, tflops
    kernel    case, kernel, us and times a call: the kinds of kernels of that layer's program, longest first
    sequence  case, events: (kernel, us) of one call in order
    check     case, relative errors of y, dx, dA and dB next to the layer in bfloat16 on what the weights stand for, and
              over those of XLA's form, which rounds the same rows: a layer rounds four times in a row, and what differs
              by a bfloat16 rounding before may be rounded to another neighbour
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import kernel_layer as kl
from benchmarks.conditions import conditions
from benchmarks.harness import add_row
from benchmarks.quantised_programs import Program, layers, lowered, products, write_lowered
from pallas_kernels.tuning.timing import time_calls

WORKERS = 12
REST_S = 20  # what profiles and checks take
FIRST, USUAL, XLA, EXACT = "frozen bf16", "fp8", "fp8 by xla", "fp8 dequantised"
BOUND = 1.1  # times the errors of XLA's form: sums over millions of roundings, of which a tenth more would be a fault
SMALL = kl.Shape(name="small", width=128, heads=2, key_heads=1, head=64, inner=256, tokens=256)


class Rows:
    """Writes a row as soon as it is known, and counts the time that is left."""

    def __init__(self, out: Path, seconds: float):
        self._file, self._end = out / "quantised_layer.jsonl", time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def add(self, **row: Any) -> None:
        add_row(self._file, row)

    def attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """Runs a part; what fails is a row of its own."""
        if self.left_s < 0:
            self.add(part=name, skipped="no time left")
            return None
        try:
            return call()
        except Exception as error:
            self.add(part=name, error=f"{type(error).__name__}: {error}"[:400])
            traceback.print_exc(limit=3)
            return None


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lower", type=Path, help="trace for an H200 and write the programs to this folder")
    parser.add_argument("--lowered", type=Path, help="read them from there")
    parser.add_argument("--seconds", type=float, default=105)
    parser.add_argument("--compile-seconds", type=float, default=45)
    parser.add_argument("--cases", nargs="+", help="names of layers; all by default")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script on a CPU")
    given = parser.parse_args()
    shape = SMALL if given.small else kl.SHAPES[0]
    own_kernels = bool(given.lower) or jax.default_backend() == "gpu"
    chosen = [program for program in layers(shape) if not given.cases or program.name in given.cases]
    chosen += [] if given.cases else list(products(shape, own_kernels=own_kernels))
    if given.lower:
        given.lower.mkdir(parents=True, exist_ok=True)
        for program in chosen:
            write_lowered(program, given.lower)
            print(program.file, flush=True)
        return
    out = Rows(given.out, given.seconds)
    out.add(part="conditions", **conditions())
    budget = {"rounds": 2, "round_s": 0.001} if given.small else {"rounds": 7, "round_s": 0.04}
    threading.Timer(given.seconds + 15, partial(os._exit, 1)).start()  # a kernel that never ends would hold it, too
    compiled = Compiled(out, given.lowered)
    compiled.start(chosen, began + given.compile_seconds)
    out.attempt("layer", partial(compiled.time_layers, budget))
    if compiled.wait_for_late(REST_S):
        out.attempt("layer", partial(compiled.time_layers, budget))
    out.attempt("kernels", compiled.profile)
    out.attempt("product", partial(compiled.time_products, budget))
    out.attempt("check", compiled.check)
    out.add(part="end", left_s=out.left_s)
    sys.stdout.flush()
    os._exit(0)  # a compilation that goes on would hold the interpreter


class Compiled:
    """Programs by name as they get compiled, with their operands."""

    def __init__(self, out: Rows, folder: Path | None):
        self._out, self._folder = out, folder
        self._done: dict[str, tuple[Program, Callable, tuple]] = {}
        self._us: dict[str, float] = {}
        self._layers: list[Future] = []
        self._products: list[Future] = []  # compiled when all layers are

    def start(self, programs: list[Program], until: float) -> None:
        """Compiles what it can until then; the rest goes on."""
        pool, futures = ThreadPoolExecutor(WORKERS), self._layers
        for number, program in enumerate(programs):
            if time.monotonic() > until:
                self._out.add(part=program.part, case=program.name, skipped="no time left to compile")
                continue
            # The first two by themselves: cuBLAS's algorithms are chosen by their time, and the others take the same.
            before = list(futures if program.part == "product" else futures[: min(number, 2)])
            compile_one = partial(self._compile, program, before)
            future = pool.submit(self._out.attempt, f"{program.part} {program.name}", compile_one)
            (futures if program.part == "layer" else self._products).append(future)
            if number < 2:
                future.result()
        wait(futures, timeout=max(0.0, until - time.monotonic()))

    def _compile(self, program: Program, before: list[Future]) -> None:
        for future in before:
            future.result()
        start = time.monotonic()
        operands = program.operands()
        try:
            compiled = lowered(program, operands, self._folder).compile()
        except Exception as error:
            if self._folder is None:
                raise
            self._out.add(part=program.part, case=program.name, file_failed=str(error)[:200])
            compiled = lowered(program, operands, None).compile()
        weights = operands[0]["w"] if program.part == "layer" else ()
        self._done[program.file] = program, compiled, operands
        self._out.add(
            part="compiled", case=program.name, of=program.part, seconds=round(time.monotonic() - start, 1),
            weights_mb=sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) / 1e6, left_s=round(self._out.left_s),
        )  # fmt: skip

    def _of(self, part: str) -> dict[str, tuple[Program, Callable, tuple]]:
        return {
            program.name: compiled for compiled in list(self._done.values()) if (program := compiled[0]).part == part
        }

    def wait_for_late(self, rest_s: float) -> bool:
        """Waits for layers that were not ready when the others were timed; whether there are any."""
        wait(self._layers, timeout=max(0.0, self._out.left_s - rest_s))
        return any(name not in self._us for name in self._of("layer"))

    def time_layers(self, budget: dict) -> None:
        """Times what was not timed yet, next to the same two again."""
        untimed = {
            name: compiled
            for name, compiled in self._of("layer").items()
            if name not in self._us or name in (FIRST, USUAL)
        }
        times = time_calls({name: (call, [operands]) for name, (_, call, operands) in untimed.items()}, **budget)
        for name, timing in times.items():
            over = timing.p50_us / times[FIRST].p50_us if FIRST in times else None
            self._out.add(part="layer", case=name, over_frozen_bf16=over, **dataclasses.asdict(timing))
            self._us[name] = timing.p50_us

    def time_products(self, budget: dict) -> None:
        wait(self._products, timeout=max(0.0, self._out.left_s - REST_S / 2))
        groups: dict[tuple, dict] = defaultdict(dict)
        for program, call, operands in list(self._done.values()):
            if program.part == "product":
                groups[program.shape][program.name] = (call, [operands])
        for (T, K, N), calls in groups.items():
            for name, timing in time_calls(calls, **budget | {"round_s": budget["round_s"] / 4}).items():
                us = timing.p50_us
                self._out.add(part="product", case=name, shape=[T, K, N], us=us, tflops=2e-6 * T * K * N / us)

    def profile(self) -> None:
        """The usual layer, and the fastest one by our kernels."""
        layers = self._of("layer")
        ours = [name for name in self._us if name.startswith("fp8 ") and name not in (XLA, EXACT)]
        for name in (USUAL, *sorted(ours, key=lambda name: self._us[name])[:1]):
            if name in self._us and self._out.left_s > 10:
                _, call, operands = layers[name]
                profile(self._out, name, partial(call, *operands), runs=5)

    def check(self) -> None:
        """Next to exact inputs of products on the same weights."""
        layers = {name: compiled[1:] for name, compiled in self._of("layer").items() if name.startswith("fp8")}
        if EXACT not in layers or XLA not in layers:
            return
        wanted = _results(*layers.pop(EXACT))
        usual = _errors(_results(*layers[XLA]), wanted)
        for name, (call, operands) in layers.items():
            if self._out.left_s < 5:
                return
            errors = _errors(_results(call, operands), wanted)
            over = {key: [a / b for a, b in zip(errors[key], usual[key], strict=True)] for key in errors}
            ok = max(jax.tree.leaves(over)) <= BOUND
            self._out.add(part="check", case=name, errors=errors, over_xla=over, ok=ok)


def _errors(got: dict[str, list[np.ndarray]], wanted: dict[str, list[np.ndarray]]) -> dict[str, list[float]]:
    return {key: [_relative(a, b) for a, b in zip(got[key], wanted[key], strict=True)] for key in wanted}


def _results(call: Callable, operands: tuple) -> dict[str, list[np.ndarray]]:
    y, (dx, *banks) = call(*operands)
    results = {"y": [y[:512]], "dx": [dx[:512]]}
    for key, bank in zip(("da", "db"), banks, strict=True):
        results[key] = [bank[site] for site in kl.SITES]
    return jax.tree.map(lambda array: np.asarray(array, np.float32), results)


def _relative(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def profile(out: Rows, name: str, call: Callable[[], Any], runs: int) -> None:
    """How long each kind of kernel takes in a call, and how long everything from the first to the last."""
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([call() for _ in range(runs)][-1])
        traces = list(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(traces[0]))
        events = [
            (event.start_ns, event.duration_ns, event.name)
            for plane in data.planes if plane.name.startswith("/device:GPU")
            for line in plane.lines if line.name.startswith("Stream")
            for event in line.events
        ]  # fmt: skip
    events.sort()
    if not events:
        return
    spent, count = defaultdict(float), defaultdict(int)
    for _, duration, kind in events:
        kind = re.sub(r"[._]\d+$", "", kind)
        spent[kind] += duration / 1e3 / runs
        count[kind] += 1
    elapsed = (max(start + duration for start, duration, _ in events) - events[0][0]) / 1e3 / runs
    busy = round(sum(spent.values()), 1)
    out.add(part="kernels", case=name, busy_us=busy, elapsed_us=elapsed, kernels=len(events) / runs)
    for kind, us in sorted(spent.items(), key=lambda pair: -pair[1])[:50]:
        out.add(part="kernel", case=name, kernel=kind[:120], us=round(us, 1), times=count[kind] / runs)
    last = [[kind[:60], round(duration / 1e3, 1)] for _, duration, kind in events[-len(events) // runs :]]
    out.add(part="sequence", case=name, events=last)


if __name__ == "__main__":
    main()
