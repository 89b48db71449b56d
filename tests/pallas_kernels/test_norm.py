"""The norm's kernels against float64, in every shape that models have, alone and with the addition before it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton backend is deprecated:DeprecationWarning")

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
IMPLEMENTATIONS = ("xla", "pallas_triton")
# Half a unit in the last place of bfloat16 is 2e-3 of a value; sums of 100 float32 products err by 1e-6.
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 8e-3}


def reference(x, delta, weight, dy, ds, eps=1e-5):
    """s, y and dx in float64."""
    s = np.asarray(x, np.float64) + np.asarray(delta, np.float64)
    inverse = 1 / np.sqrt((s**2).mean(-1, keepdims=True) + eps)
    unit, u = s * inverse, np.asarray(dy, np.float64) * np.asarray(weight, np.float64)
    dx = inverse * (u - unit * (unit * u).mean(-1, keepdims=True))
    return s, unit * np.asarray(weight, np.float64), dx + np.asarray(ds, np.float64)


def drawn(T, D, dtype):
    draw = np.random.default_rng([T, D])
    x, delta, dy, ds = (jnp.asarray(draw.normal(size=(T, D)), dtype) for _ in range(4))
    return x, delta, jnp.asarray(draw.normal(size=D), dtype), dy, ds


def close(found, wanted, dtype):
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=TOLERANCE[dtype] * np.abs(wanted).max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("T", "D"), [(16, 64), (7, 96), (1, 160), (12, 16)])
def test_forward_and_backward_match_float64(implementation, dtype, T, D):
    x, delta, weight, dy, ds = drawn(T, D, dtype)

    def both(x, delta):
        return add_rms_norm(x, delta, weight, eps=1e-5, implementation=implementation)

    (s, y), pullback = jax.vjp(both, x, delta)
    dx, ddelta = pullback((ds, dy))
    if dtype == jnp.bfloat16:  # the sum is rounded before it is normalised
        delta = s.astype(jnp.float32) - x.astype(jnp.float32)
    wanted = reference(x, delta, weight, dy, ds)
    for found, right in zip((s, y, dx), wanted, strict=True):
        close(found, right, dtype)
    np.testing.assert_array_equal(dx, ddelta)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_norm_alone_and_the_gradient_of_its_weight(implementation):
    x, _, weight, dy, _ = drawn(8, 96, jnp.float32)
    y, pullback = jax.vjp(lambda x, w: rms_norm(x, w, eps=1e-5, implementation=implementation), x, weight)
    dx, dweight = pullback(dy)
    _, right, right_dx = reference(x, 0 * x, weight, dy, 0 * x)
    close(y, right, jnp.float32)
    close(dx, right_dx, jnp.float32)
    unit = right / np.asarray(weight, np.float64)
    close(dweight, (np.asarray(dy, np.float64) * unit).sum(0), jnp.float32)


def test_a_bad_row_stays_alone():
    x, _, weight, _, _ = drawn(8, 96, jnp.float32)
    clean = rms_norm(x, weight, eps=1e-5, implementation="pallas_triton")
    y = rms_norm(x.at[3, 5].set(jnp.nan), weight, eps=1e-5, implementation="pallas_triton")
    np.testing.assert_array_equal(np.delete(y, 3, 0), np.delete(clean, 3, 0))


@pytest.mark.parametrize("width", [4096, 5120, 8192])
def test_kernels_lower_for_cuda(width):
    def step(x, delta, weight, ds, dy):
        out, pullback = jax.vjp(lambda x, d: add_rms_norm(x, d, weight, eps=1e-5), x, delta)
        return out, pullback((ds, dy))

    like = jax.ShapeDtypeStruct((8192, width), jnp.bfloat16)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        text = (
            jax.jit(step)
            .trace(like, like, jax.ShapeDtypeStruct((width,), jnp.bfloat16), like, like)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )
    assert text.count('name = "rms_norm') + text.count("rms_norm_backward") >= 2


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="none of"):
        rms_norm(jnp.ones((2, 4)), jnp.ones(4), eps=1e-5, implementation="cuda")
