"""The built-in kinds against their equations in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorafusion_jax.adapters.check import check_kind
from lorafusion_jax.adapters.dora import DORA
from lorafusion_jax.adapters.kind import Sizes
from lorafusion_jax.adapters.table import KINDS

RNG = np.random.default_rng(0)
W, A, B = (RNG.normal(size=shape).astype(np.float32) for shape in ((12, 10), (12, 3), (3, 10)))
SIZES = Sizes(K=12, N=10, R=3, scale=np.float32(2.0), np=jnp)


@pytest.mark.parametrize("name", KINDS)
def test_the_kinds_keep_their_contract(name):
    check_kind(name)


def test_doras_factor_is_the_magnitude_over_the_norm_of_the_sum():
    tensors = {"lora_a": A, "lora_b": B, "magnitude": RNG.normal(size=10).astype(np.float32)}
    norms = np.linalg.norm(np.float64(W) + 2 * np.float64(A) @ np.float64(B), axis=0)
    for library in (jnp, np):
        sizes = Sizes(K=12, N=10, R=3, scale=np.float32(2.0), np=library)
        np.testing.assert_allclose(DORA.column_scale(W, tensors, sizes), tensors["magnitude"] / norms, rtol=1e-5)
        np.testing.assert_allclose(DORA.start(W, tensors, sizes)["magnitude"], norms, rtol=1e-5)


def test_doras_norm_is_constant_in_the_gradient():
    tensors = {"lora_a": A, "lora_b": B, "magnitude": np.ones(10, np.float32)}
    gradient = jax.grad(lambda tensors: DORA.column_scale(W, tensors, SIZES).sum())(tensors)
    assert not gradient["lora_a"].any()
    assert not gradient["lora_b"].any()
    assert gradient["magnitude"].all()
