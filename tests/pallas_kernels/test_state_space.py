"""The selective state space in chunks is the space row by row, for packed samples of all lengths."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_arrays import changed, filled, normal, on_device
from jax import lax
from test_delta_rule import BACKWARD, FORWARD, LENGTHS, T, differ, segments

from pallas_kernels.state_space import state_space

HEADS, GROUPS, STATE, WIDTH = 6, 2, 5, 3


def rows(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((T, HEADS, WIDTH))
    b, c = (rng.standard_normal((T, GROUPS, STATE)) for _ in range(2))
    decay = -np.exp(rng.uniform(-6, 2, (T, HEADS)))
    return tuple(on_device(array, np.float32) for array in (x, b, c, decay))


def by_rows(x_THV, b_TGC, c_TGC, decay_TH, *, ids):
    b_THC, c_THC = (jnp.repeat(array, HEADS // GROUPS, axis=1) for array in (b_TGC, c_TGC))

    def step(state, row):
        x, b, c, decay, first = row
        state = jnp.where(first, 0.0, state) * jnp.exp(decay)[:, None, None] + b[:, :, None] * x[:, None, :]
        return state, (c[:, :, None] * state).sum(1)

    first_T = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    empty = jnp.zeros((HEADS, STATE, WIDTH), x_THV.dtype)
    return lax.scan(step, empty, (x_THV, b_THC, c_THC, decay_TH, first_T))[1]


@partial(jax.jit, static_argnames="function")
def both(function, given, weight, where):
    value, pullback = jax.vjp(partial(function, **where), *given)
    return value, *pullback(weight)


def test_chunks_compute_the_space_and_its_gradient():
    given, where = rows(), segments(LENGTHS)
    weight = normal(1, given[0].shape)
    wanted, *slopes = both(by_rows, given, weight, {"ids": where["ids"]})
    actual, *ours = both(state_space, given, weight, where)
    assert differ(actual, wanted) < FORWARD
    assert max(map(differ, ours, slopes)) < BACKWARD


def test_a_packed_sample_is_bitwise_the_sample_alone():
    given = rows()
    packed, start = np.asarray(both(state_space, given, given[0], segments(LENGTHS))[0]), 0
    host = jax.device_get(given)
    for length in LENGTHS:
        alone = tuple(on_device(np.concatenate([x[start : start + length], x[: T - length]])) for x in host)
        value = both(state_space, alone, given[0], segments((length,)))[0]
        np.testing.assert_array_equal(packed[start : start + length], np.asarray(value)[:length], err_msg=str(length))
        start += length


@pytest.mark.parametrize("number", range(4), ids=["x", "b", "c", "decay"])
def test_nan_stays_in_its_own_sample(number):
    given, where = rows(), segments(LENGTHS)
    broken = list(given)
    broken[number] = changed(given[number], slice(70, 80), np.nan)  # of the third sample
    weight = filled(1.0, *given[0].shape)
    results = (jax.device_get(both(state_space, tuple(arrays), weight, where)) for arrays in (given, broken))
    for number_of_result, (clean, dirty) in enumerate(zip(*results, strict=True)):
        np.testing.assert_array_equal(clean[:66], dirty[:66])
        np.testing.assert_array_equal(clean[196:], dirty[196:])
        assert number_of_result or not np.isfinite(dirty[66:196]).all()
