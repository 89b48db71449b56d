"""Gradient of queries for Hopper, and delta = rowsum(dO ∘ O) for the gradients of keys.

With S = Q Kᵀ, P = exp(S · scale − lse), dP = dO Vᵀ, dS = P ∘ (dP − delta):   dQ = scale · dS K

An item of work is a key head and 64 (or 128) rows of queries, with every query head of the group. It is cut into units
of 64 rows of one head; the two warpgroups take one unit each per round and share the stream of (K, V) tiles, which runs
from the first query's document to the diagonal: all units see the same tiles under the same mask. The third warpgroup
streams, and fetches the next units' own rows during this one.

T packed rows · H query heads · K key heads · G = H / K · C head width
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.manual_axes import vary_like

from .common import (
    BY_ROW,
    LOG2E,
    TILE,
    WARPGROUPS,
    WGMMA,
    AttentionConfig,
    Units,
    Walk,
    across,
    kernel,
    multiply,
    rem,
    rows,
    seen_by,
    tile,
    wait_for_rest,
    wait_for_room,
)


def dq(
    q_THC, k_TKC, v_TKC, o_THC, do_THC, lse2_HT, first_T, table, *, scale: float, sms: int, config: AttentionConfig
):  # fmt: skip
    """Returns dq [T, H, C] and delta [H, T].

    Args:
        k_TKC, v_TKC: finite.
        lse2_HT: base-2 logarithms of the softmax's sums.
        table: `query_blocks(first_T, Units(group=H // K).queries, TILE)`.
    """
    T, H, C = q_THC.shape
    num_keys, dtype = k_TKC.shape[1], q_THC.dtype
    units = Units(group=H // num_keys)
    stages, places, shape = config.dq_stages, config.places, (TILE, TILE)
    sms = min(sms, T // units.queries * num_keys)
    walk = Walk(blocks=T // units.queries, heads=num_keys, sms=sms, repeats=units.rounds)

    def body(q_g, k_g, v_g, o_g, do_g, lse_g, first_g, table_g, dq_g, delta_g, *scratch):
        q_s, do_s, o_s, k_s, v_s, own_bar, own_free, o_bar, o_free, k_bar, v_bar, free_bar, *spare = scratch
        wg = lax.axis_index("wg")

        @pl.when(wg == WARPGROUPS)
        def stream():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            def item(number, block, head, begin, num, step0):
                @pl.loop(0, units.rounds)
                def _(turn):
                    unit = number * units.rounds + turn
                    place = rem(unit, places)
                    for i in range(WARPGROUPS):
                        own, query_head = units.place(head, block, turn * WARPGROUPS + i)
                        at = place * WARPGROUPS + i
                        wait_for_room(own_free, unit, places, i, WARPGROUPS)
                        plgpu.copy_gmem_to_smem(q_g.at[own, query_head], q_s.at[place, i], own_bar.at[at])
                        plgpu.copy_gmem_to_smem(do_g.at[own, query_head], do_s.at[place, i], own_bar.at[at])
                        wait_for_room(o_free, unit, 1, i, WARPGROUPS)
                        plgpu.copy_gmem_to_smem(o_g.at[own, query_head], o_s.at[i], o_bar.at[i])

                    @pl.loop(0, num)
                    def _(tile_number):
                        step = step0 + turn * num + tile_number
                        slot = rem(step, stages)
                        here = rows((begin + tile_number) * TILE), head
                        wait_for_room(free_bar, step, stages)
                        plgpu.copy_gmem_to_smem(k_g.at[here], k_s.at[slot], k_bar.at[slot])
                        plgpu.copy_gmem_to_smem(v_g.at[here], v_s.at[slot], v_bar.at[slot])

            items, steps = walk(table_g, item)
            wait_for_rest(own_free, items * units.rounds, places, WARPGROUPS)
            wait_for_rest(o_free, items * units.rounds, 1, WARPGROUPS)
            wait_for_rest(free_bar, steps, stages)

        @pl.when(wg < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            spare_s = spare[0].at[wg] if spare else None

            def item(number, block, head, begin, num, step0):
                def one_unit(turn, _):
                    place = rem(number * units.rounds + turn, places)
                    at = place * WARPGROUPS + wg
                    own, query_head = units.place(head, block, turn * WARPGROUPS + wg)
                    query0 = own.start
                    # on their way while delta is computed
                    lse = plgpu.load(lse_g.at[query_head, own], layout=BY_ROW, optimized=False)
                    firsts = plgpu.load(first_g.at[own], layout=BY_ROW, optimized=False)
                    last_first = first_g[query0 + (TILE - 1)]
                    q, do = q_s.at[place, wg], do_s.at[place, wg]
                    plgpu.barrier_wait(own_bar.at[at])
                    plgpu.barrier_wait(o_bar.at[wg])
                    delta = plgpu.load(o_s.at[wg], layout=WGMMA).astype(jnp.float32)
                    delta = (delta * plgpu.load(do, layout=WGMMA).astype(jnp.float32)).sum(axis=1)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(o_free.at[wg])
                    delta_g[query_head, own] = delta

                    @functools.partial(pl.run_scoped, acc=plgpu.ACC((TILE, C), jnp.float32))
                    def _(acc):
                        def visit(tile_number, _):
                            slot = rem(step0 + turn * num + tile_number, stages)
                            key0 = (begin + tile_number) * TILE

                            def masked(x):
                                seen = seen_by(
                                    query0,
                                    key0,
                                    shape,
                                    lambda query, key: (key <= query) & (key >= across(firsts, shape, 0)),
                                )
                                return jnp.where(seen, x, jnp.zeros_like(x))

                            @functools.partial(
                                pl.run_scoped, s=plgpu.ACC(shape, jnp.float32), dp=plgpu.ACC(shape, jnp.float32)
                            )
                            def _(s, dp):
                                k = k_s.at[slot]
                                plgpu.barrier_wait(k_bar.at[slot])
                                plgpu.wgmma(s, q, k.transpose((1, 0)))
                                plgpu.barrier_wait(v_bar.at[slot])
                                plgpu.wgmma(dp, do, v_s.at[slot].transpose((1, 0)))
                                scores = plgpu.wgmma_accumulator_load(s, wait_n=1)
                                p = jnp.exp2(scores * (scale * LOG2E) - across(lse, shape, 0))
                                p = lax.cond((key0 >= query0) | (key0 < last_first), masked, lambda x: x, p)
                                ds = p * (plgpu.wgmma_accumulator_load(dp, wait_n=0) - across(delta, shape, 0))
                                multiply(acc, ds.astype(dtype), k, spare_s)
                                plgpu.wgmma_wait(0)

                            plgpu.barrier_arrive(free_bar.at[slot])

                        lax.fori_loop(0, num, visit, None)
                        q[...] = (acc[...] * scale).astype(dtype)

                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(q, dq_g.at[own, query_head])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(own_free.at[at])

                lax.fori_loop(0, units.rounds, one_unit, None)

            walk(table_g, item)
            plgpu.wait_smem_to_gmem(0)

    scratch = [
        tile(places, WARPGROUPS, TILE, C, dtype=dtype),
        tile(places, WARPGROUPS, TILE, C, dtype=dtype),
        tile(WARPGROUPS, TILE, C, dtype=dtype),
        tile(stages, TILE, C, dtype=dtype),
        tile(stages, TILE, C, dtype=dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=places * WARPGROUPS),
        plgpu.Barrier(num_barriers=places * WARPGROUPS),
        plgpu.Barrier(num_barriers=WARPGROUPS),
        plgpu.Barrier(num_barriers=WARPGROUPS),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    ]
    if config.through_smem:
        scratch.append(tile(WARPGROUPS, *shape, dtype=dtype))
    out = jax.ShapeDtypeStruct((T, H, C), dtype), jax.ShapeDtypeStruct((H, T), jnp.float32)
    run = kernel(body, out, sms=sms, scratch=scratch)
    return vary_like(run(q_THC, k_TKC, v_TKC, o_THC, do_THC, lse2_HT, first_T, table), q_THC)
