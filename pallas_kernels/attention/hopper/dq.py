"""Gradient of queries on Hopper, and delta = rowsum(dO ∘ O) for the gradients of keys.

With S = Q Kᵀ, P = exp(S · scale − lse), dP = dO Vᵀ, dS = P ∘ (dP − delta):   dQ = scale · dS K

See `queries` for items, units, rounds and the stream of (K, V) tiles.

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
    BY_ROW,
    LOG2E,
    WGMMA,
    broadcast,
    drain_ring,
    multiply,
    tile,
    wait_for_room,
)
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


def dq(
    q_THC, k_TKC, v_TKC, o_THC, do_THC, lse2_HT, first_T, table, *, scale: float, sms: int, config: AttentionConfig
):  # fmt: skip
    """Returns dq [T, H, C] and delta [H, T].

    Args:
        k_TKC, v_TKC: finite.
        lse2_HT: base-2 logarithms of the softmax sums.
        table: `query_blocks(first_T, Units(group=H // K).queries, TILE)`.
    """
    T, H, _ = q_THC.shape
    static = query_static(q_THC, k_TKC, stages=config.dq_stages, scale=scale, sms=sms, config=config)
    return launch(
        static,
        make_refs=_Refs,
        stream=_stream,
        compute=functools.partial(compute_units, compute_unit=_compute_unit),
        operands={
            "q_g": q_THC, "k_g": k_TKC, "v_g": v_TKC, "o_g": o_THC, "do_g": do_THC, "lse_g": lse2_HT,
            "first_g": first_T, "table_g": table,
        },
        results={
            "dq_g": jax.ShapeDtypeStruct(q_THC.shape, q_THC.dtype),
            "delta_g": jax.ShapeDtypeStruct((H, T), jnp.float32),
        },
        scratch=_scratch(static),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Refs(QueryRefs):
    o_g: Any  # [T, H, C], as is do
    do_g: Any
    lse_g: Any  # float32 [H, T], as is delta
    dq_g: Any  # [T, H, C]
    delta_g: Any
    do_s: Any  # [places, WARPGROUPS, 64, C]
    o_s: Any  # [WARPGROUPS, 64, C]: only delta needs it, so one slot is enough
    o_bar: Any
    o_free: Any


class _Rows(NamedTuple):
    """Values of a unit's 64 rows in registers."""

    lse: jax.Array
    delta: jax.Array
    mask: Mask


def _scratch(static: Static) -> dict[str, Any]:
    places, width, dtype = static.config.places, static.width, static.dtype
    return (
        {
            "q_s": tile(places, WARPGROUPS, TILE, width, dtype=dtype),
            "do_s": tile(places, WARPGROUPS, TILE, width, dtype=dtype),
            "o_s": tile(WARPGROUPS, TILE, width, dtype=dtype),
        }
        | key_tiles(static)
        | unit_barriers(static)
        | {name: plgpu.Barrier(num_barriers=WARPGROUPS) for name in ("o_bar", "o_free")}
        | key_barriers(static)
    )


def _stream(static: Static, refs: _Refs) -> None:
    rounds, steps = stream_units(static, refs, _fetch_rows)
    drain_ring(refs.unit_free, rounds, static.config.places, WARPGROUPS)
    drain_ring(refs.o_free, rounds, 1, WARPGROUPS)
    drain_ring(refs.free_bar, steps, static.stages)


def _fetch_rows(static: Static, refs: _Refs, unit: Unit) -> None:
    """Starts the copies of a unit's q and dO, once the unit before it in its slot is stored, and that of o."""
    source, slot, barrier = (unit.rows, unit.head), (unit.slot, unit.wg), refs.unit_bar.at[unit.barrier]
    wait_for_room(refs.unit_free, unit.number, static.config.places, unit.wg, WARPGROUPS)
    plgpu.copy_gmem_to_smem(refs.q_g.at[source], refs.q_s.at[slot], barrier)
    plgpu.copy_gmem_to_smem(refs.do_g.at[source], refs.do_s.at[slot], barrier)
    wait_for_room(refs.o_free, unit.number, 1, unit.wg, WARPGROUPS)
    plgpu.copy_gmem_to_smem(refs.o_g.at[source], refs.o_s.at[unit.wg], refs.o_bar.at[unit.wg])


