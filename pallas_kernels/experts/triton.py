"""The projections of experts as Triton kernels: sm_80 and newer, interpreted on a CPU.

A program has one tile of rows, so one expert and one adapter; tiles without rows are skipped. A gradient is summed over
the tiles of a run, which lie one after another: one program, a fixed order, no atomics.

M sorted rows · K in · N out · E experts · A adapters · R padded rank · J rows of a tile · C contracted features
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import interprets, target_platform, wide_integers
from pallas_kernels.experts.rows import ExpertRows
from pallas_kernels.sizes import power_of_two, row_block
from pallas_kernels.triton_call import call, dot

MAX_RANK = 64
_LEAST = 16  # rows and columns of a product of Triton


def unsupported_reason(x: jax.Array, w: jax.Array, experts: int, rank: int) -> str | None:
    """Says why a call cannot be served; None: it can."""
    num_in, num_out = w.shape[0] // experts, w.shape[1]
    if target_platform() not in ("gpu", "cuda", "cpu"):
        return f"it needs an NVIDIA GPU, not {target_platform()!r}"
    if wide_integers():
        return "its kernels count in 32 bits: turn jax_enable_x64 off"
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x is {x.dtype}; it takes bfloat16, float16 and float32"
    if num_in % 32 or num_out % 32:
        return f"kernels of {num_in} x {num_out}: it needs multiples of 32"
    return f"rank {rank}: it takes up to {MAX_RANK}" if rank > MAX_RANK else None


def product(x: jax.Array, w: jax.Array, rows: ExpertRows, experts: int, *, transposed: bool = False) -> jax.Array:
    """Multiplies each tile by its expert's kernel, or by its transpose."""
    return _gemm(x, w, rows, experts, None, transposed=transposed)


def forward(
    x: jax.Array, w: jax.Array, rows: ExpertRows, experts: int, a: jax.Array, b: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns y, and S = x A in the type of x, padded to a power of two."""
    banks = _banks(a, b, scale, x.dtype)
    s = _down(x, banks[0], rows, experts, transposed=False)
    return _gemm(x, w, rows, experts, (s, banks[1]), transposed=False), s


def backward(
    x: jax.Array, w: jax.Array, rows: ExpertRows, experts: int, a: jax.Array, b: jax.Array, scale: jax.Array,
    s: jax.Array, dy: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Returns dx, and dA and dB in float32."""
    bank_a, bank_b = _banks(a, b, scale, x.dtype)
    dy, rank = dy.astype(x.dtype), a.shape[-1]
    ds = _down(dy, bank_b, rows, experts, transposed=True)
    dx = _gemm(dy, w, rows, experts, (ds, bank_a), transposed=True)
    sums = lambda left, right: _sums(left, right, rows, experts, len(scale))  # noqa: E731
    da, db = sums(x, ds)[..., :rank], sums(dy, s)[..., :rank].swapaxes(2, 3)
    return dx, da, db * scale[:, None, None, None]


def _banks(a: jax.Array, b: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """A [A · E, K, R] and scale · B [A · E, R, N], with R a power of two."""
    wide = max(power_of_two(a.shape[-1]), _LEAST) - a.shape[-1]
    a = jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, wide))).astype(dtype)
    b = jnp.pad(b * scale[:, None, None, None], ((0, 0), (0, 0), (0, wide), (0, 0))).astype(dtype)
    return a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:])


