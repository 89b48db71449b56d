"""Experts in 8-bit floats: each implementation against the documented equation in float64, and isolation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cuda_lowering import A100, H200, lowered, num_kernels
from expert_problems import IMPLEMENTATIONS, E, K, N, computed, make_case
from host_arrays import changed, on_device

from pallas_kernels.experts.api import Lora, expert_linear
from pallas_kernels.experts.fp8 import Fp8Experts, quantise
from pallas_kernels.experts.rows import sort_rows, spread_rows

LARGEST = 448.0  # of e4m3
SIZES = np.array([1.0, 1e-3, 30.0, 1.0, 1e-6])  # of the experts' weights


@pytest.fixture(scope="module")
def case():
    """Rows and experts of very different sizes."""
    plain = make_case()
    row_sizes = np.exp(np.arange(len(plain.x)) / 4.0 - 4)[:, None]
    kernels = np.asarray(plain.w).reshape(E, K, N) * SIZES[:, None, None]
    return plain._replace(
        x=on_device(np.asarray(plain.x) * row_sizes, np.float32),
        w=jax.jit(quantise, static_argnames="experts")(on_device(kernels.reshape(E * K, N), np.float32), experts=E),
    ), kernels


def rounded(values: np.ndarray) -> np.ndarray:
    """Rounds to e4m3 along the last axis with the smallest power of two that fits it, in numpy."""
    largest = np.abs(values).max(-1, keepdims=True)
    scales = np.exp2(np.ceil(np.log2(np.maximum(largest, 1e-30) / LARGEST)))
    return (values / scales).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales


def formula(case, kernels, lora=True):
    """y and the gradients of x, A, B and the weights, copy by copy in float64; and the size of each one's terms."""
    x, dy, a, b, weight = (np.asarray(part, np.float64) for part in (case.x, case.dy, case.a, case.b, case.weight))
    wq = rounded(np.asarray(kernels, np.float32).transpose(0, 2, 1).astype(np.float64))  # [E, N, K]
    scales = np.asarray(case.w.scales, np.float64)
    y, dx, da, db, dweight = (np.zeros_like(part) for part in (dy, x, a, b, weight))
    terms = np.zeros_like(weight)
    for row, (chosen, adapter) in enumerate(zip(np.asarray(case.expert), np.asarray(case.adapter), strict=True)):
        for copy, expert in enumerate(chosen):
            with_lora, factor = lora and adapter >= 0, float(case.scale[max(adapter, 0)])
            of_copy = rounded(x[row]) @ wq[expert].T
            dy_copy = np.asarray(np.float32(dy[row]) * np.float32(weight[row, copy]), np.float64)
            dx_copy = rounded(dy_copy * scales[expert]) @ (wq[expert] / scales[expert][:, None])
            if with_lora:
                s, ds = x[row] @ a[adapter, expert], factor * dy_copy @ b[adapter, expert].T
                of_copy = of_copy + factor * s @ b[adapter, expert]
                dx_copy = dx_copy + ds @ a[adapter, expert].T
                da[adapter, expert] += np.outer(x[row], ds)
                db[adapter, expert] += factor * np.outer(s, dy_copy)
            y[row] += weight[row, copy] * of_copy
            dx[row] += dx_copy
            dweight[row, copy], terms[row, copy] = dy[row] @ of_copy, np.abs(dy[row]) @ np.abs(of_copy)
    largest = [np.abs(part).max(1, keepdims=True) for part in (y, dx)]  # each row has a size of its own
    largest += [np.abs(part).max((2, 3), keepdims=True) for part in (da, db)]
    return zip((y, dx, da, db, dweight), (*largest, terms), strict=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("lora", [True, False])
def test_products_are_those_of_the_documented_equation(case, implementation, lora):
    problem, kernels = case
    exact_parts = formula(problem, kernels, lora)
    for actual, (exact, size) in zip(computed(problem, implementation, lora), exact_parts, strict=True):
        assert (np.abs(actual - exact) <= 1e-5 * size).all()


def test_every_expert_and_channel_has_a_scale_of_its_own(case):
    problem, kernels = case
    exact = rounded(kernels.transpose(0, 2, 1)).transpose(0, 2, 1).reshape(E * K, N)
    np.testing.assert_array_equal(np.asarray(problem.w.dense(jnp.float32)), exact)
    np.testing.assert_array_equal(np.asarray(problem.w.dense(jnp.bfloat16), np.float32), exact)
    error = np.abs(exact.reshape(E, K, N) - kernels)
    assert (error <= 2**-4 * np.abs(kernels) + 2**-10 * np.abs(kernels).max(1, keepdims=True) / LARGEST * 2).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bad_rows_and_weights_of_an_adapter_reach_no_other(case, implementation):
    problem, _ = case
    bad = np.asarray(problem.adapter) == 1
    broken = problem._replace(
        x=changed(problem.x, bad, np.nan),
        a=changed(problem.a, 1, np.inf),
        b=changed(problem.b, (1, 2), np.nan),
        dy=changed(problem.dy, bad, np.inf),
    )
    first, again = computed(problem, implementation), computed(broken, implementation)
    for part in (0, 1, 4):
        np.testing.assert_array_equal(again[part][~bad], first[part][~bad])
    for part in (2, 3):
        np.testing.assert_array_equal(again[part][[0, 2]], first[part][[0, 2]])
    assert np.isnan(again[0][bad]).all(), "a bad row is not hidden"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_where_an_adapter_sends_its_rows_changes_no_other(case, implementation):
    problem, _ = case
    bad = np.asarray(problem.adapter) == 1
    first = computed(problem, implementation)
    again = computed(problem._replace(expert=changed(problem.expert, bad, [0, 2])), implementation)
    for part in (0, 1, 4):
        np.testing.assert_array_equal(again[part][~bad], first[part][~bad])
    for part in (2, 3):
        np.testing.assert_array_equal(again[part][[0, 2]], first[part][[0, 2]])


def lowered_layer(device) -> str:
    """Forward and backward of gate and up of Qwen3-30B-A3B's experts."""
    tokens, experts, adapters = 256, 128, 4
    shaped = jax.ShapeDtypeStruct

    def run(expert, adapter, x, values, scales, a, b):
        rows = sort_rows(expert, adapter, experts=experts, adapters=adapters)
        w = Fp8Experts(values=values, scales=scales)

        def projected(x, a, b):
            return expert_linear(spread_rows(x, rows), w, rows, Lora(a, b, jnp.ones(adapters)), experts=experts)

        y, pullback = jax.vjp(projected, x, a, b)
        return y, *pullback(y)

    return lowered(
        device,
        run,
        *(shaped(shape, jnp.int32) for shape in ((tokens, 8), (tokens,))),
        shaped((tokens, 2048), jnp.bfloat16),
        shaped((experts * 1536, 2048), jnp.float8_e4m3fn),
        shaped((experts, 1536), jnp.float32),
        *(shaped(shape, jnp.float32) for shape in ((adapters, experts, 2048, 8), (adapters, experts, 8, 1536))),
    )


def test_kernels_multiply_8_bit_floats_where_a_gpu_can():
    text = lowered_layer(H200)
    assert num_kernels(text) == (8, 0)  # S and y; dS, dx, dA and dB; x and dY are rounded
    assert "experts_fp8_forward" in text
    assert "experts_fp8_dx" in text


def test_other_gpus_multiply_the_same_values_in_bfloat16():
    text = lowered_layer(A100)
    assert num_kernels(text) == (6, 0)  # XLA rounds
    assert "experts_forward" in text
    assert "experts_fp8_forward" not in text
