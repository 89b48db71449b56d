"""The low-rank work of extra ranks: three products whose programs read from a table how many ranks their rows have.

Ranks come in blocks of 64. The table has, for every row block, its adapter's number of blocks. A program beyond them
has loops of length zero and moves nothing, so the cost of a tile follows from its adapter's rank.

T packed tokens · M features of an input or an output · R extra ranks, padded to blocks · A adapters · C chunks
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.chunks import Chunks
from pallas_kernels.linear.passes.config import ExtraConfig
from pallas_kernels.policy import RANK_BLOCK
from pallas_kernels.triton_call import call, dot, keep_tile


def extra_down(
    x: jax.Array,
    bank: jax.Array,
    block_adapter: jax.Array,
    active: jax.Array,
    bits: jax.Array | None,
    *,
    transposed: bool,
    config: ExtraConfig,
    interpret: bool = False,
) -> jax.Array:
    """Returns drop(x) bank[adapter of the row], [T, R] in x.dtype; zeros beyond the active blocks of ranks."""
    num_rows, num_features = x.shape
    rank = bank.shape[1] if transposed else bank.shape[2]
    rows, columns, width = config.block_t, config.block_m, config.ranks
    steps = num_features // config.split // columns

    def kernel(x_ref, bank_ref, adapter_ref, active_ref, *rest):
        out_ref = rest[-1]
        group, block, part = (pl.program_id(axis) for axis in range(3))
        row0, ranks = block * rows, pl.ds(group * width, width)
        adapter = adapter_ref[block]

        def step(i, acc):
            col0 = (part * steps + i) * columns
            features = pl.ds(col0, columns)
            tile = x_ref[pl.ds(row0, rows), features]
            if bits is not None:
                tile = jnp.where(keep_tile(rest[0], row0, col0, rows, columns), tile, jnp.zeros_like(tile))
            if transposed:
                return acc + dot(tile, bank_ref[adapter, ranks, features], trans_rhs=True)
            return acc + dot(tile, bank_ref[adapter, features, ranks])

        # Zero steps, and so zeros, where the block's adapter has no ranks in this group.
        count = steps * _reaches(group, width, active_ref[block])
        acc = lax.fori_loop(0, count, step, jnp.zeros((rows, width), jnp.float32))
        out_ref[part, pl.ds(row0, rows), ranks] = acc.astype(out_ref.dtype)

    partials = call(
        kernel,
        [x, bank, block_adapter, active] + ([] if bits is None else [bits]),
        name="lora_extra_down",
        grid=(rank // width, num_rows // rows, config.split),
        out_shape=jax.ShapeDtypeStruct((config.split, num_rows, rank), x.dtype if config.split == 1 else jnp.float32),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        flops=2 * num_rows * num_features * rank,
    )
    return partials[0] if config.split == 1 else partials.sum(0).astype(x.dtype)


def extra_up(
    y: jax.Array | None,
    s: jax.Array,
    bank: jax.Array,
    block_adapter: jax.Array,
    active: jax.Array,
    bits: jax.Array | None,
    *,
    first: int,
    stride: int,
    transposed: bool,
    config: ExtraConfig,
    interpret: bool = False,
) -> jax.Array:
    """Returns y + mask * (s bank[adapter of the row]), written where y was; rows without extra ranks stay untouched.

    Args:
        y: None: the product for itself, zero where rows have no extra ranks.
        s: its blocks of columns first, first + stride, ... meet the blocks of the bank.
    """
    num_rows, num_features = s.shape[0], bank.shape[1 if transposed else 2]
    rows, columns = config.block_t, config.block_m
    operands = [] if y is None else [y]

    def kernel(*refs):
        y_ref, refs = (None, refs) if y is None else (refs[0], refs[1:])
        s_ref, bank_ref, adapter_ref, active_ref, *other_refs = refs
        out_ref = other_refs[-1]
        col0, row0 = pl.program_id(0) * columns, pl.program_id(1) * rows
        row_range, features = pl.ds(row0, rows), pl.ds(col0, columns)
        count, adapter = active_ref[pl.program_id(1)], adapter_ref[pl.program_id(1)]

        def add():
            def step(j, acc):
                low = s_ref[row_range, pl.ds((first + j * stride) * RANK_BLOCK, RANK_BLOCK)]
                ranks = pl.ds(j * RANK_BLOCK, RANK_BLOCK)
                if transposed:
                    return acc + dot(low, bank_ref[adapter, features, ranks], trans_rhs=True)
                return acc + dot(low, bank_ref[adapter, ranks, features])

            low = lax.fori_loop(0, count, step, jnp.zeros((rows, columns), jnp.float32))
            if bits is not None:
                low = jnp.where(keep_tile(other_refs[0], row0, col0, rows, columns), low, 0.0)
            if y_ref is not None:
                low = y_ref[row_range, features].astype(jnp.float32) + low
            out_ref[row_range, features] = low.astype(out_ref.dtype)

        if y_ref is None:
            add()  # writes zeros where rows have no extra ranks
        else:
            pl.when(count > 0)(add)  # out is y: other rows are left as they are

    return call(
        kernel,
        [*operands, s, bank, block_adapter, active] + ([] if bits is None else [bits]),
        name="lora_extra_up",
        grid=(num_features // columns, num_rows // rows),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_features), s.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        flops=2 * num_rows * num_features * s.shape[1],
        in_place=y is not None,
    )


def extra_sums(
    x: jax.Array,
    s: jax.Array,
    chunks: Chunks,
    active: jax.Array,
    bits: jax.Array | None,
    *,
    config: ExtraConfig,
    interpret: bool = False,
) -> jax.Array:
    """Returns partial sums of drop(x)^T s, float32 [C, R / ranks of a program, M, ranks of a program].

    Those of a chunk without row blocks are not written.

    Args:
        active: int32 [C].
    """
    num_features, rank = x.shape[1], s.shape[1]
    rows, columns, width = config.sum_rows, config.block_m, config.ranks
    total = chunks.blocks.shape[0]

    def kernel(x_ref, s_ref, blocks_ref, count_ref, active_ref, *rest):
        out_ref = rest[-1]
        group, col0, chunk = pl.program_id(0), pl.program_id(1) * columns, pl.program_id(2)
        features = pl.ds(col0, columns)

        def step(i, acc):
            row0 = blocks_ref[chunk, i] * rows
            tile = x_ref[pl.ds(row0, rows), features]
            if bits is not None:
                tile = jnp.where(keep_tile(rest[0], row0, col0, rows, columns), tile, jnp.zeros_like(tile))
            return acc + dot(tile, s_ref[pl.ds(row0, rows), pl.ds(group * width, width)], trans_lhs=True)

        @pl.when(count_ref[chunk] > 0)  # nobody reads the sums of a chunk without blocks
        def _():
            count = count_ref[chunk] * _reaches(group, width, active_ref[chunk])
            out_ref[chunk, group, features, :] = lax.fori_loop(0, count, step, jnp.zeros((columns, width), jnp.float32))

    return call(
        kernel,
        [x, s, chunks.blocks, chunks.count, active] + ([] if bits is None else [bits]),
        name="lora_extra_sums",
        grid=(rank // width, num_features // columns, total),
        out_shape=jax.ShapeDtypeStruct((total, rank // width, num_features, width), jnp.float32),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        flops=2 * x.shape[0] * num_features * rank,
    )


def _reaches(group: jax.Array, width: int, active: jax.Array) -> jax.Array:
    """1 if the active blocks of ranks reach into a group of `width` ranks, else 0. Loop counts are multiplied by it, as
    Triton does not take a selected count."""
    return lax.clamp(jnp.int32(0), active - group * (width // RANK_BLOCK), jnp.int32(1))
