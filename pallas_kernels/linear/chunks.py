"""Tables that deal row blocks out to kernel programs so that each program serves one adapter.

A chunk is up to `size` row blocks of one adapter.  Chunk j of an adapter always holds its blocks
[j * size, (j + 1) * size): the partial sums of an adapter do not depend on who else is in the call, as long as T and
the padded rank, from which `size` follows, are the same.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Row blocks by chunk; category A (one more than the adapters) collects the blocks of padding rows."""

    blocks: jax.Array  # int32 [C, size], -1 = none
    count: jax.Array  # int32 [C]
    adapter: jax.Array  # int32 [C], 0..A, -1 = unused chunk


def num_chunks(num_blocks: int, num_adapters: int, size: int, *, single: bool) -> int:
    """Bounds the number of chunks over all tables of that size."""
    if single:
        return -(-num_blocks // size)
    return min(num_blocks, (num_blocks + (num_adapters + 1) * (size - 1)) // size)


def make_chunks(block_adapter: jax.Array, num_adapters: int, size: int, *, single: bool) -> Chunks:
    """Builds the table.  Compare-and-reduce over a few hundred entries: no sort, no scatter, two small fusions."""
    num_blocks = block_adapter.shape[0]
    total = num_chunks(num_blocks, num_adapters, size, single=single)
    if single:
        blocks = np.arange(total * size, dtype=np.int32).reshape(total, size)
        blocks = np.where(blocks < num_blocks, blocks, -1).astype(np.int32)
        return Chunks(
            blocks=jnp.asarray(blocks),
            count=jnp.asarray((blocks >= 0).sum(1, dtype=np.int32)),
            adapter=jnp.zeros(total, jnp.int32),
        )
    category = jnp.where(block_adapter < 0, num_adapters, block_adapter)
    number = jnp.arange(num_blocks, dtype=jnp.int32)
    same = category[:, None] == category[None, :]
    rank = jnp.sum(same & (number[None, :] < number[:, None]), axis=1, dtype=jnp.int32)
    blocks_of = jnp.sum(category[None, :] == jnp.arange(num_adapters + 1)[:, None], axis=1, dtype=jnp.int32)
    chunks_of = (blocks_of + size - 1) // size
    first = jnp.sum(
        jnp.where(jnp.arange(num_adapters + 1)[None, :] < category[:, None], chunks_of[None, :], 0),
        axis=1, dtype=jnp.int32,
    )  # fmt: skip
    chunk = first + rank // size
    index = chunk * size + rank % size
    holds = index[None, :] == jnp.arange(total * size, dtype=jnp.int32)[:, None]
    blocks = jnp.max(jnp.where(holds, number[None, :], -1), axis=1).reshape(total, size)
    in_chunk = chunk[None, :] == jnp.arange(total, dtype=jnp.int32)[:, None]
    return Chunks(
        blocks=blocks,
        count=jnp.sum(in_chunk, axis=1, dtype=jnp.int32),
        adapter=jnp.max(jnp.where(in_chunk, category[None, :], -1), axis=1),
    )
