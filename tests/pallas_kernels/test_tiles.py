"""Sums over the tiles of each adapter, for many adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tiles import select_tiles, sum_tiles


@pytest.mark.parametrize("adapters", [3, 16, 17, 33])
def test_sums_do_not_depend_on_other_adapters(adapters):
    draw = np.random.default_rng(adapters)
    partials = jnp.asarray(draw.normal(size=(80, 4, 8)), jnp.float32)
    table = jnp.asarray(draw.integers(-1, adapters, 80), jnp.int32)
    partials = jnp.where((table == 1)[:, None, None], jnp.nan, partials)  # stays in the sum of adapter 1
    sums = jax.jit(sum_tiles, static_argnums=2)(partials, table, adapters)
    assert sums.shape == (adapters, 4, 8)
    alone = jax.jit(lambda k: sum_tiles(partials, jnp.where(table == k, 0, -1), 1)[0])
    for k in range(adapters):
        np.testing.assert_array_equal(sums[k], alone(k))
        right = np.asarray(partials, np.float64)[np.asarray(table) == k].sum(0)
        np.testing.assert_allclose(sums[k], right, rtol=1e-5, atol=1e-5)
    assert np.isnan(sums[1]).all()
    assert not np.isnan(np.delete(sums, 1, 0)).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_padding_tiles_are_selected_away(bad):
    """Padding reads the weights of adapter 0; what is not finite there must not reach its rows."""
    selected = jax.jit(select_tiles)(jnp.full((3, 8, 4), bad), jnp.array([0, -1, 2], jnp.int32))
    np.testing.assert_array_equal(selected[1], np.zeros((8, 4)))
    assert not np.isfinite(selected[0]).any()
    assert not np.isfinite(selected[2]).any()
