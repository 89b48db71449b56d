"""8-bit ops by our own products for Hopper, interpreted, next to XLA's form.

Both round the same rows, so results in bfloat16 are all that differs.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import needs_gpu_interpreter
from hopper_problems import interpret_whole_ops, interpreted
from kernel_problems import draw, relative

import pallas_kernels as pk
from pallas_kernels.mlp.hopper import rounding
from pallas_kernels.quantised import fp8, hopper

K, WIDTHS, TILE, TABLE = 256, (256, 128), 64, [1, -1, 0]
BF16 = 1e-2


@pytest.fixture
def on_hopper(monkeypatch):
    """A context in which whole ops are interpreted, by our own products."""

    interpret_whole_ops(monkeypatch)
    return interpreted


def step(given, dys, implementation, dtype):
    def op(x, as_, bs):
        rest = {name: given[name] for name in ("tile_adapter", "scale", "dropout")}
        return pk.multi_lora_linears(x, given["ws"], as_, bs, implementation=implementation, **rest)

    def both(x, as_, bs):
        ys, pullback = jax.vjp(op, x, as_, bs)
        return ys, *pullback(tuple(dy.astype(dtype) for dy in dys))

    return jax.jit(both)(given["x"].astype(dtype), given["as_"], given["bs"])


@needs_gpu_interpreter
@pytest.mark.parametrize("rates", [[0.5, 0.1], pytest.param(None, marks=pytest.mark.nightly)], ids=["dropout", "none"])
def test_values_and_gradients_are_those_of_xla(on_hopper, rates, monkeypatch):
    products = []
    gemm = hopper.gemm
    monkeypatch.setattr(hopper, "gemm", lambda *args, **kwargs: products.append(args) or gemm(*args, **kwargs))
    given, dys = draw(
        table=TABLE, k=K, widths=WIDTHS, ranks=(8, 20), adapters=2, rates=rates, tile=TILE, dtype=jnp.bfloat16
    )
    given["ws"] = [fp8.quantise(w) for w in given["ws"]]
    want = step(given, dys, "xla", jnp.float32)
    with on_hopper():
        got = jax.tree.map(np.asarray, step(given, dys, "pallas_mosaic_gpu", jnp.bfloat16))
    errors = [relative(g, w) for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    assert max(errors) < BF16, errors
    assert len(products) == 4  # forward and backward of two projections


ROUNDED = 0.03  # a bfloat16 value next to a float32 one: some land on the other side of an e4m3 step, 2^-4 of them


@needs_gpu_interpreter
@pytest.mark.nightly
def test_the_mlp_rounds_at_the_gate_as_xla_does_after_it(on_hopper, monkeypatch):
    seen, of_gradients = [], rounding.of_gradients
    monkeypatch.setattr(rounding, "of_gradients", lambda *args: seen.append(args) or of_gradients(*args))
    shared = {"table": TABLE, "adapters": 2, "tile": TILE, "dtype": jnp.bfloat16}
    before, _ = draw(k=256, widths=(512, 512), ranks=(8, 16), rates=[0.5, 0.1], seed=0, **shared)
    after, (dy,) = draw(k=512, widths=(256,), ranks=(12,), rates=[0.1, 0.3], seed=1, **shared)
    given = before | {name: before[name] + after[name] for name in ("as_", "bs")}
    ws = [fp8.quantise(w) for w in before["ws"] + after["ws"]]

    def op(implementation, x, as_, bs):
        rest = {name: given[name] for name in ("tile_adapter", "scale", "dropout")}
        drop = {"down_dropout": after["dropout"], "implementation": implementation}
        return pk.multi_lora_mlp(x, ws, as_, bs, **rest, **drop)

    def both(implementation, dtype):
        def step(x, as_, bs):
            y, pullback = jax.vjp(partial(op, implementation), x, as_, bs)
            return y, *pullback(dy.astype(dtype))

        return jax.jit(step)(given["x"].astype(dtype), given["as_"], given["bs"])

    want = both("xla", jnp.float32)
    with on_hopper():
        got = jax.tree.map(np.asarray, both("pallas_mosaic_gpu", jnp.bfloat16))
    errors = [relative(g, w) for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    assert max(errors) < ROUNDED, errors
    assert len(seen) == 1
