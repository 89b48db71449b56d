"""silu(f · gate) · (f' · up) as one operation: the separate ones, and its kernel for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import H200, lowered, num_kernels
from host_arrays import changed, on_device

from pallas_kernels.mlp.scaled_gate import scaled_silu_gate
from pallas_kernels.mlp.xla import silu_gate

RNG = np.random.default_rng(3)


def drawn(tiles, rows, width, dtype):
    wide = [on_device(RNG.normal(size=(tiles * rows, width)), dtype) for _ in range(3)]
    factors = [changed(on_device(RNG.uniform(0.5, 2, size=(tiles, width)), np.float32), 0, 1.0) for _ in range(2)]
    return (*wide[:2], *factors), wide[2]


def separate(gate, up, f, f_up):
    def scaled(y, f):
        return (y.reshape(len(f), -1, y.shape[1]).astype(jnp.float32) * f[:, None]).astype(y.dtype).reshape(y.shape)

    return silu_gate(scaled(gate, f), scaled(up, f_up))


# Sums over the rows of a tile in another order: eps times the number of rows and the largest term.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("implementation", "shape"), [("xla", (3, 5, 7)), ("pallas_triton", (2, 48, 128)), ("pallas_triton", (3, 8, 256))]
)
def test_values_and_gradients_are_those_of_separate_operations(implementation, shape, dtype):
    arguments, dh = drawn(*shape, dtype)
    got, pullback = jax.vjp(lambda *given: scaled_silu_gate(*given, implementation=implementation), *arguments)
    wanted, wanted_pullback = jax.vjp(separate, *arguments)
    np.testing.assert_array_equal(got, wanted)
    for name, ours, right in zip(("gate", "up", "f", "f_up"), pullback(dh), wanted_pullback(dh), strict=True):
        assert ours.dtype == right.dtype
        rounding = 2**-8 if ours.dtype == jnp.bfloat16 else 2**-20
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), np.asarray(right, np.float64), rtol=rounding, err_msg=name,
            atol=rounding * float(np.abs(np.asarray(right, np.float32)).max()),
        )  # fmt: skip


def test_rows_of_other_tiles_do_not_hear_of_nan():
    arguments, dh = drawn(2, 16, 128, jnp.float32)
    for implementation in ("xla", "pallas_triton"):

        def slopes(arguments, implementation=implementation):
            return jax.vjp(lambda *given: scaled_silu_gate(*given, implementation=implementation), *arguments)[1](dh)

        sick = (changed(arguments[0], 20, np.nan), *arguments[1:])
        for ours, right in zip(*map(jax.jit(slopes), (sick, arguments)), strict=True):
            half = len(right) // 2
            np.testing.assert_array_equal(np.asarray(ours)[:half], np.asarray(right)[:half])


def test_a_gpu_reads_everything_once_in_backward():
    like = [jax.ShapeDtypeStruct((8192, 14336), jnp.bfloat16)] * 3
    factors = [jax.ShapeDtypeStruct((64, 14336), jnp.float32)] * 2

    def backward(gate, up, dh, f, f_up):
        return jax.vjp(scaled_silu_gate, gate, up, f, f_up)[1](dh)

    text = lowered(H200, backward, *like, *factors)
    assert num_kernels(text) == (1, 0)
    assert 'name = "scaled_gate_backward"' in text


def test_what_the_kernel_cannot_serve_is_said():
    arguments, _ = drawn(2, 6, 128, jnp.float32)
    with pytest.raises(NotImplementedError, match="tiles of 6 rows"):
        scaled_silu_gate(*arguments, implementation="pallas_triton")
    arguments, _ = drawn(2, 8, 100, jnp.float32)
    with pytest.raises(NotImplementedError, match="width 100"):
        scaled_silu_gate(*arguments, implementation="pallas_triton")
