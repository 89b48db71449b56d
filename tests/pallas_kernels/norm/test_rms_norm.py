"""The norm's kernels against float64 in model shapes, with and without the preceding addition."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_arrays import changed, on_device
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.norm import add_rms_norm, rms_norm, rms_norm_with_residual

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
    x, delta, dy, ds = (on_device(draw.normal(size=(T, D)), dtype) for _ in range(4))
    return x, delta, on_device(draw.normal(size=D), dtype), dy, ds


def close(actual, wanted, dtype):
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, atol=TOLERANCE[dtype] * np.abs(wanted).max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("T", "D"), [(16, 64), (7, 96), (1, 160), (12, 16)])
def test_forward_and_backward_match_float64(implementation, dtype, T, D):
    x, delta, weight, dy, ds = drawn(T, D, dtype)

    def both(x, delta):
        return add_rms_norm(x, delta, weight, eps=1e-5, implementation=implementation)

    @jax.jit
    def both_ways(x, delta, ds, dy):
        out, pullback = jax.vjp(both, x, delta)
        return out, pullback((ds, dy))

    (s, y), (dx, ddelta) = both_ways(x, delta, ds, dy)
    if dtype == jnp.bfloat16:  # the sum is rounded before it is normalised
        delta = np.asarray(s, np.float32) - np.asarray(x, np.float32)
    wanted = reference(x, delta, weight, dy, ds)
    for actual, right in zip((s, y, dx), wanted, strict=True):
        close(actual, right, dtype)
    np.testing.assert_array_equal(dx, ddelta)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rms_norm_and_the_gradient_of_its_weight(implementation):
    x, _, weight, dy, _ = drawn(8, 96, jnp.float32)

    @jax.jit
    def both_ways(x, w, dy):
        y, pullback = jax.vjp(lambda x, w: rms_norm(x, w, eps=1e-5, implementation=implementation), x, w)
        return y, *pullback(dy)

    y, dx, dweight = both_ways(x, weight, dy)
    zeros = np.zeros(x.shape)
    _, right, right_dx = reference(x, zeros, weight, dy, zeros)
    close(y, right, jnp.float32)
    close(dx, right_dx, jnp.float32)
    unit = right / np.asarray(weight, np.float64)
    close(dweight, (np.asarray(dy, np.float64) * unit).sum(0), jnp.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rms_norm_with_residual_adds_both_gradients(implementation, dtype):
    x, _, weight, dy, ds = drawn(8, 96, dtype)

    @jax.jit
    def both_ways(x, ds, dy):
        def run(x):
            return rms_norm_with_residual(x, weight, eps=1e-5, implementation=implementation)

        out, pullback = jax.vjp(run, x)
        return out, *pullback((ds, dy))

    (s, y), dx = both_ways(x, ds, dy)
    wanted = reference(x, np.zeros(x.shape), weight, dy, ds)
    np.testing.assert_array_equal(s, x)
    close(y, wanted[1], dtype)
    close(dx, wanted[2], dtype)


def test_rms_norm_with_residual_equals_separate_gradients():
    """Of the weight too, and where a checkpoint makes the norm again."""
    x, _, weight, dy, ds = drawn(8, 96, jnp.float32)

    def together(x, weight):
        return rms_norm_with_residual(x, weight, eps=1e-5)

    def slopes(function):
        return jax.jit(lambda x, weight, ds, dy: jax.vjp(function, x, weight)[1]((ds, dy)))(x, weight, ds, dy)

    wanted = slopes(lambda x, weight: (x, rms_norm(x, weight, eps=1e-5)))
    for function in (together, jax.checkpoint(together)):
        for actual, right in zip(slopes(function), wanted, strict=True):
            np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-6)


def test_nan_stays_in_its_row():
    x, _, weight, _, _ = drawn(8, 96, jnp.float32)
    clean = rms_norm(x, weight, eps=1e-5, implementation="pallas_triton")
    y = rms_norm(changed(x, (3, 5), np.nan), weight, eps=1e-5, implementation="pallas_triton")
    np.testing.assert_array_equal(np.delete(y, 3, 0), np.delete(clean, 3, 0))


def kernels_of(text):
    """Names of the kernels in a lowered program, in order."""
    return re.findall(r'name = "(rms_norm\w*)"', text)


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
    assert kernels_of(text) == ["rms_norm", "rms_norm_backward"]


@pytest.mark.wrong_types
def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="none of"):
        rms_norm(jnp.ones((2, 4)), jnp.ones(4), eps=1e-5, implementation="cuda")


@pytest.mark.wrong_types
def test_shape_and_dtype_mismatches_are_errors():
    x, w = jnp.ones((8, 32)), jnp.ones(32)
    wrong = {
        r"add_rms_norm: delta is float32\[1, 32\], but x is float32\[8, 32\]": (x, jnp.ones((1, 32)), w),
        r"delta is bfloat16\[8, 32\], but x is float32\[8, 32\]: cast": (x, x.astype(jnp.bfloat16), w),
        r"weight has shape \(16,\), expected \(32,\)": (x, x, w[:16]),
        r"x is int32, not a floating type; weight is int32": (x.astype(int), x.astype(int), w.astype(int)),
        r"x has shape \(0, 32\), expected": (x[:0], x[:0], w),
    }
    for implementation in IMPLEMENTATIONS:
        for message, arguments in wrong.items():
            with pytest.raises(ValueError, match=message):
                add_rms_norm(*arguments, eps=1e-5, implementation=implementation)
        with pytest.raises(ValueError, match=r"^rms_norm: weight has shape"):
            rms_norm(x, w[:1], eps=1e-5, implementation=implementation)


def sums_over_rows(mesh, implementation, check_vma):
    """Both norms of rows that are dealt out over a mesh; the weight lies on all of it."""

    def both(x, delta, weight):
        s, y = add_rms_norm(x, delta, weight, eps=1e-5, implementation=implementation)
        return s, y, rms_norm(x, weight, eps=1e-5, implementation=implementation)

    rows = P("data")
    return jax.shard_map(both, mesh=mesh, in_specs=(rows, rows, P()), out_specs=(rows,) * 3, check_vma=check_vma)


# under check_vma=True jax cannot interpret Pallas kernels (it says so); that they lower there is tested below
@pytest.mark.parametrize(("implementation", "check_vma"), [("xla", True), ("xla", False), ("pallas_triton", False)])
def test_shard_map_sums_the_gradient_of_the_weight(implementation, check_vma):
    x, delta, weight, dy, ds = drawn(8, 96, jnp.float32)
    one_device, two = (jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,)) for n in (1, 2))
    wanted = jax.jit(lambda *a: jax.vjp(sums_over_rows(one_device, "xla", False), *a)[1]((ds, dy, dy)))
    on_two = jax.jit(lambda *a: jax.vjp(sums_over_rows(two, implementation, check_vma), *a)[1]((ds, dy, dy)))
    for got, right in zip(on_two(x, delta, weight), wanted(x, delta, weight), strict=True):
        close(got, right, jnp.float32)


@pytest.mark.parametrize("check_vma", [True, False])
def test_kernels_lower_for_cuda_inside_shard_map(check_vma):
    mesh = AbstractMesh((2,), ("data",), (AxisType.Auto,), abstract_device=H200)

    def step(x, delta, weight, dy):
        outs, pullback = jax.vjp(sums_over_rows(mesh, None, check_vma), x, delta, weight)
        return outs, pullback((dy, dy, dy))

    like, weight = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096,), jnp.bfloat16)
    with use_abstract_mesh(mesh):
        text = jax.jit(step).trace(like, like, weight, like).lower(lowering_platforms=("cuda",)).as_text()
    assert sorted(kernels_of(text)) == ["rms_norm"] * 2 + ["rms_norm_backward"] * 2
