"""The projections of experts as Triton kernels: sm_80 and newer, interpreted on a CPU.

A program of a product has one tile of rows, so one expert, and adds the low-rank term of each adapter in it to this
adapter's rows. The low-rank passes have a program for each segment; a gradient is summed over the rows of a run, from
its start on, by one program: a fixed order, no atomics, whatever the rows of other adapters do.

M sorted rows · K in · N out · E experts · A adapters · R rank, Q rank padded to a power of two · C features of x or dy
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import interprets, target_platform, wide_integers
from pallas_kernels.experts.fp8 import Fp8Experts, Kernels
from pallas_kernels.experts.rows import ExpertRows
from pallas_kernels.experts.triton import fp8
from pallas_kernels.experts.triton.blocks import Blocks, add_low_rank, fastest_blocks, is_inside
from pallas_kernels.sizes import power_of_two, row_block
from pallas_kernels.triton_call import call, dot, has_dot_8bit

MAX_RANK = 64
_LEAST = 16  # rows and columns of a product of Triton
_SUMMED = 64  # rows of a step of the sums of a run


def unsupported_reason(x: jax.Array, w: Kernels, experts: int, rank: int) -> str | None:
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
    if rank > MAX_RANK:
        return f"rank {rank}: it takes up to {MAX_RANK}"
    if isinstance(w, Fp8Experts) and x.dtype == jnp.float16 and not has_dot_8bit():
        return "x is float16, which does not hold the values of 8-bit floats with their scales"
    return None


def product(
    x: jax.Array,
    w: Kernels,
    rows: ExpertRows,
    experts: int,
    *,
    transposed: bool = False,
    blocks: Blocks | None = None,
) -> jax.Array:
    """Multiplies each tile by its expert's kernel, or by its transpose."""
    return _gemm(x, w, rows, experts, None, blocks, transposed=transposed)


def forward(
    x: jax.Array, w: Kernels, rows: ExpertRows, experts: int, a: jax.Array, b: jax.Array, scale: jax.Array, *,
    blocks: Blocks | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns y, and S = x A in the type of x, [M, Q]. Rows without an adapter hold no meaning in S."""
    banks = _banks(a, b, scale, x.dtype)
    s = down(x, banks[0], rows, experts)
    return _gemm(x, w, rows, experts, (s, banks[1]), blocks, transposed=False), s


def backward(
    x: jax.Array, w: Kernels, rows: ExpertRows, experts: int, a: jax.Array, b: jax.Array, scale: jax.Array,
    s: jax.Array, dy: jax.Array, *, blocks: Blocks | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Returns dx, and dA and dB in float32."""
    bank_a, bank_b = _banks(a, b, scale, x.dtype)
    dy = dy.astype(x.dtype)
    ds = down(dy, bank_b, rows, experts, transposed=True)
    dx = _gemm(dy, w, rows, experts, (ds, bank_a), blocks, transposed=True)
    da = sums(x, ds, rows, a.shape, jnp.ones_like(scale))
    return dx, da, sums(dy, s, rows, b.shape, scale, transposed=True)


def _banks(a: jax.Array, b: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """A [A · E, K, Q] and scale · B [A · E, Q, N]."""
    wide = max(power_of_two(a.shape[-1]), _LEAST) - a.shape[-1]
    a = jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, wide))).astype(dtype)
    b = jnp.pad(b * scale[:, None, None, None], ((0, 0), (0, 0), (0, wide), (0, 0))).astype(dtype)
    return a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:])


