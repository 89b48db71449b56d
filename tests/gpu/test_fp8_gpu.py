"""Products with a base of 8-bit floats on a real GPU, with their low-rank part, against the formula in float64.

Only rows of x and dY are rounded, so with rounded rows in float64 the rest is float32 sums and the rounding of results.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_arrays import changed, normal, on_device

import pallas_kernels as pk
from pallas_kernels.quantised import fp8
from pallas_kernels.quantised.rows import round_rows

pytestmark = pytest.mark.gpu

TILE, K, WIDTHS, RANKS = 128, 1024, (1536, 256), (16, 64)
TABLE = on_device([0, 1, -1, 2, 2, 0, 1, 1, 0, -1, 2, 0], np.int32)
SCALE = on_device([2.0, 0.5, 1.0], np.float32)
OWNER = np.repeat(np.asarray(TABLE), TILE)
HALF_STEP = 2.0**-8  # of bfloat16
S_AND_DS = 2 * HALF_STEP  # they are kept in bfloat16, and so is what is multiplied by them


@pytest.fixture(scope="module")
def arrays():
    rows, adapters = len(OWNER), len(SCALE)
    return {
        "x": half(0, (rows, K)),
        "ws": [fp8.quantise(normal(1 + i, (K, width))) for i, width in enumerate(WIDTHS)],
        "as_": [normal(3 + i, (adapters, K, rank), 0.1) for i, rank in enumerate(RANKS)],
        "bs": [normal(5 + i, (adapters, rank, n), 0.1) for i, (rank, n) in enumerate(zip(RANKS, WIDTHS, strict=True))],
        "dys": [half(7 + i, (rows, width)) for i, width in enumerate(WIDTHS)],
    }


@jax.jit
def step(x, ws, as_, bs, dys):
    def op(x, as_, bs):
        return pk.multi_lora_linears(x, ws, as_, bs, tile_adapter=TABLE, scale=SCALE)

    ys, pullback = jax.vjp(op, x, as_, bs)
    return {"ys": ys} | dict(zip(("dx", "das", "dbs"), pullback(tuple(dys)), strict=True))


def wide(array) -> np.ndarray:
    return np.asarray(np.asarray(array, np.float32), np.float64)


def rounded(rows_TK) -> np.ndarray:
    values, scales = jax.jit(round_rows)(rows_TK)
    return wide(values) * np.float64(scales)


def half(seed, shape):
    return on_device(np.asarray(normal(seed, shape)), jnp.bfloat16)


def formula(x, ws, as_, bs, dys):
    wide_x, dx, ys, das, dbs = wide(x), np.zeros(x.shape), [], [], []
    for w, bank_a, bank_b, dy in zip(ws, as_, bs, dys, strict=True):
        y = rounded(x) @ wide(fp8.dequantise(w, jnp.float32))
        dx += rounded(on_device(wide(dy) * wide(w.scales), np.float32)) @ wide(w.values)
        da, db = np.zeros(bank_a.shape), np.zeros(bank_b.shape)
        for adapter, scale in enumerate(np.float64(SCALE)):
            rows, a, b = adapter == OWNER, wide(bank_a[adapter]), wide(bank_b[adapter])
            s, ds = wide_x[rows] @ a, scale * wide(dy)[rows] @ b.T
            y[rows] += scale * s @ b
            dx[rows] += ds @ a.T
            da[adapter], db[adapter] = wide_x[rows].T @ ds, scale * s.T @ wide(dy)[rows]
        for results, result in ((ys, y), (das, da), (dbs, db)):
            results.append(result)
    return {"ys": ys, "dx": dx, "das": das, "dbs": dbs}


def test_a_step_is_the_formula_for_rounded_rows(arrays):
    got, exact = step(**arrays), formula(**arrays)
    worst = {
        name: max(
            float(np.max(np.abs(wide(mine) - right)) / np.abs(right).max())
            for mine, right in zip(jax.tree.leaves(got[name]), jax.tree.leaves(exact[name]), strict=True)
        )
        for name in exact
    }
    assert max(worst.values()) < HALF_STEP + S_AND_DS, worst


def test_two_steps_are_equal_and_adapters_do_not_see_each_other(arrays):
    clean = step(**arrays)
    jax.tree.map(np.testing.assert_array_equal, clean, step(**arrays))
    sick = OWNER == 2
    after = step(**arrays | {"x": changed(arrays["x"], sick, np.nan)})

    def same(mine, before, others):
        np.testing.assert_array_equal(np.asarray(mine)[others], np.asarray(before)[others])
        assert np.isnan(np.asarray(mine, np.float32)[~others]).any()

    for name in ("ys", "das", "dbs"):
        others = ~sick if name == "ys" else np.arange(len(SCALE)) != 2
        jax.tree.map(lambda mine, before, others=others: same(mine, before, others), after[name], clean[name])
