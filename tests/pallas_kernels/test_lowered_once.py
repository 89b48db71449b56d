"""Programs that several modules share."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import H200, lowered, num_kernels
from sharded_problems import mesh_of, put

import pallas_kernels as pk
from pallas_kernels import backend
from pallas_kernels.linear import xla
from pallas_kernels.lowered_once import lowered_once

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


def test_equal_calls_are_traced_once():
    traced = []

    def scaled(factor, operands):
        traced.append((factor, operands["x"].shape))
        return {"y": operands["x"] * factor}

    for x, factor in ((X, 2), (X + 1, 2), (X, 3), (X[:1], 2), (X.astype(np.int32), 2)):
        result = jax.jit(lambda x, factor=factor: lowered_once(scaled, factor, {"x": x})["y"] + 1)(x)
        np.testing.assert_array_equal(result, x * factor + 1)
    assert traced == [(2, (2, 3)), (3, (2, 3)), (2, (1, 3)), (2, (2, 3))]


def test_what_cannot_be_kept_runs_as_it_is():
    def by_host(times, x):
        return jax.pure_callback(lambda x: x * times, jax.typeof(x), x)

    np.testing.assert_array_equal(jax.jit(lambda x: lowered_once(by_host, 2, x))(X), 2 * X)


def test_kernels_of_a_gpu_are_kept():
    def layer(implementation, x, w, a, b):
        return pk.lora_linear(x, w, a, b, scale=1.0, implementation=implementation)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 128), (128, 128), (128, 16), (16, 128))]
    text = lowered(H200, lambda *arrays: lowered_once(layer, "pallas_mosaic_gpu", *arrays), *shapes)
    assert num_kernels(text) == num_kernels(lowered(H200, lambda *arrays: layer("pallas_mosaic_gpu", *arrays), *shapes))
    assert sum(num_kernels(text)) > 0


def test_errors_of_the_function_are_its_own():
    def refuses(_, x):
        raise ValueError(f"no kernel for {x.shape}")

    with pytest.raises(ValueError, match="no kernel for"):
        jax.jit(lambda x: lowered_once(refuses, 0, x))(X)


def test_like_projections_on_an_automatic_mesh_are_lowered_once():
    """XLA asks for the program of a shard once for each of them; a Mosaic kernel takes half a second to lower."""
    traced = []

    def forward(static, ops):
        traced.append(ops.x.shape)
        return xla.forward(static, ops)

    counting = SimpleNamespace(unsupported_reason=lambda *_: None, forward=forward, backward=xla.backward)
    backend.register("counting", counting)
    try:
        mesh = mesh_of("automatic", data=8)
        rng = np.random.default_rng(0)
        w, a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((16, 16), (16, 4), (4, 16)))
        x = put(mesh, rng.standard_normal((64, 16)).astype(np.float32), "data")

        def layers(x):
            for _ in range(3):
                x = pk.lora_linear(x, w, a, b, scale=1.0, implementation="counting")
            return x

        with jax.set_mesh(mesh):
            y = jax.jit(layers)(x)
    finally:
        backend.unregister("counting")
    expected = np.asarray(x)
    for _ in range(3):
        expected = expected @ np.asarray(w) + expected @ np.asarray(a) @ np.asarray(b)
    np.testing.assert_allclose(y, expected, rtol=2e-4, atol=2e-4)
    assert traced.count((8, 16)) == 1
