"""Forward attention on Hopper.

S = Q Kᵀ,   P = exp(S · scale − lse),   O = P V   by the online softmax of flash attention

See `queries` for items, units, rounds and the stream of (K, V) tiles.

T packed rows · H query heads · K key heads · G = H / K · C head width
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper.common import BY_ROW, LOG2E, WGMMA, broadcast, drain_ring, tile, wait_for_room
from pallas_kernels.attention.hopper.config import TILE, WARPGROUPS, AttentionConfig, rem
from pallas_kernels.attention.hopper.launch import Static, launch
from pallas_kernels.attention.hopper.queries import (
    Mask,
    QueryRefs,
    Unit,
    compute_units,
    key_barriers,
    key_tiles,
    query_static,
    stream_units,
    unit_barriers,
)

_FLOOR = -1e30  # initial running maximum of a row: finite, so that exp2(-inf - it) is 0 and not NaN


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs(QueryRefs):
    o_g: Any  # [T, H, C]
    lse_g: Any  # float32 [H, T]
    first_s: Any  # int32 [places, WARPGROUPS, 64]
    lse_s: Any  # float32 [WARPGROUPS, 64]: on its way out


def forward(q_THC, k_TKC, v_TKC, first_T, table, *, scale: float, sms: int, config: AttentionConfig):
    """Returns o [T, H, C] and lse2 [H, T], the base-2 logarithm of the sum of exponentials.

    Args:
        v_TKC: finite. NaN in q or k only reaches rows that attend to it.
        table: `query_blocks(first_T, Units(group=H // K).queries, TILE)`.
    """
    T, H, _ = q_THC.shape
    static = query_static(q_THC, k_TKC, stages=config.forward_stages, scale=scale, sms=sms, config=config)
    return launch(
        static,
        make_refs=_Refs,
        stream=_stream,
        compute=functools.partial(compute_units, compute_unit=_attend),
        operands={"q_g": q_THC, "k_g": k_TKC, "v_g": v_TKC, "first_g": first_T, "table_g": table},
        results={
            "o_g": jax.ShapeDtypeStruct(q_THC.shape, q_THC.dtype),
            "lse_g": jax.ShapeDtypeStruct((H, T), jnp.float32),
        },
        scratch=_scratch(static),
    )


def _scratch(static: Static) -> dict[str, Any]:
    places = static.config.places
    return (
        {"q_s": tile(places, WARPGROUPS, TILE, static.width, dtype=static.dtype)}
        | key_tiles(static)
        | {
            "first_s": plgpu.SMEM((places, WARPGROUPS, TILE), jnp.int32),
            "lse_s": plgpu.SMEM((WARPGROUPS, TILE), jnp.float32),
        }
        | unit_barriers(static)
        | key_barriers(static)
    )


def _stream(static: Static, refs: _Refs) -> None:
    rounds, steps = stream_units(static, refs, _fetch_rows)
    drain_ring(refs.unit_free, rounds, static.config.places, WARPGROUPS)
    drain_ring(refs.free_bar, steps, static.stages)


def _fetch_rows(static: Static, refs: _Refs, unit: Unit) -> None:
    """Starts the copies of a unit's queries, once the unit before it in its slot is stored."""
    slot, barrier = (unit.slot, unit.wg), refs.unit_bar.at[unit.barrier]
    wait_for_room(refs.unit_free, unit.number, static.config.places, unit.wg, WARPGROUPS)
    plgpu.copy_gmem_to_smem(refs.q_g.at[unit.rows, unit.head], refs.q_s.at[slot], barrier)
    plgpu.copy_gmem_to_smem(refs.first_g.at[unit.rows], refs.first_s.at[slot], barrier)


def _attend(static: Static, refs: _Refs, unit: Unit) -> None:
    """Computes o and lse2 of 64 rows of a query head."""
    wide = (TILE, static.width)
    last_first = refs.first_g[unit.query0 + (TILE - 1)]
    q = refs.q_s.at[unit.slot, unit.wg]
    plgpu.barrier_wait(refs.unit_bar.at[unit.barrier])  # queries and `first` have arrived
    mask = Mask(unit.query0, plgpu.load(refs.first_s.at[unit.slot, unit.wg], layout=BY_ROW), last_first)
    empty = (
        plgpu.layout_cast(jnp.full((TILE,), _FLOOR, jnp.float32), BY_ROW),
        plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_ROW),
        plgpu.layout_cast(jnp.zeros(wide, jnp.float32), WGMMA),
    )
    add_tile = functools.partial(_add_tile, static, refs, unit, mask)
    top, total, o = lax.fori_loop(0, unit.item.num, add_tile, empty)
    # o leaves through the tile of queries, which nobody reads any more.
    q[...] = (o / broadcast(total, wide, 0)).astype(static.dtype)
    refs.lse_s[unit.wg] = top + jnp.log(total) * LOG2E
    plgpu.commit_smem()  # all warps have written before the copy engine reads
    plgpu.copy_smem_to_gmem(q, refs.o_g.at[unit.rows, unit.head])
    plgpu.copy_smem_to_gmem(refs.lse_s.at[unit.wg], refs.lse_g.at[unit.head, unit.rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(refs.unit_free.at[unit.barrier])  # both are read: the slot can be filled again


def _add_tile(static: Static, refs: _Refs, unit: Unit, mask: Mask, tile_number, carry):
    """One step of the online softmax: running maximum, sum of exponentials, weighted sum of values."""
    top, total, o = carry
    slot = rem(unit.step(tile_number), static.stages)
    key0 = (unit.item.begin + tile_number) * TILE

    @functools.partial(pl.run_scoped, s=plgpu.ACC((TILE, TILE), jnp.float32))
    def scores(s):
        plgpu.barrier_wait(refs.k_bar.at[slot])  # K has arrived
        plgpu.wgmma(s, refs.q_s.at[unit.slot, unit.wg], refs.k_s.at[slot].transpose((1, 0)))
        return s[...]

    scores = mask(scores, key0, -jnp.inf)
    top_after = jnp.maximum(top, scores.max(axis=1) * (static.scale * LOG2E))
    fade = jnp.exp2(top - top_after)
    p = jnp.exp2(scores * (static.scale * LOG2E) - broadcast(top_after, scores.shape, 0))
    total = total * fade + p.sum(axis=1)
    o = o * broadcast(fade, o.shape, 0)
    plgpu.barrier_wait(refs.v_bar.at[slot])  # V had the time of the scores to arrive
    o = _accumulate(o, p.astype(static.dtype), refs.v_s.at[slot], refs.spare_s, unit.wg)
    plgpu.barrier_arrive(refs.free_bar.at[slot])  # this warpgroup has read K and V
    return top_after, total, o


def _accumulate(o, p, v, spare_s, wg):
    """Returns o + p v. Interpret mode has no accumulators with an initial value and takes the second branch."""
    if spare_s is None:
        return pl.run_state(lambda acc: plgpu.wgmma(acc, p, v))(plgpu.ACC.init(o))
    spare_s[wg] = p
    plgpu.commit_smem()

    @functools.partial(pl.run_scoped, acc=plgpu.ACC(o.shape, jnp.float32))
    def product(acc):
        plgpu.wgmma(acc, spare_s.at[wg], v)
        return acc[...]

    return o + product
