"""Timing of compiled calls on a power-limited GPU. Variants are interleaved, so that slow phases affect all of them."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds of one call: 20th, 50th and 80th percentile over rounds."""

    p20_us: float
    p50_us: float
    p80_us: float


def time_calls(
    calls: Mapping[str, tuple[Callable[..., Any], Sequence[tuple]]], *, rounds: int = 9, round_s: float = 0.02
) -> dict[str, Timing]:
    """Times every call `rounds` times, in a new random order each round.

    Each turn first runs its call untimed for the same time, because the clock of a power-limited GPU follows the load
    of the last tens of milliseconds: a call after a light one would look fast.

    Args:
        calls: name -> (compiled function, argument tuples to rotate through, so that nothing stays in the cache).
        round_s: duration of one timed turn: back-to-back asynchronous calls with one wait at the end.
    """
    repeats = {name: _repeats(fn, sets, round_s) for name, (fn, sets) in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            fn, sets = calls[name]
            _turn(fn, sets, repeats[name])
            samples[name].append(_turn(fn, sets, repeats[name]))
    return {name: _summary(values) for name, values in samples.items()}


def _repeats(fn, sets, round_s: float) -> int:
    _turn(fn, sets, len(sets))  # warm-up
    return max(2, min(400, round(round_s / max(_turn(fn, sets, 3) * 1e-6, 1e-6))))


def _turn(fn, sets, repeats: int) -> float:
    start = time.perf_counter()
    for i in range(repeats):
        out = fn(*sets[i % len(sets)])
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats * 1e6


def _summary(values: list[float]) -> Timing:
    values = sorted(values)
    last = len(values) - 1
    return Timing(p20_us=values[round(0.2 * last)], p50_us=statistics.median(values), p80_us=values[round(0.8 * last)])
