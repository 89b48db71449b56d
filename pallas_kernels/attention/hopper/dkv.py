"""Gradients of keys and values on Hopper.

With Sᵀ = K Qᵀ, Pᵀ = exp(Sᵀ · scale − lse), dPᵀ = V dOᵀ, dSᵀ = Pᵀ ∘ (dPᵀ − delta):
    dV = Σ_heads Pᵀ dO,   dK = scale · Σ_heads dSᵀ Q

An item of work is 128 keys of one key head. Each of two warpgroups has 64 of them, with K, V in shared memory and dK,
dV in accumulators. The third warpgroup streams (q, dO, lse, delta) tiles of 64 queries: for each query head of the
group, the tiles from the diagonal to the end of the last key's document. Scores are transposed, so that Pᵀ and dSᵀ are
already in the registers that the next product reads as its left operand. The kernel sums over the group in a fixed
order, so results are deterministic, without atomics.

T packed rows · H query heads · K key heads · G = H / K · C head width
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper.common import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    WGMMA,
    broadcast,
    drain_ring,
    multiply,
    tile,
    tile_mask,
    wait_for_room,
)
from pallas_kernels.attention.hopper.config import TILE, WARPGROUPS, AttentionConfig, div, rem, rows
from pallas_kernels.attention.hopper.launch import Static, launch, static_of
from pallas_kernels.attention.hopper.walk import Item
from pallas_kernels.policy import ATTENTION_ROWS

KEYS = TILE * WARPGROUPS
assert KEYS == ATTENTION_ROWS, "the policy tells callers this block size"


def dkv(
    q_THC, k_TKC, v_TKC, do_THC, lse2_HT, delta_HT, end_T, table, dirty, *, scale: float, sms: int,
    config: AttentionConfig,
):  # fmt: skip
    """Returns dk and dv [T, K, C].

    Args:
        lse2_HT: base-2 logarithms of the softmax sums; NaN in rows with non-finite q or do.
        table: `key_blocks(end_T, KEYS, TILE)`.
        dirty: int32 [1], whether any lse2 is not finite. If so, tiles of queries are cleaned where they meet keys of
            another document, because 0 · NaN is NaN.
    """
    group, stages = q_THC.shape[1] // k_TKC.shape[1], config.dkv_stages
    static = static_of(q_THC, k_TKC, rows=KEYS, repeats=group, stages=stages, scale=scale, sms=sms, config=config)
    out = jax.ShapeDtypeStruct(k_TKC.shape, q_THC.dtype)
    gradients: list[jax.Array] = []
    for names in (("dk_g",), ("dv_g",)) if config.apart else (("dk_g", "dv_g"),):
        gradients += launch(
            static,
            make_refs=_Refs,
            stream=_stream,
            compute=_compute,
            operands={
                "q_g": q_THC, "k_g": k_TKC, "v_g": v_TKC, "do_g": do_THC, "lse_g": lse2_HT, "delta_g": delta_HT,
                "end_g": end_T, "table_g": table, "dirty_g": dirty,
            },
            results=dict.fromkeys(names, out),
            scratch=_scratch(static),
        )  # fmt: skip
    return tuple(gradients)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """References: device memory (_g), shared memory (_s), and barriers."""

    q_g: Any  # [T, H, C], as is do
    k_g: Any  # [T, K, C], as are v, dk and dv
    v_g: Any
    do_g: Any
    lse_g: Any  # float32 [H, T], as is delta
    delta_g: Any
    end_g: Any  # int32 [T], end of a row's document
    table_g: Any  # items of work
    dirty_g: Any  # int32 [1]
    dk_g: Any = None  # None: another launch computes it
    dv_g: Any = None
    k_s: Any  # [places, WARPGROUPS, 64, C], as is v: keys of a warpgroup, then their gradients
    v_s: Any
    q_s: Any  # [stages, 64, C], as is do
    do_s: Any
    lse_s: Any  # float32 [stages, 64], as is delta
    delta_s: Any
    keys_bar: Any  # K and V of a warpgroup have arrived
    keys_free: Any  # they can be overwritten
    q_bar: Any  # q and lse have arrived
    do_bar: Any  # dO and delta have arrived
    free_bar: Any  # both warpgroups have read a tile of queries
    spare_p_s: Any  # [WARPGROUPS, 64, 64] or None, see `common.multiply`
    spare_ds_s: Any


class _Keys(NamedTuple):
    """The 64 keys of a warpgroup."""

    wg: Any
    slot: Any  # their slot
    row0: Any
    first_tile: Any  # first tile of queries that use them
    end_tile: Any
    first_end: Any  # smallest value of `end`
    end: jax.Array  # end of each key's document, [64] in registers
    is_dirty: Any

    @property
    def barrier(self):
        """Index of the slot's barriers."""
        return self.slot * WARPGROUPS + self.wg


