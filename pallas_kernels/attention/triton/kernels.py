"""Forward and backward kernels: online softmax over the tiles of a document.

A program has a block of queries (forward, dq) or of keys (dk, dv) of one head, in registers throughout, and walks over
the tiles of the other side that its documents reach. Tiles of other documents are not read. In the tiles at their
borders weights are selected, never multiplied by a mask. Sums have a fixed order, without atomics. Triton's compiler
prefetches the next tiles into shared memory, `num_stages` deep.

T packed rows · H query heads · K key heads, H a multiple · C head width
"""

from __future__ import annotations

import math

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.triton.config import AttentionConfig
from pallas_kernels.triton_call import call, dot

MASKED = float("-inf")
LOG2E = math.log2(math.e)


def forward(
    q_THC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, first_T: jax.Array, *, scale: float,
    soft_cap: float | None = None, config: AttentionConfig, interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns o and the base-2 logarithms of the sums of the softmax, float32 [H, T]."""
    T, H, C = q_THC.shape
    group = H // k_TKC.shape[1]

    def kernel(q_ref, k_ref, v_ref, first_ref, o_ref, lse2_ref):
        block, head = _last_first(T // config.block_rows), pl.program_id(1)
        queries, first = _rows(block, config.block_rows), first_ref[pl.ds(block * config.block_rows, config.block_rows)]
        block_range, key_head = pl.ds(block * config.block_rows, config.block_rows), lax.div(head, group)
        # A block of queries is loaded once. Tiles of keys and values stream past it; Triton loads those of the next
        # `num_stages` steps meanwhile. The running maximum, sum and output stay in registers.
        q = q_ref[block_range, head, :]

        def step(tile, carry):
            m_before, total, o = carry
            tile_range = pl.ds(tile * config.tile_rows, config.tile_rows)
            visible = _visible_mask(queries, first, _rows(tile, config.tile_rows))
            s2 = _scores2(dot(q, k_ref[tile_range, key_head, :], trans_rhs=True), scale, soft_cap)
            s = jnp.where(visible, s2, MASKED)
            m = jnp.maximum(m_before, jnp.max(s, axis=1))
            safe = jnp.where(m == MASKED, 0.0, m)  # rows whose document begins in a later tile: -inf - -inf is NaN
            p, fade = jnp.exp2(s - safe[:, None]), jnp.exp2(m_before - safe)
            v = v_ref[tile_range, key_head, :]
            return m, total * fade + jnp.sum(p, axis=1), o * fade[:, None] + dot(p.astype(v.dtype), v)

        empty = jnp.full(config.block_rows, MASKED, jnp.float32)
        start = (empty, jnp.zeros_like(empty), jnp.zeros((config.block_rows, C), jnp.float32))
        m, total, o = lax.fori_loop(*_key_tiles(block, first_ref, config), step, start)
        o_ref[block_range, head, :] = (o / total[:, None]).astype(o_ref.dtype)
        lse2_ref[head, block_range] = m + jnp.log2(total)

    shapes = [jax.ShapeDtypeStruct(q_THC.shape, q_THC.dtype), jax.ShapeDtypeStruct((H, T), jnp.float32)]
    operands = [q_THC, k_TKC, v_TKC, first_T]
    return _call(kernel, operands, shapes, name="attention", grid=(T // config.block_rows, H), config=config,
                 interpret=interpret)  # fmt: skip


def dq(
    q_THC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, o_THC: jax.Array, do_THC: jax.Array, lse2_HT: jax.Array,
    first_T: jax.Array, *, scale: float, soft_cap: float | None = None,
    config: AttentionConfig, interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns the gradient of q, and delta = Σ o · do, float32 [H, T]."""
    T, H, C = q_THC.shape
    group = H // k_TKC.shape[1]

    def kernel(q_ref, k_ref, v_ref, o_ref, do_ref, lse2_ref, first_ref, dq_ref, delta_ref):
        block, head = _last_first(T // config.block_rows), pl.program_id(1)
        queries, first = _rows(block, config.block_rows), first_ref[pl.ds(block * config.block_rows, config.block_rows)]
        block_range, key_head = pl.ds(block * config.block_rows, config.block_rows), lax.div(head, group)
        # Loaded once for a block of queries: q, dO, the logarithms, and o for delta. Keys and values stream past it.
        q, do, lse2 = q_ref[block_range, head, :], do_ref[block_range, head, :], lse2_ref[head, block_range]
        delta = jnp.sum(o_ref[block_range, head, :].astype(jnp.float32) * do.astype(jnp.float32), axis=1)
        delta_ref[head, block_range] = delta

        def step(tile, acc):
            tile_range = pl.ds(tile * config.tile_rows, config.tile_rows)
            k, v = k_ref[tile_range, key_head, :], v_ref[tile_range, key_head, :]
            visible = _visible_mask(queries, first, _rows(tile, config.tile_rows))
            _, ds = _weights(q, k, v, do, lse2, delta, visible, scale, soft_cap)
            return acc + dot(ds.astype(k.dtype), k)

        acc = lax.fori_loop(*_key_tiles(block, first_ref, config), step, jnp.zeros((config.block_rows, C), jnp.float32))
        dq_ref[block_range, head, :] = acc.astype(dq_ref.dtype)

    shapes = [jax.ShapeDtypeStruct(q_THC.shape, q_THC.dtype), jax.ShapeDtypeStruct((H, T), jnp.float32)]
    operands = [q_THC, k_TKC, v_TKC, o_THC, do_THC, lse2_HT, first_T]
    return _call(kernel, operands, shapes, name="attention_dq", grid=(T // config.block_rows, H), config=config,
                 interpret=interpret)  # fmt: skip


def dkv(
    q_THC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, do_THC: jax.Array, lse2_HT: jax.Array, delta_HT: jax.Array,
    first_T: jax.Array, end_T: jax.Array, *, scale: float, soft_cap: float | None = None,
    config: AttentionConfig, interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns the gradients of k and v, summed over the query heads of each key head."""
    (T, K, C), group = k_TKC.shape, q_THC.shape[1] // k_TKC.shape[1]

    def kernel(q_ref, k_ref, v_ref, do_ref, lse2_ref, delta_ref, first_ref, end_ref, dk_ref, dv_ref):
        block, key_head = pl.program_id(0), pl.program_id(1)
        block_range, keys = pl.ds(block * config.block_rows, config.block_rows), _rows(block, config.block_rows)
        # The roles are exchanged: a block of keys and values stays, and tiles of queries stream past it, so that a
        # program has all of its dk and dv and no atomic addition is needed.
        k, v = k_ref[block_range, key_head, :], v_ref[block_range, key_head, :]
        begin = lax.div(block * config.block_rows, config.tile_rows)
        tiles = (
            lax.div(
                end_ref[block * config.block_rows + (config.block_rows - 1)] + (config.tile_rows - 1), config.tile_rows
            )
            - begin
        )

        def step(i, carry):
            """Tiles of all query heads of the group, one head after another: dk and dv sum over both."""
            dk, dv = carry
            head, tile = key_head * group + lax.div(i, tiles), begin + lax.rem(i, tiles)
            tile_range = pl.ds(tile * config.tile_rows, config.tile_rows)
            q, do = q_ref[tile_range, head, :], do_ref[tile_range, head, :]
            visible = _visible_mask(_rows(tile, config.tile_rows), first_ref[tile_range], keys)
            p, ds = _weights(
                q, k, v, do, lse2_ref[head, tile_range], delta_ref[head, tile_range], visible, scale, soft_cap
            )
            dv = dv + dot(p.astype(do.dtype), do, trans_lhs=True)
            return dk + dot(ds.astype(q.dtype), q, trans_lhs=True), dv

        zeros = jnp.zeros((config.block_rows, C), jnp.float32)
        dk, dv = lax.fori_loop(0, group * tiles, step, (zeros, zeros))
        dk_ref[block_range, key_head, :] = dk.astype(dk_ref.dtype)
        dv_ref[block_range, key_head, :] = dv.astype(dv_ref.dtype)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_TKC, v_TKC)]
    operands = [q_THC, k_TKC, v_TKC, do_THC, lse2_HT, delta_HT, first_T, end_T]
    return _call(kernel, operands, shapes, name="attention_dkv", grid=(T // config.block_rows, K), config=config,
                 interpret=interpret)  # fmt: skip


def _weights(q, k, v, do, lse2, delta, seen, scale: float, soft_cap: float | None) -> tuple[jax.Array, jax.Array]:
    """The softmax weights [queries, keys] and the gradient of q kᵀ; zeros where a query does not see a key."""
    s2 = _scores2(dot(q, k, trans_rhs=True), scale, soft_cap)
    p = jnp.where(seen, jnp.exp2(s2 - lse2[:, None]), 0.0)
    ds = p * (dot(do, v, trans_rhs=True) - delta[:, None]) * scale
    if soft_cap is not None:  # d cap(z) / dz = 1 - (cap(z) / soft_cap)²
        share = s2 * (1 / (soft_cap * LOG2E))
        ds = ds * (1 - share * share)
    return p, jnp.where(seen, ds, 0.0)


def _scores2(products: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Scores in units of log 2, so that exp2 takes them."""
    if soft_cap is None:
        return products * (scale * LOG2E)
    return (soft_cap * LOG2E) * jnp.tanh(products * (scale / soft_cap))


def _visible_mask(queries: jax.Array, first: jax.Array, keys: jax.Array) -> jax.Array:
    return (keys[None, :] <= queries[:, None]) & (keys[None, :] >= first[:, None])


def _rows(block: jax.Array, size: int) -> jax.Array:
    return block * size + lax.iota(jnp.int32, size)


def _key_tiles(block: jax.Array, first_ref, config: AttentionConfig) -> tuple[jax.Array, jax.Array]:
    """Tiles of keys from the first one of the block's first document to its diagonal."""
    begin = lax.div(first_ref[block * config.block_rows], config.tile_rows)
    return begin, lax.div((block + 1) * config.block_rows + (config.tile_rows - 1), config.tile_rows)


def _last_first(blocks: int) -> jax.Array:
    """The last block of queries has the most keys: it starts first."""
    return blocks - 1 - pl.program_id(0)


def _call(kernel, operands, shapes, *, name: str, grid: tuple[int, int], config: AttentionConfig, interpret: bool):
    return tuple(
        call(
            kernel, operands, name=name, grid=grid, out_shape=shapes, num_warps=config.num_warps,
            num_stages=config.num_stages, interpret=interpret,
        )
    )  # fmt: skip