def _gemm(
    lhs: jax.Array, w: jax.Array, rows: ExpertRows, experts: int, low: tuple[jax.Array, jax.Array] | None, *,
    transposed: bool,
) -> jax.Array:  # fmt: skip
    """lhs W[e] + low bank[p, e], or with both transposed."""
    num_in, num_out = w.shape[0] // experts, w.shape[1]
    width, depth_of = (num_in, num_out) if transposed else (num_out, num_in)
    tile, columns, depth = rows.tile, row_block(width, 128), row_block(depth_of, 64)
    blocks = width // columns

    def kernel(lhs_ref, w_ref, expert_ref, adapter_ref, *rest):
        out_ref = rest[-1]
        number, column0 = pl.program_id(0) // blocks, pl.program_id(0) % blocks * columns
        expert, adapter = expert_ref[number], adapter_ref[number]
        own_rows, own_columns = pl.ds(number * tile, tile), pl.ds(column0, columns)

        @pl.when(expert < 0)
        def _():
            out_ref[own_rows, own_columns] = jnp.zeros((tile, columns), out_ref.dtype)

        @pl.when(expert >= 0)
        def _():
            acc = jnp.zeros((tile, columns), jnp.float32)
            if low is not None:
                low_ref, bank_ref = rest[:2]
                pair = jnp.maximum(adapter, 0) * experts + expert
                s_tile = low_ref[own_rows, :]
                if transposed:
                    acc = dot(s_tile, bank_ref[pair, own_columns, :], trans_rhs=True)
                else:
                    acc = dot(s_tile, bank_ref[pair, :, own_columns])
                acc = jnp.where(adapter >= 0, acc, 0.0)  # selected: another adapter's NaN must not reach these rows

            def step(i, acc):
                inner = pl.ds(i * depth, depth)
                lhs_tile = lhs_ref[own_rows, inner]
                if transposed:
                    return acc + dot(lhs_tile, w_ref[pl.ds(expert * num_in + column0, columns), inner], trans_rhs=True)
                return acc + dot(lhs_tile, w_ref[pl.ds(expert * num_in + i * depth, depth), own_columns])

            acc = lax.fori_loop(0, depth_of // depth, step, acc)
            out_ref[own_rows, own_columns] = acc.astype(out_ref.dtype)

    return call(
        kernel,
        [lhs, w, rows.tile_expert, rows.tile_adapter, *(low or ())],
        name="experts_dx" if transposed else "experts_forward",
        grid=(len(rows.tile_expert) * blocks,),
        out_shape=jax.ShapeDtypeStruct((len(lhs), width), lhs.dtype),
        num_warps=8 if tile >= 64 else 4,
        num_stages=3,
        interpret=interprets(),
        flops=2 * len(lhs) * num_in * num_out,
    )


def _down(x: jax.Array, bank: jax.Array, rows: ExpertRows, experts: int, *, transposed: bool) -> jax.Array:
    """x bank[p, e] of each tile, [M, R]; zero in tiles without an adapter."""
    rank = bank.shape[1] if transposed else bank.shape[2]
    tile, depth = rows.tile, row_block(x.shape[1], 128)

    def kernel(x_ref, bank_ref, expert_ref, adapter_ref, out_ref):
        number = pl.program_id(0)
        expert, adapter = expert_ref[number], adapter_ref[number]
        own_rows = pl.ds(number * tile, tile)

        @pl.when(adapter < 0)
        def _():
            out_ref[own_rows, :] = jnp.zeros((tile, rank), out_ref.dtype)

        @pl.when(adapter >= 0)
        def _():
            pair = adapter * experts + expert

            def step(i, acc):
                inner = pl.ds(i * depth, depth)
                x_tile = x_ref[own_rows, inner]
                if transposed:
                    return acc + dot(x_tile, bank_ref[pair, :, inner], trans_rhs=True)
                return acc + dot(x_tile, bank_ref[pair, inner, :])

            acc = lax.fori_loop(0, x.shape[1] // depth, step, jnp.zeros((tile, rank), jnp.float32))
            out_ref[own_rows, :] = acc.astype(out_ref.dtype)

    return call(
        kernel,
        [x, bank, rows.tile_expert, rows.tile_adapter],
        name="experts_down",
        grid=(len(rows.tile_expert),),
        out_shape=jax.ShapeDtypeStruct((len(x), rank), x.dtype),
        num_warps=4,
        num_stages=3,
        interpret=interprets(),
        flops=2 * len(x) * x.shape[1] * rank,
    )


def _sums(left: jax.Array, right: jax.Array, rows: ExpertRows, experts: int, adapters: int) -> jax.Array:
    """leftᵀ right, summed over the tiles of each adapter and expert: float32 [A, E, C, R]."""
    tile, features, rank = rows.tile, left.shape[1], right.shape[1]
    columns = row_block(features, 128)

    def kernel(left_ref, right_ref, first_ref, out_ref):
        adapter, expert = pl.program_id(0) // experts, pl.program_id(0) % experts
        own_columns = pl.ds(pl.program_id(1) * columns, columns)
        run = expert * (adapters + 1) + adapter

        def step(number, acc):
            own_rows = pl.ds(number * tile, tile)
            return acc + dot(left_ref[own_rows, own_columns], right_ref[own_rows, :], trans_lhs=True)

        start = jnp.zeros((columns, rank), jnp.float32)
        out_ref[pl.program_id(0), own_columns, :] = lax.fori_loop(first_ref[run], first_ref[run + 1], step, start)

    sums = call(
        kernel,
        [left, right, rows.first_tile],
        name="experts_sums",
        grid=(adapters * experts, features // columns),
        out_shape=jax.ShapeDtypeStruct((adapters * experts, features, rank), jnp.float32),
        num_warps=4,
        num_stages=2,
        interpret=interprets(),
        flops=2 * left.size * rank,
    )
    return sums.reshape(adapters, experts, features, rank)
