"""Gradient of queries on Hopper, and delta = rowsum(dO ∘ O) for the gradients of keys.

With S = Q Kᵀ, P = exp(S · scale − lse), dP = dO Vᵀ, dS = P ∘ (dP − delta):   dQ = scale · dS K

See `queries` for items, units, rounds and the stream of (K, V) tiles.

T packed rows · H query heads · K key heads · G = H / K · C head width
"""

from __future__ import annotations

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
from pallas_kernels.attention.hopper.launch import Refs, Static, launch
from pallas_kernels.attention.hopper.queries import (
    Mask,
    Unit,
    compute_units,
    key_barriers,
    key_tiles,
    own_barriers,
    query_static,
    stream_units,
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
        stream=_stream,
        compute=functools.partial(compute_units, one_unit=_one_unit),
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


class _Rows(NamedTuple):
    """Values of a warpgroup's 64 rows in registers."""

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
        | own_barriers(static)
        | {name: plgpu.Barrier(num_barriers=WARPGROUPS) for name in ("o_bar", "o_free")}
        | key_barriers(static)
    )


def _stream(static: Static, refs: Refs) -> None:
    rounds, steps = stream_units(static, refs, _fetch_own)
    drain_ring(refs.own_free, rounds, static.config.places, WARPGROUPS)
    drain_ring(refs.o_free, rounds, 1, WARPGROUPS)
    drain_ring(refs.free_bar, steps, static.stages)


def _fetch_own(static: Static, refs: Refs, unit: Unit) -> None:
    own, here, barrier = (unit.own, unit.head), (unit.place, unit.wg), refs.own_bar.at[unit.at]
    wait_for_room(refs.own_free, unit.number, static.config.places, unit.wg, WARPGROUPS)
    plgpu.copy_gmem_to_smem(refs.q_g.at[own], refs.q_s.at[here], barrier)
    plgpu.copy_gmem_to_smem(refs.do_g.at[own], refs.do_s.at[here], barrier)
    wait_for_room(refs.o_free, unit.number, 1, unit.wg, WARPGROUPS)
    plgpu.copy_gmem_to_smem(refs.o_g.at[own], refs.o_s.at[unit.wg], refs.o_bar.at[unit.wg])


def _one_unit(static: Static, refs: Refs, unit: Unit) -> None:
    """Computes dq and delta of 64 rows of a query head."""
    # loads overlap with the computation of delta
    lse = plgpu.load(refs.lse_g.at[unit.head, unit.own], layout=BY_ROW, optimized=False)
    firsts = plgpu.load(refs.first_g.at[unit.own], layout=BY_ROW, optimized=False)
    mask = Mask(unit.query0, firsts, refs.first_g[unit.query0 + (TILE - 1)])
    own = _Rows(lse, _delta(refs, unit), mask)
    q = refs.q_s.at[unit.place, unit.wg]

    @functools.partial(pl.run_scoped, acc=plgpu.ACC((TILE, static.width), jnp.float32))
    def _(acc):
        lax.fori_loop(0, unit.item.num, functools.partial(_one_tile, static, refs, unit, own, acc), None)
        q[...] = (acc[...] * static.scale).astype(static.dtype)

    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, refs.dq_g.at[unit.own, unit.head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(refs.own_free.at[unit.at])


def _delta(refs: Refs, unit: Unit) -> jax.Array:
    """Waits for a unit's own rows, computes rowsum(dO ∘ O), and also writes it to device memory."""
    plgpu.barrier_wait(refs.own_bar.at[unit.at])
    plgpu.barrier_wait(refs.o_bar.at[unit.wg])
    delta = plgpu.load(refs.o_s.at[unit.wg], layout=WGMMA).astype(jnp.float32)
    do = plgpu.load(refs.do_s.at[unit.place, unit.wg], layout=WGMMA).astype(jnp.float32)
    delta = (delta * do).sum(axis=1)
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.o_free.at[unit.wg])
    refs.delta_g[unit.head, unit.own] = delta
    return delta


def _one_tile(static: Static, refs: Refs, unit: Unit, own: _Rows, acc, tile_number, _) -> None:
    """Adds dS K of a tile of keys to acc."""
    slot = rem(unit.step(tile_number), static.stages)
    key0 = (unit.item.begin + tile_number) * TILE
    shape = (TILE, TILE)

    @functools.partial(pl.run_scoped, s=plgpu.ACC(shape, jnp.float32), dp=plgpu.ACC(shape, jnp.float32))
    def _(s, dp):
        k = refs.k_s.at[slot]
        plgpu.barrier_wait(refs.k_bar.at[slot])
        plgpu.wgmma(s, refs.q_s.at[unit.place, unit.wg], k.transpose((1, 0)))
        plgpu.barrier_wait(refs.v_bar.at[slot])
        plgpu.wgmma(dp, refs.do_s.at[unit.place, unit.wg], refs.v_s.at[slot].transpose((1, 0)))
        scores = plgpu.wgmma_accumulator_load(s, wait_n=1)
        p = jnp.exp2(scores * (static.scale * LOG2E) - broadcast(own.lse, shape, 0))
        p = own.mask(p, key0, 0.0)
        ds = p * (plgpu.wgmma_accumulator_load(dp, wait_n=0) - broadcast(own.delta, shape, 0))
        multiply(acc, ds.astype(static.dtype), k, refs.spare_s, unit.wg)
        plgpu.wgmma_wait(0)

    plgpu.barrier_arrive(refs.free_bar.at[slot])