def _compute_unit(static: Static, refs: _Refs, unit: Unit) -> None:
    """Computes dq and delta of 64 rows of a query head."""
    # These loads into registers are issued first: they overlap with the computation of delta.
    lse = plgpu.load(refs.lse_g.at[unit.head, unit.rows], layout=BY_ROW, optimized=False)
    firsts = plgpu.load(refs.first_g.at[unit.rows], layout=BY_ROW, optimized=False)
    mask = Mask(unit.query0, firsts, refs.first_g[unit.query0 + (TILE - 1)])
    row_values = _Rows(lse, _delta(refs, unit), mask)
    q = refs.q_s.at[unit.slot, unit.wg]

    @functools.partial(pl.run_scoped, acc=plgpu.ACC((TILE, static.width), jnp.float32))
    def _(acc):
        lax.fori_loop(0, unit.item.num, functools.partial(_add_tile, static, refs, unit, row_values, acc), None)
        # dq leaves through the tile of queries, which nobody reads any more.
        q[...] = (acc[...] * static.scale).astype(static.dtype)

    plgpu.commit_smem()  # all warps have written before the copy engine reads
    plgpu.copy_smem_to_gmem(q, refs.dq_g.at[unit.rows, unit.head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(refs.unit_free.at[unit.barrier])  # dq is read: the slot can be filled again


def _delta(refs: _Refs, unit: Unit) -> jax.Array:
    """Waits for a unit's rows, computes rowsum(dO ∘ O), and also writes it to device memory for `dkv`."""
    plgpu.barrier_wait(refs.unit_bar.at[unit.barrier])
    plgpu.barrier_wait(refs.o_bar.at[unit.wg])
    delta = plgpu.load(refs.o_s.at[unit.wg], layout=WGMMA).astype(jnp.float32)
    do = plgpu.load(refs.do_s.at[unit.slot, unit.wg], layout=WGMMA).astype(jnp.float32)
    delta = (delta * do).sum(axis=1)
    plgpu.commit_smem()  # a barrier: every warp has read o
    plgpu.barrier_arrive(refs.o_free.at[unit.wg])
    refs.delta_g[unit.head, unit.rows] = delta
    return delta


def _add_tile(static: Static, refs: _Refs, unit: Unit, row_values: _Rows, acc, tile_number, _) -> None:
    """Adds dS K of a tile of keys to acc."""
    slot = rem(unit.step(tile_number), static.stages)
    key0 = (unit.item.begin + tile_number) * TILE
    shape = (TILE, TILE)

    @functools.partial(pl.run_scoped, s=plgpu.ACC(shape, jnp.float32), dp=plgpu.ACC(shape, jnp.float32))
    def _(s, dp):
        k = refs.k_s.at[slot]
        plgpu.barrier_wait(refs.k_bar.at[slot])
        plgpu.wgmma(s, refs.q_s.at[unit.slot, unit.wg], k.transpose((1, 0)))
        plgpu.barrier_wait(refs.v_bar.at[slot])
        plgpu.wgmma(dp, refs.do_s.at[unit.slot, unit.wg], refs.v_s.at[slot].transpose((1, 0)))
        scores = plgpu.wgmma_accumulator_load(s, wait_n=1)  # waits for S only: the softmax overlaps with dP
        p = jnp.exp2(scores * (static.scale * LOG2E) - broadcast(row_values.lse, shape, 0))
        p = row_values.mask(p, key0, 0.0)
        ds = p * (plgpu.wgmma_accumulator_load(dp, wait_n=0) - broadcast(row_values.delta, shape, 0))
        multiply(acc, ds.astype(static.dtype), k, refs.spare_s, unit.wg)
        plgpu.wgmma_wait(0)

    plgpu.barrier_arrive(refs.free_bar.at[slot])  # this warpgroup has read K and V
