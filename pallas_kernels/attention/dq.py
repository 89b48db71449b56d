"""Gradient of queries for Hopper: one block per key head and 64 (or 128) queries, every query head of the group.

With S = Q Kᵀ, P = exp(S · scale − lse), dP = dO Vᵀ, dS = P ∘ (dP − delta):   dQ = scale · dS K

The work of a block is cut into units of 64 queries of one head; the two warpgroups take one unit each per round and
share the stream of (K, V) tiles, which runs from the first query's document to the diagonal. All units of a block see
the same tiles under the same mask. The third warpgroup streams, and fetches the next round's queries during this one.

T packed rows · H query heads · K key heads · G = H / K · C head width
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .common import (
    BY_ROW,
    LOG2E,
    TILE,
    WARPGROUPS,
    AttentionConfig,
    Units,
    across,
    kernel,
    maybe,
    multiply,
    observe,
    rem,
    rows,
    scores_seen,
    tile,
)


def dq(q_THC, k_TKC, v_TKC, do_THC, lse2_HT, delta_HT, first_T, *, scale: float, config: AttentionConfig):
    """Returns dq [T, H, C]; lse2 is the base-2 logarithm of the sum of exponentials."""
    T, H, C = q_THC.shape
    num_keys, dtype = k_TKC.shape[1], q_THC.dtype
    units = Units(group=H // num_keys, keys=config.dq_keys)
    stages, places, shape = config.dq_stages, config.dq_places, (TILE, config.dq_keys)

    def body(q_g, k_g, v_g, do_g, lse_g, delta_g, first_g, dq_g, *scratch):
        q_s, do_s, k_s, v_s, own_bar, k_bar, v_bar, own_free, free_bar, *spare = scratch
        wg, head, block = (lax.axis_index(name) for name in ("wg", "head", "block"))
        begin, num = units.tiles(block, first_g)

        @pl.when(wg == WARPGROUPS)
        def stream():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            @pl.loop(0, units.rounds)
            def _(turn):
                place = rem(turn, places)
                for i in range(WARPGROUPS):
                    own = units.place(head, block, turn * WARPGROUPS + i)

                    @pl.when(turn >= places)
                    def _(i=i):
                        plgpu.barrier_wait(own_free.at[place * WARPGROUPS + i])

                    bar = own_bar.at[place * WARPGROUPS + i]
                    plgpu.copy_gmem_to_smem(q_g.at[own], q_s.at[place, i], bar)
                    plgpu.copy_gmem_to_smem(do_g.at[own], do_s.at[place, i], bar)

                @pl.loop(0, num)
                def _(number):
                    step = turn * num + number
                    slot = rem(step, stages)
                    here = rows((begin + number) * units.keys, units.keys), head

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(free_bar.at[slot])

                    plgpu.copy_gmem_to_smem(k_g.at[here], k_s.at[slot], k_bar.at[slot])
                    plgpu.copy_gmem_to_smem(v_g.at[here], v_s.at[slot], v_bar.at[slot])

            observe(own_free, WARPGROUPS * units.rounds, places * WARPGROUPS)
            observe(free_bar, units.rounds * num, stages)

        @pl.when(wg < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            spare_s = spare[0].at[wg] if spare else None

            def one_unit(turn, _):
                place = rem(turn, places)
                own, query_head = units.place(head, block, turn * WARPGROUPS + wg)
                query0 = own.start
                firsts = plgpu.load(first_g.at[own], layout=BY_ROW, optimized=False)
                last_first = first_g[query0 + (TILE - 1)]
                lse = plgpu.load(lse_g.at[query_head, own], layout=BY_ROW, optimized=False)
                delta = plgpu.load(delta_g.at[query_head, own], layout=BY_ROW, optimized=False)
                q, do = q_s.at[place, wg], do_s.at[place, wg]
                plgpu.barrier_wait(own_bar.at[place * WARPGROUPS + wg])

                @functools.partial(pl.run_scoped, acc=plgpu.ACC((TILE, C), jnp.float32))
                def _(acc):
                    def visit(number, _):
                        slot = rem(turn * num + number, stages)
                        key0 = (begin + number) * units.keys
                        needs_mask = (key0 + (units.keys - 1) > query0) | (key0 < last_first)

                        def masked(x):
                            seen = scores_seen(
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
                            plgpu.barrier_wait(k_bar.at[slot])
                            plgpu.wgmma(s, q, k_s.at[slot].transpose((1, 0)))
                            plgpu.barrier_wait(v_bar.at[slot])
                            plgpu.wgmma(dp, do, v_s.at[slot].transpose((1, 0)))
                            scores = plgpu.wgmma_accumulator_load(s, wait_n=1)
                            p = jnp.exp2(scores * (scale * LOG2E) - across(lse, shape, 0))
                            p = maybe(needs_mask, config, masked, p)
                            ds = p * (plgpu.wgmma_accumulator_load(dp, wait_n=0) - across(delta, shape, 0))
                            multiply(acc, ds.astype(dtype), k_s.at[slot], spare_s)
                            plgpu.wgmma_wait(0)

                        plgpu.barrier_arrive(free_bar.at[slot])

                    lax.fori_loop(0, num, visit, None)
                    q[...] = (acc[...] * scale).astype(dtype)

                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q, dq_g.at[own, query_head])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(own_free.at[place * WARPGROUPS + wg])

            lax.fori_loop(0, units.rounds, one_unit, None)
            plgpu.wait_smem_to_gmem(0)

    scratch = [
        tile(places, WARPGROUPS, TILE, C, dtype=dtype),
        tile(places, WARPGROUPS, TILE, C, dtype=dtype),
        tile(stages, units.keys, C, dtype=dtype),
        tile(stages, units.keys, C, dtype=dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=places * WARPGROUPS),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=places * WARPGROUPS),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    ]
    if config.through_smem:
        scratch.append(tile(WARPGROUPS, *shape, dtype=dtype))
    out = jax.ShapeDtypeStruct((T, H, C), dtype)
    run = kernel(body, out, heads=num_keys, blocks=T // units.queries, scratch=scratch, config=config)
    return run(q_THC, k_TKC, v_TKC, do_THC, lse2_HT, delta_HT, first_T)
