"""The product of 8-bit floats for Hopper, interpreted: its scales, and which bank meets which rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from gpu_interpreter import needs_gpu_interpreter
from hopper_problems import BF16, interpreted
from host_arrays import normal, on_device

from pallas_kernels.quantised.hopper_gemm import DEFAULT, LowRank, fit_addend, gemm, measured_gemm
from pallas_kernels.quantised.rows import round_rows

M, C, N, TILE = 128, 256, 128, 64
OWNERS = (1, 0)
ROW_SIZES = np.exp(np.arange(M) / 16.0)[:, None]


def wide(array) -> np.ndarray:
    return np.asarray(np.asarray(array, np.float32), np.float64)


def rounded(rows):
    return jax.jit(round_rows)(np.asarray(rows, np.float32))


@needs_gpu_interpreter
def test_a_product_with_all_its_parts():
    x, sx = rounded(np.asarray(normal(0, (M, C))) * ROW_SIZES)
    w, sw = rounded(normal(1, (N, C)))
    s = on_device(normal(2, (M, 32)), jnp.bfloat16)
    bank = on_device(normal(3, (3, 16, N)), jnp.bfloat16)
    low = LowRank(
        s=(s / sx).astype(jnp.bfloat16),
        bank=(bank / sw[:, 0]).astype(jnp.bfloat16),
        block_adapter=on_device(OWNERS, np.int32),
        offset=16,
    )
    config = dataclasses.replace(DEFAULT, tile_m=TILE, stages=2)
    with interpreted():
        got = np.asarray(gemm(x, w, sx[:, 0], sw[:, 0], low, config=config, num_sms=2).astype(jnp.float32))
    wanted = (wide(x) * wide(sx)) @ (wide(w) * wide(sw)).T
    for block, owner in enumerate(OWNERS):
        rows = slice(block * TILE, block * TILE + TILE)
        wanted[rows] += wide(s)[rows, 16:] @ wide(bank)[owner]
    np.testing.assert_allclose(got, wanted, rtol=BF16, atol=BF16 * np.abs(wanted).mean())


@needs_gpu_interpreter
def test_an_addend_is_added_after_the_scales():
    """Two tiles a program: the second addend comes to where the first result was stored from."""
    x, sx = rounded(np.asarray(normal(0, (M, C))) * ROW_SIZES)
    w, _ = rounded(normal(1, (2 * N, C)))
    addend = on_device(normal(2, (M, 2 * N), 100.0), jnp.bfloat16)
    config = fit_addend(dataclasses.replace(DEFAULT, tile_m=TILE, tile_n=64, stages=2))
    with interpreted():
        got = np.asarray(gemm(x, w, sx[:, 0], None, addend=addend, config=config, num_sms=1).astype(jnp.float32))
    wanted = (wide(x) * wide(sx)) @ wide(w).T + wide(addend)
    np.testing.assert_allclose(got, wanted, rtol=BF16, atol=BF16 * np.abs(wanted).mean())


@needs_gpu_interpreter
def test_the_largest_of_every_row_comes_along():
    x, sx = rounded(np.asarray(normal(0, (M, C))) * ROW_SIZES)
    w, sw = rounded(normal(1, (2 * N, C)))
    config = dataclasses.replace(DEFAULT, tile_m=TILE, tile_n=64, stages=2)
    with interpreted():
        y, largest = measured_gemm(x, w, sx[:, 0], sw[:, 0], config=config, num_sms=2)
        y, largest = wide(y), np.asarray(largest)
    np.testing.assert_allclose(y, (wide(x) * wide(sx)) @ (wide(w) * wide(sw)).T, rtol=BF16, atol=0.1)
    np.testing.assert_allclose(largest, np.abs(y).max(1), rtol=BF16)