def _scratch(static: Static) -> dict[str, Any]:
    stages, places, width, dtype = static.stages, static.config.places, static.width, static.dtype
    spare = tile(WARPGROUPS, TILE, TILE, dtype=dtype) if static.config.through_smem else None
    return {
        "k_s": tile(places, WARPGROUPS, TILE, width, dtype=dtype),
        "v_s": tile(places, WARPGROUPS, TILE, width, dtype=dtype),
        "q_s": tile(stages, TILE, width, dtype=dtype),
        "do_s": tile(stages, TILE, width, dtype=dtype),
        "lse_s": plgpu.SMEM((stages, TILE), jnp.float32),
        "delta_s": plgpu.SMEM((stages, TILE), jnp.float32),
        "keys_bar": plgpu.Barrier(num_arrivals=2, num_barriers=places * WARPGROUPS),
        "keys_free": plgpu.Barrier(num_barriers=places * WARPGROUPS),
        "q_bar": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "do_bar": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free_bar": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        "spare_p_s": spare,
        "spare_ds_s": spare,
    }


def _stream(static: Static, refs: _Refs) -> None:
    items, steps = static.walk(refs.table_g, functools.partial(_fetch_item, static, refs))
    drain_ring(refs.keys_free, items, static.config.places, WARPGROUPS)
    drain_ring(refs.free_bar, steps, static.stages)


def _fetch_item(static: Static, refs: _Refs, item: Item) -> None:
    """Streams an item: both warpgroups' keys, then the tiles of queries of every query head."""
    slot = rem(item.number, static.config.places)
    for wg in range(WARPGROUPS):  # K and V go into the slot when the gradients of an earlier item have left it
        wait_for_room(refs.keys_free, item.number, static.config.places, wg, WARPGROUPS)
        source, barrier = (rows(item.block * KEYS + wg * TILE), item.head), refs.keys_bar.at[slot * WARPGROUPS + wg]
        plgpu.copy_gmem_to_smem(refs.k_g.at[source], refs.k_s.at[slot, wg], barrier)
        plgpu.copy_gmem_to_smem(refs.v_g.at[source], refs.v_s.at[slot, wg], barrier)

    @pl.loop(0, item.num * static.group)
    def _(step):
        _fetch_tile(static, refs, item, step)


def _fetch_tile(static: Static, refs: _Refs, item: Item, step) -> None:
    """Starts the copies of a tile of queries, once both warpgroups have read the tile before it in its slot."""
    member = lax.div(step, item.num)
    query_head = item.head * static.group + member
    queries = rows((item.begin + step - member * item.num) * TILE)
    slot = rem(item.step + step, static.stages)
    wait_for_room(refs.free_bar, item.step + step, static.stages)
    plgpu.copy_gmem_to_smem(refs.q_g.at[queries, query_head], refs.q_s.at[slot], refs.q_bar.at[slot])
    plgpu.copy_gmem_to_smem(refs.lse_g.at[query_head, queries], refs.lse_s.at[slot], refs.q_bar.at[slot])
    plgpu.copy_gmem_to_smem(refs.do_g.at[queries, query_head], refs.do_s.at[slot], refs.do_bar.at[slot])
    plgpu.copy_gmem_to_smem(refs.delta_g.at[query_head, queries], refs.delta_s.at[slot], refs.do_bar.at[slot])


def _compute(static: Static, refs: _Refs, wg) -> None:
    is_dirty = refs.dirty_g[0] != 0
    static.walk(refs.table_g, functools.partial(_compute_item, static, refs, wg, is_dirty))