def _gemm(
    lhs: jax.Array, w: Kernels, rows: ExpertRows, experts: int, low: tuple[jax.Array, jax.Array] | None,
    cut: Blocks | None, *, transposed: bool,
) -> jax.Array:  # fmt: skip
    """lhs W[e] + low bank[p, e], or with both transposed."""
    if isinstance(w, Fp8Experts):
        if has_dot_8bit():
            return fp8.gemm(lhs, w, rows, experts, low, cut, transposed=transposed)
        lhs, w = fp8.widened(lhs, w, rows, transposed=transposed)
    num_in, num_out = w.shape[0] // experts, w.shape[1]
    cut = cut or fastest_blocks(rows.tile, lhs.dtype.itemsize)
    width, depth_of = (num_in, num_out) if transposed else (num_out, num_in)
    tile, columns, depth = rows.tile, row_block(width, cut.columns), row_block(depth_of, cut.depth)
    blocks = width // columns

    def kernel(lhs_ref, w_ref, expert_ref, *rest):
        *low_refs, out_ref = rest
        number, column0 = pl.program_id(0) // blocks, pl.program_id(0) % blocks * columns
        expert = expert_ref[number]  # all rows of a tile belong to it
        tile_rows, tile_columns = pl.ds(number * tile, tile), pl.ds(column0, columns)

        @pl.when(expert < 0)
        def _():
            out_ref[tile_rows, tile_columns] = jnp.zeros((tile, columns), out_ref.dtype)

        @pl.when(expert >= 0)
        def _():
            # The low-rank product starts the accumulator of the frozen one: one result, written once.
            acc = jnp.zeros((tile, columns), jnp.float32)
            if low_refs:
                acc = add_low_rank(acc, number, tile_rows, tile_columns, experts, low_refs, transposed=transposed)

            def step(i, acc):
                inner = pl.ds(i * depth, depth)
                lhs_tile = lhs_ref[tile_rows, inner]
                if transposed:
                    return acc + dot(lhs_tile, w_ref[pl.ds(expert * num_in + column0, columns), inner], trans_rhs=True)
                return acc + dot(lhs_tile, w_ref[pl.ds(expert * num_in + i * depth, depth), tile_columns])

            acc = lax.fori_loop(0, depth_of // depth, step, acc)
            out_ref[tile_rows, tile_columns] = acc.astype(out_ref.dtype)

    of_adapters = [] if low is None else [*low, rows.tile_segment, rows.segment_run, rows.run_start, rows.run_stop]
    return call(
        kernel,
        [lhs, w, rows.tile_expert, *of_adapters],
        name="experts_dx" if transposed else "experts_forward",
        grid=(len(rows.tile_expert) * blocks,),
        out_shape=jax.ShapeDtypeStruct((len(lhs), width), lhs.dtype),
        num_warps=cut.num_warps if tile >= 64 else 4,
        num_stages=cut.num_stages,
        interpret=interprets(),
        flops=2 * len(lhs) * num_in * num_out,
    )


def down(x: jax.Array, bank: jax.Array, rows: ExpertRows, experts: int, *, transposed: bool = False) -> jax.Array:
    """x bank[p, e] in the rows of adapters, [M, Q]. Other rows are not written."""
    rank = bank.shape[1] if transposed else bank.shape[2]
    tile, depth, runs_of_expert = rows.tile, row_block(x.shape[1], 128), len(rows.run_start) // experts

    def kernel(x_ref, bank_ref, tile_ref, run_ref, start_ref, stop_ref, out_ref):
        run, number = run_ref[pl.program_id(0)], tile_ref[pl.program_id(0)]

        @pl.when(run >= 0)
        def _():
            pair = run % runs_of_expert * experts + run // runs_of_expert
            # A tile may hold rows of several adapters: each program loads and stores those of its run, by masks.
            row0 = number * tile
            tile_rows, start, stop = pl.ds(row0, tile), start_ref[run], stop_ref[run]

            def step(i, acc):
                inner = pl.ds(i * depth, depth)
                inside = is_inside(row0, (tile, depth), start, stop)
                x_tile = plt.load(x_ref.at[tile_rows, inner], mask=inside, other=0.0)
                if transposed:
                    return acc + dot(x_tile, bank_ref[pair, :, inner], trans_rhs=True)
                return acc + dot(x_tile, bank_ref[pair, inner, :])

            acc = lax.fori_loop(0, x.shape[1] // depth, step, jnp.zeros((tile, rank), jnp.float32))
            inside = is_inside(row0, (tile, rank), start, stop)
            plt.store(out_ref.at[tile_rows, :], acc.astype(out_ref.dtype), mask=inside)

    return call(
        kernel,
        [x, bank, rows.segment_tile, rows.segment_run, rows.run_start, rows.run_stop],
        name="experts_down",
        grid=(len(rows.segment_run),),
        out_shape=jax.ShapeDtypeStruct((len(x), rank), x.dtype),
        num_warps=4,
        num_stages=3,
        interpret=interprets(),
        flops=2 * len(x) * x.shape[1] * rank,
    )


def sums(
    left: jax.Array, right: jax.Array, rows: ExpertRows, shape: tuple[int, ...], scale: jax.Array, *,
    transposed: bool = False,
) -> jax.Array:  # fmt: skip
    """scale[p] · leftᵀ right, summed over the rows of each run: float32 [A, E, C, R], or [A, E, R, C] if transposed."""
    adapters, experts = shape[:2]
    features, rank, padded = left.shape[1], shape[2 if transposed else 3], right.shape[1]
    block, columns = min(rows.tile, _SUMMED), row_block(features, 128)

    def kernel(left_ref, right_ref, start_ref, stop_ref, scale_ref, out_ref):
        pair, column0 = pl.program_id(0), pl.program_id(1) * columns
        adapter = pair // experts
        run = pair % experts * (adapters + 1) + adapter
        # One program reads all rows of a run, in order: no partial sums, and the same bits in every call.
        start, stop = start_ref[run], stop_ref[run]

        def step(i, acc):
            row0 = start + i * block
            block_rows = pl.ds(row0, block)
            inside = lambda width: is_inside(row0, (block, width), start, stop)  # noqa: E731
            left_tile = plt.load(left_ref.at[block_rows, pl.ds(column0, columns)], mask=inside(columns), other=0.0)
            right_tile = plt.load(right_ref.at[block_rows, :], mask=inside(padded), other=0.0)
            return acc + dot(left_tile, right_tile, trans_lhs=True)

        zeros = jnp.zeros((columns, padded), jnp.float32)
        acc = lax.fori_loop(0, pl.cdiv(stop - start, block), step, zeros) * scale_ref[adapter]
        acc, axis = (acc.T, 0) if transposed else (acc, 1)
        feature = column0 + lax.broadcasted_iota(jnp.int32, acc.shape, 1 - axis)
        low = lax.broadcasted_iota(jnp.int32, acc.shape, axis)
        at = (pair * rank + low, feature) if transposed else (pair * features + feature, low)
        plt.store(out_ref.at[at], acc, mask=low < rank)

    flat = jax.ShapeDtypeStruct((adapters * experts * shape[2], shape[3]), jnp.float32)
    return call(
        kernel,
        [left, right, rows.run_start, rows.run_stop, scale],
        name="experts_sums",
        grid=(adapters * experts, features // columns),
        out_shape=flat,
        num_warps=4,
        num_stages=3,
        interpret=interprets(),
        flops=2 * left.size * rank,
    ).reshape(shape)
