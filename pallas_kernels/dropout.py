"""Dropout as a pure function of (adapter key, row key, column).

T packed tokens · K in features · A adapters

Columns come in blocks of 256.  Word `c` (0..7) of a block holds 32 keep bits: bit `j` belongs to column `8 * j + c`
of the block.  This order is the register layout of a tensor-core accumulator, so a kernel can mask a product without
moving data between threads.

A column is dropped when a 16-bit number `u` is below the adapter's threshold `t = round(rate * 65536)`.  The numbers
are never formed: bit `i` of all 32 of them is one hashed word, and `u < t` is folded bit by bit, one majority function
per word.  That is 16 hashes for 32 columns, and the result is already packed.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

BLOCK = 256  # columns that share one set of words
WORDS = 8  # words of a block
BITS = 16  # resolution of the rate: 1 / 65536

# numpy scalars, not jax arrays: nothing touches a device at import
_GOLDEN, _SILVER, _BRONZE = np.uint32(0x9E3779B9), np.uint32(0x85EBCA77), np.uint32(0xC2B2AE3D)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Describes which inputs of the LoRA branch are dropped.

    Args:
        rate: float32 [A], 0 <= rate < 1, rounded to multiples of 1/65536 (the scaling uses the rounded rate).
        key: uint32 [A], one key per adapter; derive one per projection with `fold_key`.
        row_key: uint32 [T], one key per row, made from what identifies the row (sample, epoch, position), never from
            its place in the microbatch.
        first_column: int32, the layer's number of the first column of x, where x holds a part of them (None: 0).

    Example:
        >>> key, row_key = jnp.array([7], jnp.uint32), jnp.arange(4, dtype=jnp.uint32)
        >>> drop = Dropout(rate=jnp.array([0.1]), key=key, row_key=row_key)
        >>> keep_mask(drop, jnp.zeros(4, jnp.int32), 512).shape
        (4, 512)
    """

    rate: Float[Array, " A"]
    key: UInt32[Array, " A"]
    row_key: UInt32[Array, " T"]
    first_column: Int[Array, ""] | None = None


def fold_key(key: jax.Array, site: int | jax.Array) -> jax.Array:
    """Derives the keys of one projection from the keys of the adapters.

    key'[k] = mix(key[k] ^ mix(site)); for a fixed key, different sites never share a key.

    Args:
        key: uint32 [A].
        site: number of the projection in the model, an int or a traced integer.

    Example:
        >>> fold_key(jnp.array([1, 2], jnp.uint32), 8).dtype
        dtype('uint32')
    """
    site = jnp.asarray(site).astype(jnp.uint32)
    return mix32(jnp.asarray(key, jnp.uint32) ^ mix32(site * _GOLDEN + _SILVER))


def mix32(h: jax.Array) -> jax.Array:
    """Scrambles uint32: a bijection in which every input bit flips every output bit with probability near 1/2.

    Source: the constants are those of `lowbias32` (C. Wellons, "Prospecting for Hash Functions", 2018).
    """
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))


def threshold(rate: jax.Array) -> jax.Array:
    """Rounds rates to the 16-bit threshold below which a number means "drop"."""
    t = jnp.round(jnp.asarray(rate, jnp.float32) * (1 << BITS))
    return jnp.clip(t, 0, (1 << BITS) - 1).astype(jnp.uint32)


def inverse_keep(rate: jax.Array) -> jax.Array:
    """Returns 1 / (1 - rate) for the rounded rate, so that the expectation is exact."""
    return (1 << BITS) / ((1 << BITS) - threshold(rate).astype(jnp.float32))


def row_state(key: jax.Array, row_key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Expands (adapter key, row key) to the start and the odd stride of a row's counter.

    Two rows share a mask, or a shifted copy of one, only if 63 bits agree.
    """
    start = mix32(row_key ^ mix32(key ^ _GOLDEN))
    stride = mix32(row_key + mix32(key ^ _BRONZE))
    return start, stride | np.uint32(1)


def keep_words_at(start: jax.Array, stride: jax.Array, thresh: jax.Array, word: jax.Array) -> jax.Array:
    """Returns 32 keep bits per word number; arguments broadcast.  Plain jnp: runs inside and outside kernels."""
    counter = start + (word << np.uint32(4)) * stride
    drop = counter ^ counter
    for i in range(BITS):
        random = ~mix32(counter)
        bit = np.uint32(0) - ((thresh >> np.uint32(i)) & np.uint32(1))  # all ones where bit i of the threshold is set
        drop = (random & drop) | (bit & (random | drop))  # u < t so far: majority of the three
        counter = counter + stride
    return ~drop


def keep_words(dropout: Dropout, row_adapter: jax.Array, num_columns: int) -> jax.Array:
    """Packs the keep mask: uint32 [T, ceil(K / 256), 8], bit `j` of word `c` = column `8 j + c` of the block.

    Args:
        row_adapter: int32 [T], the adapter of each row; rows of -1 get the bits of adapter 0 (they are not read).
    """
    first_column, num_blocks = dropout.first_column, -(-num_columns // BLOCK)
    if first_column is None:
        return _words(dropout, row_adapter, jnp.arange(num_blocks * WORDS, dtype=jnp.uint32))
    # two blocks more: the columns may start inside a block, and the last of them end in the next one
    first_word = (first_column // BLOCK * WORDS).astype(jnp.uint32)
    words = _words(dropout, row_adapter, jnp.arange((num_blocks + 2) * WORDS, dtype=jnp.uint32) + first_word)
    return _shift_columns(words, first_column % BLOCK)


def _words(dropout: Dropout, row_adapter: jax.Array, word: jax.Array) -> jax.Array:
    """The words of some numbers, a multiple of 8: uint32 [T, blocks, 8]."""
    row_adapter = jnp.maximum(row_adapter, 0)
    start, stride = row_state(dropout.key.astype(jnp.uint32)[row_adapter], dropout.row_key.astype(jnp.uint32))
    word = word[None, :]
    thresh = threshold(dropout.rate)[row_adapter]
    words = keep_words_at(start[:, None], stride[:, None], thresh[:, None], word)
    return words.reshape(-1, word.shape[1] // WORDS, WORDS)


def _shift_columns(words_TBW: jax.Array, columns: jax.Array) -> jax.Array:
    """Words of blocks that start 0..255 columns later, without the last two: a funnel shift of neighbouring blocks."""
    column = columns + jnp.arange(WORDS)  # where the words of the first block start
    bit = column // WORDS
    index = bit // 32 * WORDS + column % WORDS + jnp.arange(words_TBW.shape[1] - 2)[:, None] * WORDS
    flat, bit = words_TBW.reshape(words_TBW.shape[0], -1), (bit % 32).astype(jnp.uint32)
    low, high = flat[:, index], flat[:, index + WORDS]
    return jnp.where(bit == 0, low, (low >> bit) | (high << (np.uint32(32) - bit)))


def unpack(words: jax.Array, num_columns: int) -> jax.Array:
    """Turns packed words [T, blocks, 8] into bool [T, num_columns]."""
    shift = jnp.arange(BLOCK // WORDS, dtype=jnp.uint32)[None, None, :, None]
    keep = ((words[:, :, None, :] >> shift) & np.uint32(1)) != 0
    return keep.reshape(words.shape[0], -1)[:, :num_columns]


def keep_mask(dropout: Dropout, row_adapter: jax.Array, num_columns: int) -> jax.Array:
    """Returns the keep mask bool [T, K]: what every backend applies, spelled out."""
    return unpack(keep_words(dropout, row_adapter, num_columns), num_columns)
