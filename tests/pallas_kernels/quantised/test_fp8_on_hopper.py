"""8-bit ops by our own products for Hopper, interpreted, next to XLA's form.

Both round the same rows, so results in bfloat16 are all that differs.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import needs_gpu_interpreter
from hopper_problems import interpreted
from jax._src import config as jax_config
from kernel_problems import draw, relative

import pallas_kernels as pk
from pallas_kernels import triton_call
from pallas_kernels.linear import describe
from pallas_kernels.quantised import fp8, hopper

K, WIDTHS, TILE, TABLE = 256, (256, 128), 64, [1, -1, 0]
BF16 = 1e-2


@pytest.fixture
def on_hopper(monkeypatch):
    """A context in which whole ops are interpreted, by our own products."""

    def alone(*args, **kwargs):
        """Triton kernels have an interpreter of their own."""
        forced = jax_config.pallas_tpu_interpret_mode_context_manager
        before = forced.swap_local(None)
        try:
            return call(*args, **kwargs)
        finally:
            forced.set_local(before)

    call = triton_call.call
    monkeypatch.setattr(describe, "interprets", lambda: True)
    for flag in ("OWN_PRODUCTS", "OWN_SUMS"):
        monkeypatch.setattr(hopper, flag, True)
    for name, module in list(sys.modules.items()):
        if name.startswith("pallas_kernels.") and getattr(module, "call", None) is call:
            monkeypatch.setattr(module, "call", alone)
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
