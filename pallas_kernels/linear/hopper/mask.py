"""Keep bits inside Hopper kernels: made in registers, and applied to a tile of x in shared memory.

A word's bits run over the columns in the register order of a tensor-core fragment, so a thread makes or reads exactly
the words of its own elements, and no mask ever moves between threads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.dropout import BLOCK, WORDS, keep_words_at, row_state
from pallas_kernels.linear.hopper.tiling import ROWS

ATOM = 64  # columns of a 128-byte swizzle with 2-byte elements


def make_words(key: Any, thresh: Any, row_key: jax.Array, block: Any) -> jax.Array:
    """Returns the words uint32 [64, 8] of a 256-column block.

    Args:
        key, thresh: uint32 scalars of the rows' adapter.
        row_key: uint32 [64], in the layout of accumulator rows.
    """
    start, stride = row_state(key, row_key)
    shape = (ROWS, WORDS)
    word = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + block * WORDS
    start, stride = (lax.broadcast_in_dim(value, shape, (0,)) for value in (start, stride))
    return keep_words_at(start, stride, jnp.broadcast_to(thresh, shape), word.astype(jnp.uint32))


def first_bit(column: Any) -> jax.Array:
    """The bit that a column has in the words of its block."""
    return lax.div(lax.rem(column, BLOCK), WORDS).astype(jnp.uint32)


def load_words(words_smem: Any, bit: jax.Array) -> jax.Array:
    """Reads the words of a block, so that their lowest bits are those of the columns from `bit` on."""
    return shifted(plgpu.load(words_smem, layout=plgpu.Layout.WGMMA, optimized=False), bit)


def shifted(words: jax.Array, bit: Any) -> jax.Array:
    """Shifts words so that `bit` becomes the lowest."""
    return lax.shift_right_logical(words, jnp.broadcast_to(jnp.asarray(bit).astype(jnp.uint32), words.shape))


def apply_words(tile_smem: Any, words: jax.Array, *, first: int = 0) -> None:
    """Zeroes the dropped elements of a tile [64, columns] in shared memory, where tensor cores then read it.

    Includes a barrier of the whole warpgroup: afterwards, every warp is past what it read before the call.

    Args:
        first: the bit of the tile's first column.
    """
    for atom in range(tile_smem.shape[1] // ATOM):
        columns = pl.ds(atom * ATOM, ATOM)
        tile = plgpu.load(tile_smem.at[:, columns], layout=plgpu.Layout.WGMMA)
        tile_smem[:, columns] = keep_words_of(tile, words, first=first + atom * ATOM // WORDS)
    plgpu.commit_smem()  # a barrier of the warpgroup, and a fence for the tensor cores and the copy engine


def keep_words_of(tile: jax.Array, words: jax.Array, *, first: int = 0) -> jax.Array:
    """Zeroes the dropped elements of a tile in registers, in the layout of an accumulator."""
    parts = []
    for q in range(tile.shape[1] // WORDS):
        keep = (words & np.uint32(1 << (first + q))) != jnp.zeros_like(words)
        part = tile[:, q * WORDS : (q + 1) * WORDS]
        parts.append(jnp.where(keep, part, jnp.zeros_like(part)))
    return lax.concatenate(parts, 1)
