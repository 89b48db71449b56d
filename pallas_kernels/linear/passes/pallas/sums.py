"""Partial sums of several adapters, added up per adapter in one pass and in a fixed order.

A program has a block of one adapter's gradient. It reads only that adapter's partial sums, several at a time, in their
order: which other adapters a call holds does not change the additions, as long as the padded rank is the same. Each
projection gets its own output: slicing one array later would cost a launch and a copy each.

C chunks · M rows of a partial sum · R padded rank · A adapters
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from pallas_kernels.triton_call import call

# An adapter has some 16 partial sums. Read one after another, each waits for device memory: 64 of 4096 x 16 took 16 us
# on an H200, where reading them takes 4. So a program reads as many at once as its registers hold, 64 a thread.
TILE = 16 * 512
MIN_ROWS = 8  # 32 bytes of a transposed row


def sum_partials(
    partials: jax.Array,
    adapter: jax.Array,
    factor: jax.Array,
    parts: Sequence[tuple[int, int]],
    *,
    transposed: bool,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Returns factor[k] * sum of the partial sums of adapter k: float32 [A, M, rank], or [A, rank, M] when transposed.

    Args:
        partials: float32 [C, M, R]; M divides by 32, R is a power of two from 16 on.
        adapter: int32 [C]; chunks of other numbers than 0 .. A - 1 are padding.
        factor: float32 [A].
        parts: first column and rank, any rank, of each result.
    """
    chunks, size, rank = partials.shape
    num_adapters = factor.shape[0]
    rows = max(MIN_ROWS, 512 // rank)
    block = rows * rank
    at_once = max(1, TILE // block)
    padded = max(16, 1 << (chunks - 1).bit_length())

    def kernel(partials_ref, adapter_ref, factor_ref, *out_refs):
        k, row0 = pl.program_id(1), pl.program_id(0) * rows
        number = lax.iota(jnp.int32, padded)
        mine = plt.load(adapter_ref.at[number], mask=number < chunks, other=-1) == k
        order = jnp.where(
            mine, jnp.cumsum(mine.astype(jnp.int32)) - 1, -1
        )  # of a chunk among this adapter's; -1: other
        count = jnp.sum(mine.astype(jnp.int32))
        elements = row0 * rank + lax.iota(jnp.int32, block)

        def step(i, acc):
            chunks = i * at_once + lax.iota(jnp.int32, at_once)
            # The numbers of the wanted chunks, by selection: registers cannot be indexed.
            chunk = jnp.sum(jnp.where(order[None, :] == chunks[:, None], number[None, :], 0), axis=1)
            exists = jnp.broadcast_to((chunks < count)[:, None], (at_once, block))
            source = partials_ref.at[
                jnp.broadcast_to(chunk[:, None], exists.shape), jnp.broadcast_to(elements[None, :], exists.shape)
            ]
            return acc + jnp.sum(plt.load(source, mask=exists, other=0.0), axis=0)

        steps = lax.div(count + (at_once - 1), at_once)
        acc = lax.fori_loop(0, steps, step, jnp.zeros(block, jnp.float32)) * factor_ref[k]
        acc = acc.reshape(rows, rank)
        for out_ref, part in zip(out_refs, parts, strict=True):
            write(out_ref, part, k, row0, acc)

    def write(out_ref: Any, part: tuple[int, int], k: jax.Array, row0: jax.Array, acc: jax.Array) -> None:
        start, width = part
        if width < rank:  # registers cannot be cut: the other columns are masked
            row = row0 + lax.broadcasted_iota(jnp.int32, acc.shape, 0)
            column = lax.broadcasted_iota(jnp.int32, acc.shape, 1) - start
            inside = (column >= 0) & (column < width)
            column = jnp.where(inside, column, width)  # out of bounds: the interpreter drops these
            index = (column, row) if transposed else (row, column)
            plt.store(out_ref.at[jnp.broadcast_to(k, acc.shape), *index], acc, mask=inside)
        elif transposed:
            out_ref[k, :, pl.ds(row0, rows)] = acc.T
        else:
            out_ref[k, pl.ds(row0, rows), :] = acc

    shapes = [(num_adapters, width, size) if transposed else (num_adapters, size, width) for _, width in parts]
    return call(
        kernel,
        [partials.reshape(chunks, size * rank), adapter, factor],
        name="lora_sum",
        grid=(size // rows, num_adapters),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )
