"""Scales of rows from bounds: nothing is beyond the largest 8-bit float, and a row without a bound is spoiled alone."""

import jax
import jax.numpy as jnp
import numpy as np
from host_arrays import normal, on_device

from pallas_kernels.mlp.hopper.rounding import of_gradients, of_h, with_low_rank

T, F, R, LARGEST = 128, 96, 4, 448.0
OWNERS = on_device([1, 0], np.int32)


def draw(seed, *shape):
    """Normal numbers, with rows of very different sizes."""
    sizes = np.exp(normal(seed + 50, (shape[0], *[1] * (len(shape) - 1)), 4.0))
    return on_device(np.asarray(normal(seed, shape)) * sizes)


def largest(array):
    return jnp.abs(array).max(1)


def test_a_row_of_y_and_its_low_rank_part_is_within_its_bound():
    y, s, bank = draw(0, T, F), draw(1, T, R), draw(2, 2, R, F)
    whole = y + jnp.concatenate([s[:64] @ bank[1], s[64:] @ bank[0]])
    assert (largest(whole) <= with_low_rank(largest(y), s, bank, OWNERS) * (1 + 1e-6)).all()


def test_h_and_its_gradients_fit_into_eight_bits():
    gate, up, dh = (draw(seed, T, F) for seed in (3, 4, 5))
    h, pullback = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
    factors = [jnp.exp2(jnp.arange(F) % 5 - 2.0), jnp.ones(F) * 3]
    scales, inverse = of_h(largest(gate), largest(up))
    of_both, rounding = of_gradients(largest(dh), largest(gate), largest(up), factors)
    for values, scale in (
        (h, scales),
        *zip((g * f for g, f in zip(pullback(dh), factors, strict=True)), of_both, strict=True),
    ):
        assert (largest(values) <= LARGEST * scale).all()
    np.testing.assert_array_equal(scales * inverse, 1)
    np.testing.assert_array_equal(jnp.stack(of_both) * rounding.inverse, 1)


def test_a_row_without_a_bound_spoils_no_other():
    ones = jnp.ones(T)
    for broken in (jnp.inf, jnp.nan):
        scales, _ = of_h(ones.at[5].set(broken), ones)
        assert jnp.isnan(scales).tolist() == [row == 5 for row in range(T)]
