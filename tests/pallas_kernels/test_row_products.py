"""The products of decoding in two launches: each row has an adapter of its own."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear.triton.row_products import row_products
from pallas_kernels.linear.triton.row_products_8bit import row_products as row_products_8bit
from pallas_kernels.problem import Operands, Static
from pallas_kernels.quantised.fp8 import Fp8Weight, dequantise, quantise
from pallas_kernels.quantised.rows import round_rows
from tests.cuda_lowering import H200, lowered, num_kernels

BF16 = jnp.bfloat16
ADAPTERS, K = 3, 256
SCALE = np.array([0.5, 2.0, -1.0], np.float32)


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32) * shape[-2] ** -0.5


def make(rows: int, outs: dict[int, int | None], *, bias: bool = False, fp8: bool = False) -> Operands:
    """A call with projections of some widths, and the rank of each or None."""
    weight = (lambda w: quantise(w)) if fp8 else (lambda w: w)
    slots = np.random.default_rng(rows).integers(-1, ADAPTERS, rows)
    slots[:2] = -1, 2
    return Operands(
        x=jnp.asarray(3 * 16 * drawn(rows, K), BF16),
        ws=tuple(weight(jnp.asarray(drawn(K, n), BF16)) for n in outs),
        as_=tuple(None if r is None else jnp.asarray(drawn(ADAPTERS, K, r), BF16) for r in outs.values()),
        bs=tuple(None if r is None else jnp.asarray(drawn(ADAPTERS, r, n), BF16) for n, r in outs.items()),
        biases=tuple(jnp.asarray(drawn(n, 1)[:, 0], BF16) if bias else None for n in outs),
        tile_adapter=jnp.asarray(slots, jnp.int32),
        scale=jnp.asarray(SCALE),
        dropout=None,
    )


jitted = {False: jax.jit(row_products, static_argnums=0), True: jax.jit(row_products_8bit, static_argnums=0)}


def run(ops: Operands, y_dtype: Any = None, *, fp8: bool = False) -> list[np.ndarray]:
    static = Static(tile=1, num_adapters=ADAPTERS, single=False, y_dtype=y_dtype)
    return [np.asarray(y, np.float64) for y in jitted[fp8](static, ops)]


def exact(ops: Operands, i: int) -> tuple[np.ndarray, np.ndarray]:
    """y in float64, of the values that are multiplied, and the sizes of what is rounded."""
    wide = lambda array: np.asarray(array, np.float64)  # noqa: E731
    x, w = ops.x, ops.ws[i]
    if isinstance(w, Fp8Weight):
        values, scales = round_rows(x)
        frozen = (wide(values) * wide(scales)) @ wide(dequantise(w, jnp.dtype(jnp.float32)))
    else:
        frozen = wide(x) @ wide(cast(jax.Array, w))
    bias = ops.biases[i]
    frozen = frozen if bias is None else frozen + wide(bias)
    low, size = np.zeros_like(frozen), np.zeros_like(frozen)
    if ops.as_[i] is not None:
        a, b = (wide(array) for array in ops.lora(i))
        for row, slot in enumerate(np.asarray(ops.tile_adapter)):
            if slot >= 0:
                s = SCALE[slot] * (wide(x[row]) @ a[slot])
                low[row], size[row] = s @ b[slot], np.abs(s) @ np.abs(b[slot])
    return frozen + low, size


CASES = {
    "siblings of one rank": ({128: 16, 64: 16}, {}),
    "mixed ranks, one without": ({128: 64, 192: None, 64: 8}, {}),
    "a rank wider than a tile": ({64: 128}, {}),
    "rank one, with biases": ({64: 1, 128: None}, {"bias": True}),
    "no adapters": ({128: None}, {"bias": True}),
    "8-bit weights": ({128: 16, 64: None}, {"fp8": True, "bias": True}),
    "8-bit weights of mixed ranks, more rows": ({128: 64, 64: 8}, {"fp8": True, "rows": 128}),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_meet_their_own_adapters(case):
    outs, options = CASES[case]
    ops = make(**{"rows": 64, "outs": outs, **options})
    for i, y in enumerate(run(ops, fp8=options.get("fp8", False))):
        full, low_size = exact(ops, i)
        # y is rounded to bfloat16 once, and S twice before it meets B.
        excess = np.abs(y - full) - 2.0**-8 * np.abs(full) - 2 * 2.0**-8 * low_size
        assert excess.max() <= 1e-4, case


def test_sums_keep_float32_where_it_is_asked_for():
    ops = make(64, {64: None})
    (y,), (full, _) = run(ops, jnp.float32), exact(ops, 0)
    np.testing.assert_allclose(y, full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_does_not_depend_on_the_rows_beside_it(fp8):
    ops = make(64, {128: 16, 64: 32}, fp8=fp8)
    row = 5
    x = jnp.where(jnp.arange(64)[:, None] == row, ops.x, jnp.flip(ops.x, 1)).at[7].set(jnp.nan)
    slots = jnp.where(jnp.arange(64) == row, ops.tile_adapter, jnp.roll(ops.tile_adapter, 3))
    changed = dataclasses.replace(ops, x=x, tile_adapter=slots)
    for before, after in zip(run(ops, fp8=fp8), run(changed, fp8=fp8), strict=True):
        np.testing.assert_array_equal(before[row], after[row])
        assert np.isnan(after).any(1).tolist() == [number == 7 for number in range(64)]


@pytest.mark.parametrize(("fp8", "kernels"), [(False, 2), (True, 3)])
def test_an_input_takes_two_launches_and_one_that_rounds_it(fp8, kernels):
    ops, static = make(64, {128: 16, 64: 16}, fp8=fp8), Static(tile=1, num_adapters=ADAPTERS, single=False)
    products = row_products_8bit if fp8 else row_products
    text = lowered(H200, lambda ops: products(static, ops), ops)
    assert num_kernels(text) == (kernels, 0)
    assert "stablehlo.dot_general" not in text


@pytest.mark.parametrize(
    ("ops", "reason"),
    [
        (make(32, {64: 16}), "64 rows"),
        (make(128, {64: 16}), "64 rows"),
        (dataclasses.replace(make(64, {64: 16}), ws=(quantise(jnp.ones((K, 64))),)), "not quantised"),
        (make(64, {96: 16}), "out features"),
        (make(64, {64: 24}), "powers of two"),
        (dataclasses.replace(make(64, {64: 16}), x=jnp.zeros((64, K))), "bfloat16"),
    ],
)
def test_other_calls_are_refused(ops, reason):
    with pytest.raises(NotImplementedError, match=reason):
        run(ops)


def test_8bit_products_refuse_plain_weights_and_other_rows():
    with pytest.raises(NotImplementedError, match="8-bit floats"):
        run(make(64, {64: 16}), fp8=True)
    with pytest.raises(NotImplementedError, match="multiples of 64 rows"):
        run(make(32, {64: 16}, fp8=True), fp8=True)
