"""A small problem of `expert_linear`, and its outputs and gradients by each implementation."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from host_arrays import on_device

from pallas_kernels.experts.api import Lora, expert_linear
from pallas_kernels.experts.rows import collect_rows, sort_rows, spread_copies, spread_rows

T, ACTIVE, E, A, K, N, R = 37, 2, 5, 3, 32, 64, 4
IMPLEMENTATIONS = ("xla", "pallas_triton")


class Case(NamedTuple):
    expert: jax.Array
    adapter: jax.Array
    x: jax.Array
    w: Any  # an array or a quantised weight
    a: jax.Array
    b: jax.Array
    scale: jax.Array
    weight: jax.Array
    dy: jax.Array


def make_case() -> Case:
    """Rows of three adapters and of none; nobody chooses expert 3."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: on_device(rng.normal(size=shape), np.float32)  # noqa: E731
    expert = np.stack([rng.permutation(E)[:ACTIVE] for _ in range(T)]).astype(np.int32)
    expert = np.where(expert == 3, 4 - (expert[:, ::-1] == 4) * 4, expert)
    return Case(
        expert=on_device(expert),
        adapter=on_device(rng.integers(-1, A, T), np.int32),
        x=normal(T, K),
        w=normal(E * K, N),
        a=normal(A, E, K, R),
        b=normal(A, E, R, N),
        scale=on_device([1.0, 2.0, 0.5]),
        weight=on_device(rng.random((T, ACTIVE)), np.float32),
        dy=normal(T, N),
    )


def computed(case, implementation, lora=True):
    return jax.device_get(run_sorted(case, implementation, lora))


@partial(jax.jit, static_argnums=(1, 2))
def run_sorted(case, implementation, lora):
    """y and the gradients of x, A, B and the weights."""

    def run(x, a, b, weight):
        rows = sort_rows(case.expert, case.adapter, experts=E, adapters=A, tile=16)
        pairs = Lora(a, b, case.scale) if lora else None
        y = expert_linear(spread_rows(x, rows), case.w, rows, pairs, experts=E, implementation=implementation)
        return collect_rows(y * spread_copies(weight, rows)[:, None], rows)

    y, pullback = jax.vjp(run, case.x, case.a, case.b, case.weight)
    return (y, *pullback(case.dy))
