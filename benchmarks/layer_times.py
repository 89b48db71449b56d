"""Times of calls and differences of arrays, for benchmarks of single layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def seconds_of(run: Callable[[], Any], calls: int, repeats: int) -> float:
    """Median over repeats of the time of a call, in a row of calls."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls - 1):
            run()
        jax.block_until_ready(run())
        times.append((time.perf_counter() - began) / calls)
    return float(np.median(times))


def difference(a: jax.Array, b: jax.Array) -> float:
    """Largest difference, over the largest value of b."""
    wanted = np.asarray(b, np.float32)
    return float(np.abs(np.asarray(a, np.float32) - wanted).max() / max(np.abs(wanted).max(), 1e-6))
