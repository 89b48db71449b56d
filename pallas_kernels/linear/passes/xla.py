"""The small passes in plain jnp: what `linear.passes.Passes` says, with no kernel. Tile sizes only cut the tables.

Nothing of one adapter is multiplied into another: blocks gather their adapter's bank, and sums select.

T packed tokens · K in features · N out features · R padded rank · A adapters · C chunks
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import dropout as masks
from pallas_kernels.dropout import Dropout
from pallas_kernels.exact import contract
from pallas_kernels.linear.chunks import Chunks
from pallas_kernels.linear.passes.config import DaConfig, DownConfig, DsdbConfig, ExtraConfig
from pallas_kernels.policy import RANK_BLOCK
from pallas_kernels.tiles import spread, sum_tiles


def keep_words(
    dropout: Dropout, block_adapter: jax.Array, num_columns: int, *, block_t: int, interpret: bool = False
) -> jax.Array:
    del interpret
    owner = jnp.clip(spread(block_adapter, block_t), 0, dropout.key.shape[0] - 1)
    return masks.keep_words(dropout, owner, num_columns)


def transposed_bank(
    pieces: Sequence[jax.Array], factor: jax.Array, total: int, dtype: jax.typing.DTypeLike, *, interpret: bool = False
) -> jax.Array:
    del interpret
    bank = jnp.concatenate([piece.astype(jnp.float32) for piece in pieces], axis=2) * factor[:, None, None]
    return jnp.pad(bank.swapaxes(1, 2), ((0, 1), (0, total - bank.shape[2]), (0, 0))).astype(dtype)


def down(
    x: jax.Array, a: jax.Array, block_adapter: jax.Array, bits: jax.Array | None, *, config: DownConfig,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    del interpret
    blocks = _apply_dropout(x, bits).reshape(-1, config.block_t, x.shape[1])
    return contract("itk,ikr->itr", blocks, a[block_adapter]).reshape(len(x), -1).astype(x.dtype)


def da(
    x: jax.Array, ds: jax.Array, bits: jax.Array | None, chunks: Chunks, *, config: DaConfig, contiguous: bool,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    del contiguous, interpret
    return contract(
        "cjtk,cjtr->ckr",
        _gather_chunks(_apply_dropout(x, bits), chunks, config.block_t),
        _gather_chunks(ds, chunks, config.block_t),
    )


def dsdb(
    dy: jax.Array, s: jax.Array, b: jax.Array, chunk_adapter: jax.Array, *, rank_offset: int = 0, config: DsdbConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    del interpret
    s_columns = s[:, rank_offset : rank_offset + b.shape[1]]
    dy_CTN, s_CTR = (rows.reshape(-1, config.chunk, rows.shape[1]) for rows in (dy, s_columns))
    ds = contract("ctn,crn->ctr", dy_CTN, b[chunk_adapter])
    return ds.reshape(1, len(dy), -1), contract("ctn,ctr->cnr", dy_CTN, s_CTR)


def extra_down(
    x: jax.Array, bank: jax.Array, block_adapter: jax.Array, active: jax.Array, bits: jax.Array | None, *,
    transposed: bool, config: ExtraConfig, interpret: bool = False,
) -> jax.Array:  # fmt: skip
    del interpret
    blocks = _apply_dropout(x, bits).reshape(-1, config.block_t, x.shape[1])
    s = contract("itk,irk->itr" if transposed else "itk,ikr->itr", blocks, bank[block_adapter])
    return _active(s, active).reshape(len(x), -1).astype(x.dtype)


def extra_up(
    y: jax.Array | None, s: jax.Array, bank: jax.Array, block_adapter: jax.Array, active: jax.Array,
    bits: jax.Array | None, *, first: int, stride: int, transposed: bool, config: ExtraConfig, interpret: bool = False,
) -> jax.Array:  # fmt: skip
    del interpret
    s_blocks = s.reshape(len(s), -1, RANK_BLOCK)[:, first::stride].reshape(
        -1, config.block_t, bank.shape[2 if transposed else 1]
    )
    s_blocks = _active(s_blocks, active)
    low = contract("itr,inr->itn" if transposed else "itr,irn->itn", s_blocks, bank[block_adapter])
    low = low.reshape(len(s), -1)
    if bits is not None:
        low = jnp.where(masks.unpack(bits, low.shape[1]), low, 0.0)
    has = spread(active > 0, config.block_t)[:, None]
    if y is None:
        return jnp.where(has, low, 0.0).astype(s.dtype)
    return jnp.where(has, (y.astype(jnp.float32) + low).astype(y.dtype), y)


def extra_sums(
    x: jax.Array, s: jax.Array, chunks: Chunks, active: jax.Array, bits: jax.Array | None, *, config: ExtraConfig,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    del interpret
    rows = config.sum_rows
    s_chunks = _gather_chunks(s, chunks, rows)
    s_chunks = _active(s_chunks.reshape(len(s_chunks), -1, s_chunks.shape[-1]), active).reshape(s_chunks.shape)
    sums = contract("cjtk,cjtr->ckr", _gather_chunks(_apply_dropout(x, bits), chunks, rows), s_chunks)
    return sums.reshape(*sums.shape[:2], -1, config.ranks).swapaxes(1, 2)


def _active(values: jax.Array, active: jax.Array) -> jax.Array:
    """[I, rows, R] with zeros beyond the active blocks of ranks of each I."""
    block = jnp.arange(values.shape[2]) // RANK_BLOCK
    return jnp.where(block < active[:, None, None], values, jnp.zeros((), values.dtype))


def join(
    pieces: Sequence[jax.Array], dtype: jax.typing.DTypeLike, *, columns: int = 0, rows: int = 0,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    del interpret
    joined = jnp.concatenate([piece.astype(jnp.float32).sum(0) for piece in pieces], axis=1).astype(dtype)
    padded = [jnp.pad(joined, ((0, 0), (0, size - joined.shape[1]))) for size in (columns, rows) if size]
    return tuple(array.T if number == (columns > 0) else array for number, array in enumerate(padded))


def sum_partials(
    partials: jax.Array, adapter: jax.Array, factor: jax.Array, parts: Sequence[tuple[int, int]], *, transposed: bool,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    del interpret
    sums = sum_tiles(partials, adapter, factor.shape[0]) * factor[:, None, None]
    slices = (sums[:, :, start : start + width] for start, width in parts)
    return tuple(part.swapaxes(1, 2) if transposed else part for part in slices)


def _apply_dropout(x: jax.Array, bits: jax.Array | None) -> jax.Array:
    return x if bits is None else jnp.where(masks.unpack(bits, x.shape[1]), x, jnp.zeros((), x.dtype))


def _gather_chunks(rows: jax.Array, chunks: Chunks, block: int) -> jax.Array:
    """Row blocks by chunk, [C, size, block, …]; zeros, selected, where a chunk has no block."""
    blocks = rows.reshape(-1, block, rows.shape[1])[jnp.maximum(chunks.blocks, 0)]
    return jnp.where((chunks.blocks >= 0)[:, :, None, None], blocks, jnp.zeros((), rows.dtype))
