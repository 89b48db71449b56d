"""Projections of experts: XLA's form and Triton's kernels against the formula row by row, and isolation."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import H200, lowered, num_kernels
from expert_problems import ACTIVE, IMPLEMENTATIONS, A, E, K, N, T, computed, make_case
from host_arrays import changed, filled, on_device

from pallas_kernels.experts.api import Lora, expert_linear
from pallas_kernels.experts.rows import sort_rows, spread_rows

in_order = jax.jit(sort_rows, static_argnames=("experts", "adapters", "tile"))


@pytest.fixture(scope="module")
def case():
    return make_case()


@partial(jax.jit, static_argnums=1)
def formula(case, lora=True):
    """The same, row by row and without sorting."""
    owner = jnp.maximum(case.adapter, 0)[:, None]

    def run(x, a, b, weight):
        product = lambda spec, *arrays: jnp.einsum(spec, *arrays, precision="highest")  # noqa: E731
        y = product("tk,tjkn->tjn", x, case.w.reshape(E, K, N)[case.expert])
        low = product("tjr,tjrn->tjn", product("tk,tjkr->tjr", x, a[owner, case.expert]), b[owner, case.expert])
        low = jnp.where((case.adapter >= 0)[:, None, None], low * case.scale[owner][..., None], 0.0)
        return ((y + low if lora else y) * weight[..., None]).sum(1)

    y, pullback = jax.vjp(run, case.x, case.a, case.b, case.weight)
    return (y, *pullback(case.dy))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("lora", [True, False])
def test_sorted_products_are_those_of_each_row(case, implementation, lora):
    for actual, wanted in zip(computed(case, implementation, lora), formula(case, lora), strict=True):
        largest = max(float(np.abs(wanted).max()), 1e-9)
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bad_rows_and_weights_of_an_adapter_reach_no_other(case, implementation):
    bad = np.asarray(case.adapter) == 1
    broken = case._replace(
        x=changed(case.x, bad, np.nan),
        a=changed(case.a, 1, np.inf),
        b=changed(case.b, (1, 2), np.nan),
        dy=changed(case.dy, bad, np.inf),
    )
    y, dx, da, db, dweight = computed(case, implementation)
    again = computed(broken, implementation)
    for actual, wanted in zip((again[0], again[1], again[4]), (y, dx, dweight), strict=True):
        np.testing.assert_array_equal(actual[~bad], wanted[~bad])
    for actual, wanted in zip(again[2:4], (da, db), strict=True):
        np.testing.assert_array_equal(actual[[0, 2]], wanted[[0, 2]])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_weight_shows_in_the_rows_that_it_multiplies(case, implementation, value):
    broken = case._replace(b=changed(case.b, (1, 2, 0, 7), value))
    y = computed(broken, implementation)[0]
    hit = (np.asarray(case.adapter) == 1) & (np.asarray(case.expert) == 2).any(1)
    assert hit.any()
    np.testing.assert_array_equal(~np.isfinite(y[:, 7]), hit)
    assert np.isfinite(np.delete(y, 7, axis=1)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_where_an_adapter_sends_its_rows_changes_no_other(case, implementation):
    """Rows of the others move within tiles and between them."""
    bad = np.asarray(case.adapter) == 1
    moved = case._replace(expert=changed(case.expert, bad, [0, 2]))
    first, again = computed(case, implementation), computed(moved, implementation)
    for actual, wanted in zip((again[0], again[1], again[4]), (first[0], first[1], first[4]), strict=True):
        np.testing.assert_array_equal(actual[~bad], wanted[~bad])
    for actual, wanted in zip(again[2:4], first[2:4], strict=True):
        np.testing.assert_array_equal(actual[[0, 2]], wanted[[0, 2]])


@pytest.mark.parametrize("tile", [4, 16])
def test_rows_are_sorted_and_segments_are_the_parts_of_an_adapter_in_a_tile(case, tile):
    rows = jax.device_get(in_order(case.expert, case.adapter, experts=E, adapters=A, tile=tile))
    experts, adapters = np.asarray(case.expert).reshape(-1), np.asarray(case.adapter)
    sizes = np.bincount(experts, minlength=E)
    assert len(rows.tile_expert[rows.tile_expert >= 0]) == sum(-(-sizes // tile)), "padding of experts alone"
    segments = {}
    for number, (expert, source) in enumerate(zip(rows.tile_expert, rows.source.reshape(-1, tile), strict=True)):
        copies = source[source >= 0]
        assert len(copies) or expert == -1
        assert (experts[copies] == expert).all()
        of_copies = np.where(adapters[copies // ACTIVE] < 0, A, adapters[copies // ACTIVE])
        assert (np.diff(of_copies * experts.size + copies) > 0).all()
        parts = range(*rows.tile_segment[number : number + 2])
        assert (rows.segment_tile[parts] == number).all()
        runs = [expert * (A + 1) + adapter for adapter in np.unique(of_copies) if adapter < A]
        assert rows.segment_run[parts].tolist() == runs
        segments |= dict.fromkeys(parts)
    assert (np.delete(rows.segment_run, list(segments)) == -1).all()
    lengths = (rows.run_stop - rows.run_start).reshape(E, A + 1)
    pairs = experts * (A + 1) + np.where(adapters < 0, A, adapters).repeat(ACTIVE)
    assert lengths.reshape(-1).tolist() == np.bincount(pairs, minlength=E * (A + 1)).tolist()
    assert rows.run_start[pairs].tolist() <= rows.position.reshape(-1).tolist()
    np.testing.assert_array_equal(rows.source[rows.position].reshape(-1), np.arange(T * ACTIVE))


def test_a_shape_without_a_kernel_is_refused_by_name(case):
    rows = in_order(case.expert, case.adapter, experts=E, adapters=A, tile=16)
    x = filled(0.0, len(rows.source), 24)
    with pytest.raises(NotImplementedError, match="kernels of 24 x 64: it needs multiples of 32"):
        expert_linear(x, filled(0.0, E * 24, N), rows, experts=E, implementation="pallas_triton")


def test_kernels_are_lowered_for_a_gpu():
    """Qwen3-30B-A3B's projection: forward and backward are products and low-rank passes, without XLA's scan."""
    tokens, experts, adapters = 256, 128, 4
    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    low = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731

    def run(expert, adapter, x, w, a, b):
        rows = sort_rows(expert, adapter, experts=experts, adapters=adapters)

        def projected(x, a, b):
            return expert_linear(spread_rows(x, rows), w, rows, Lora(a, b, jnp.ones(adapters)), experts=experts)

        y, pullback = jax.vjp(projected, x, a, b)
        return y, *pullback(y)

    integers = jax.ShapeDtypeStruct((tokens, 8), jnp.int32), jax.ShapeDtypeStruct((tokens,), jnp.int32)
    pairs = low(adapters, experts, 2048, 8), low(adapters, experts, 8, 1536)
    text = lowered(H200, run, *integers, half(tokens, 2048), half(experts * 2048, 1536), *pairs)
    assert num_kernels(text) == (6, 0)  # S and y; dS, dx, dA and dB


def test_an_adapter_beyond_the_last_one_is_none():
    expert, beyond, none = (on_device(values, np.int32) for values in ([[0], [0], [1]], [0, 3, 1], [0, -1, 1]))
    rows = [in_order(expert, adapter, experts=2, adapters=2, tile=2) for adapter in (beyond, none)]
    assert [part.tolist() for part in rows[0]] == [part.tolist() for part in rows[1]]