def _compute_item(static: Static, refs: _Refs, wg, is_dirty, item: Item) -> None:
    """Computes dk and dv of 64 keys of a key head."""
    keys = _keys(static, refs, wg, is_dirty, item)
    k, v = refs.k_s.at[keys.slot, wg], refs.v_s.at[keys.slot, wg]
    plgpu.barrier_wait(refs.keys_bar.at[keys.barrier])  # K and V stay for all tiles of queries
    wide = plgpu.ACC((TILE, static.width), jnp.float32)
    sums = {name: wide for name, out in (("dk", refs.dk_g), ("dv", refs.dv_g)) if out is not None}

    @functools.partial(pl.run_scoped, **sums)
    def _(dk=None, dv=None):
        add_head = functools.partial(_add_head, static, refs, item, keys, (dk, dv))
        lax.fori_loop(0, static.group, add_head, None)
        # The gradients leave through the tiles of K and V, which nobody reads any more.
        if dk is not None:
            k[...] = (dk[...] * static.scale).astype(static.dtype)
        if dv is not None:
            v[...] = dv[...].astype(static.dtype)

    plgpu.commit_smem()  # all warps have written before the copy engine reads
    for gradient_s, gradient_g in ((k, refs.dk_g), (v, refs.dv_g)):
        if gradient_g is not None:
            plgpu.copy_smem_to_gmem(gradient_s, gradient_g.at[rows(keys.row0), item.head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(refs.keys_free.at[keys.barrier])  # both are read: the slot can be filled again


def _keys(static: Static, refs: _Refs, wg, is_dirty, item: Item) -> _Keys:
    row0 = item.block * KEYS + wg * TILE
    return _Keys(
        wg=wg,
        slot=rem(item.number, static.config.places),
        row0=row0,
        first_tile=item.begin + wg,
        end_tile=div(refs.end_g[row0 + (TILE - 1)] + (TILE - 1), TILE),
        first_end=refs.end_g[row0],
        end=plgpu.load(refs.end_g.at[rows(row0)], layout=BY_ROW, optimized=False),
        is_dirty=is_dirty,
    )


def _add_head(static: Static, refs: _Refs, item: Item, keys: _Keys, sums, member, _) -> None:
    """Processes the tiles of a query head that use these keys; skips tiles that only the other warpgroup needs."""
    base = item.step + member * item.num - item.begin

    def skip(step, _):
        """Passes a tile's barriers, as every reader of the ring must."""
        slot = rem(step, static.stages)
        plgpu.barrier_wait(refs.q_bar.at[slot])
        plgpu.barrier_wait(refs.do_bar.at[slot])
        plgpu.barrier_arrive(refs.free_bar.at[slot])

    def visit(tile_number, _):
        _add_tile(static, refs, keys, sums, rem(base + tile_number, static.stages), tile_number)

    lax.fori_loop(base + item.begin, base + keys.first_tile, skip, None)
    lax.fori_loop(keys.first_tile, keys.end_tile, visit, None)
    lax.fori_loop(base + keys.end_tile, base + item.begin + item.num, skip, None)


def _add_tile(static: Static, refs: _Refs, keys: _Keys, sums, slot, tile_number) -> None:
    """Adds Pᵀ dO to dv and dSᵀ Q to dk for a tile of queries."""
    dk, dv = sums
    k, v = refs.k_s.at[keys.slot, keys.wg], refs.v_s.at[keys.slot, keys.wg]
    q, do = refs.q_s.at[slot], refs.do_s.at[slot]
    shape, query0 = (TILE, TILE), tile_number * TILE
    other_documents = query0 + (TILE - 1) >= keys.first_end
    unclean = keys.is_dirty & other_documents

    products = dict.fromkeys(("s",) if dk is None else ("s", "dp"), plgpu.ACC(shape, jnp.float32))

    @functools.partial(pl.run_scoped, **products)
    def _(s, dp=None):
        plgpu.barrier_wait(refs.q_bar.at[slot])  # q and lse have arrived; S does not wait for dO
        pl.when(unclean)(functools.partial(_zero_non_finite, q))
        plgpu.wgmma(s, k, q.transpose((1, 0)))
        plgpu.barrier_wait(refs.do_bar.at[slot])
        pl.when(unclean)(functools.partial(_zero_non_finite, do))
        if dk is not None:
            plgpu.wgmma(dp, v, do.transpose((1, 0)))
        lse = plgpu.load(refs.lse_s.at[slot], layout=BY_COLUMN)
        # waits for S only: the softmax overlaps with dP
        scores = plgpu.wgmma_accumulator_load(s, wait_n=0 if dk is None else 1)
        p = jnp.exp2(scores * (static.scale * LOG2E) - broadcast(lse, shape, 1))
        masked = functools.partial(_apply_mask, keys, query0)
        p = lax.cond((tile_number == keys.first_tile) | other_documents, masked, lambda x: x, p)
        if dv is not None:
            multiply(dv, p.astype(static.dtype), do, refs.spare_p_s, keys.wg)
        if dk is not None:
            delta = plgpu.load(refs.delta_s.at[slot], layout=BY_COLUMN)
            # wait_n=1: dP is complete, the product into dv may still run
            dp_values = plgpu.wgmma_accumulator_load(dp, wait_n=0 if dv is None else 1)
            ds = p * (dp_values - broadcast(delta, shape, 1))
            ds = lax.cond(unclean, functools.partial(_remask, p), lambda x: x, ds)
            multiply(dk, ds.astype(static.dtype), q, refs.spare_ds_s, keys.wg)
        plgpu.wgmma_wait(0)

    plgpu.barrier_arrive(refs.free_bar.at[slot])  # this warpgroup has read q, dO, lse and delta


def _apply_mask(keys: _Keys, query0, p):
    """Sets p to zero where a query is before the key or of another document."""

    def rule(key, query):
        return (key <= query) & (query < broadcast(keys.end, p.shape, 0))

    visible = tile_mask(keys.row0, query0, p.shape, rule)
    return jnp.where(visible, p, jnp.zeros_like(p))


def _remask(p, ds):
    """Masks again, because 0 · NaN is not zero."""
    return jnp.where(p == 0, jnp.zeros_like(ds), ds)


def _zero_non_finite(ref) -> None:
    """Sets non-finite values to zero. Both warpgroups do it, without synchronisation: they write the same."""
    x = plgpu.load(ref, layout=WGMMA).astype(jnp.float32)
    ref[...] = jnp.where(x - x == 0, x, jnp.zeros_like(x)).astype(ref.dtype)
    plgpu.commit_smem()
