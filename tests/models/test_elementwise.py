"""Norm, gate and rotary positions: values, gradients, and residuals of backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from lorafusion_jax.models.rope import apply_rope, halves_of_pairs
from pallas_kernels.mlp.xla import silu_gate
from pallas_kernels.norm import rms_norm

RNG = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def norm(x, weight):
    return rms_norm(jnp.asarray(x), jnp.asarray(weight), eps=1e-3)


def gated(gate, up):
    return silu_gate(jnp.asarray(gate), jnp.asarray(up))


def rotated(x):
    angle = np.arange(5)[:, None] * 0.5 ** np.arange(4)
    cos, sin = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    return apply_rope(x, (jnp.concatenate([cos, cos], -1)[:, None], jnp.concatenate([-sin, sin], -1)[:, None]))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (rotated, (normal(5, 3, 8),)),
        (norm, (normal(5, 16), normal(16))),
        (norm, (normal(5, 3, 8), normal(8))),
        (gated, (normal(5, 16), normal(5, 16))),
    ],
)
def test_gradients_match_finite_differences(function, arguments):
    # Differences of float32 values at steps of 1e-2: three digits.
    check_grads(function, arguments, order=1, modes=["rev"], atol=1e-2, rtol=1e-2, eps=1e-2)


def test_norm_matches_its_definition():
    x, weight = normal(7, 16), normal(16)
    wanted = (
        np.asarray(x, np.float64) / np.sqrt((np.asarray(x, np.float64) ** 2).mean(-1, keepdims=True) + 1e-3) * weight
    )
    np.testing.assert_allclose(norm(x, weight), wanted, rtol=1e-5)


def test_gate_matches_its_definition():
    gate, up = normal(7, 16), normal(7, 16)
    np.testing.assert_allclose(silu_gate(gate, up), gate / (1 + np.exp(-gate)) * up, rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "arguments", "small"),
    [
        (norm, (normal(64, 32, dtype=jnp.bfloat16), normal(32, dtype=jnp.bfloat16)), 64 * 4 + 32 * 2),
        (silu_gate, (normal(64, 32, dtype=jnp.bfloat16), normal(64, 32, dtype=jnp.bfloat16)), 64 * 32 * 2),
    ],
)
def test_residuals_are_mainly_the_inputs(function, arguments, small):
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *arguments))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in kept) == arguments[0].size * 2 + small


@pytest.mark.parametrize("channels", [12, 4])
def test_scores_of_neighbouring_pairs_are_those_in_float64(channels):
    """GPT-J: channels 2i and 2i + 1 turn by position · frequency i; channels beyond the first ones do not turn."""
    q, k = normal(7, 2, 12), normal(7, 2, 12)
    angle = np.arange(7)[:, None] * 0.3 ** np.arange(channels // 2)

    def turned(x):
        x = np.array(x, np.float64)
        even, odd = x[..., 0:channels:2].copy(), x[..., 1:channels:2].copy()
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        x[..., 0:channels:2], x[..., 1:channels:2] = even * cos - odd * sin, odd * cos + even * sin
        return x

    cos, sin = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    tables = jnp.concatenate([cos, cos], -1)[:, None], jnp.concatenate([-sin, sin], -1)[:, None]
    ours = [apply_rope(halves_of_pairs(x, channels), tables) for x in (q, k)]
    scores = np.einsum("qhc,khc->hqk", *(np.asarray(x, np.float64) for x in ours))
    np.testing.assert_allclose(scores, np.einsum("qhc,khc->hqk", turned(q), turned(k)), atol=1e-5)
