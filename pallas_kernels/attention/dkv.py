"""Gradients of keys and values for Hopper: one block per 128 keys of a key head.

With Sᵀ = K Qᵀ, Pᵀ = exp(Sᵀ · scale − lse), dPᵀ = V dOᵀ, dSᵀ = Pᵀ ∘ (dPᵀ − delta):
    dV = Σ_heads Pᵀ dO,   dK = scale · Σ_heads dSᵀ Q

Each of two warpgroups owns 64 keys and keeps their K, V in shared memory and dK, dV in its accumulators. The third
streams (q, dO, lse, delta) tiles of 64 queries: for each query head of the group the tiles from the diagonal to the end
of the last key's document. Scores are transposed, so that Pᵀ and dSᵀ come out of one product in the registers that the
next one takes its left operand from. The sum over the group happens here, in a fixed order: deterministic, no atomics.

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
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    TILE,
    WARPGROUPS,
    AttentionConfig,
    across,
    ceil_div,
    kernel,
    maybe,
    multiply,
    observe,
    rem,
    rows,
    scores_seen,
    tile,
)

KEYS = TILE * WARPGROUPS


def dkv(q_THC, k_TKC, v_TKC, do_THC, lse2_HT, delta_HT, end_T, *, scale: float, config: AttentionConfig):
    """Returns dk and dv [T, K, C]; lse2 is the base-2 logarithm of the sum of exponentials."""
    T, H, C = q_THC.shape
    num_keys, dtype = k_TKC.shape[1], q_THC.dtype
    group, stages = H // num_keys, config.dkv_stages
    shape = (TILE, TILE)

    def body(q_g, k_g, v_g, do_g, lse_g, delta_g, end_g, dk_g, dv_g, *scratch):
        k_s, v_s, q_s, do_s, lse_s, delta_s, kv_bar, q_bar, do_bar, free_bar, *spare = scratch
        wg, head, block = (lax.axis_index(name) for name in ("wg", "head", "block"))
        key0 = block * KEYS
        first = block * WARPGROUPS
        last = ceil_div(end_g[key0 + (KEYS - 1)], TILE)
        num = last - first

        @pl.when(wg == WARPGROUPS)
        def stream():
            plgpu.set_max_registers(config.memory_registers, action="decrease")
            for i in range(WARPGROUPS):
                own = rows(key0 + i * TILE), head
                plgpu.copy_gmem_to_smem(k_g.at[own], k_s.at[i], kv_bar.at[i])
                plgpu.copy_gmem_to_smem(v_g.at[own], v_s.at[i], kv_bar.at[i])

            @pl.loop(0, num * group)
            def _(step):
                member = lax.div(step, num)
                query_head = head * group + member
                here = rows((first + step - member * num) * TILE)
                slot = rem(step, stages)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(free_bar.at[slot])

                plgpu.copy_gmem_to_smem(q_g.at[here, query_head], q_s.at[slot], q_bar.at[slot])
                plgpu.copy_gmem_to_smem(lse_g.at[query_head, here], lse_s.at[slot], q_bar.at[slot])
                plgpu.copy_gmem_to_smem(do_g.at[here, query_head], do_s.at[slot], do_bar.at[slot])
                plgpu.copy_gmem_to_smem(delta_g.at[query_head, here], delta_s.at[slot], do_bar.at[slot])

            observe(free_bar, num * group, stages)

        @pl.when(wg < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            own_row0 = key0 + wg * TILE
            own_first, own_last = first + wg, ceil_div(end_g[own_row0 + (TILE - 1)], TILE)
            first_end = end_g[own_row0]
            ends = plgpu.load(end_g.at[rows(own_row0)], layout=BY_ROW, optimized=False)
            spares = [ref.at[wg] for ref in spare] or [None, None]
            plgpu.barrier_wait(kv_bar.at[wg])

            def skip(step, _):
                slot = rem(step, stages)
                plgpu.barrier_wait(q_bar.at[slot])
                plgpu.barrier_wait(do_bar.at[slot])
                plgpu.barrier_arrive(free_bar.at[slot])

            @functools.partial(
                pl.run_scoped, dk=plgpu.ACC((TILE, C), jnp.float32), dv=plgpu.ACC((TILE, C), jnp.float32)
            )
            def _(dk, dv):
                def visit(step, number):
                    slot = rem(step, stages)
                    query0 = number * TILE
                    needs_mask = (number == own_first) | (query0 + (TILE - 1) >= first_end)

                    def masked(x):
                        seen = scores_seen(
                            own_row0,
                            query0,
                            shape,
                            lambda key, query: (key <= query) & (query < across(ends, shape, 0)),
                        )
                        return jnp.where(seen, x, jnp.zeros_like(x))

                    @functools.partial(pl.run_scoped, s=plgpu.ACC(shape, jnp.float32), dp=plgpu.ACC(shape, jnp.float32))
                    def _(s, dp):
                        plgpu.barrier_wait(q_bar.at[slot])
                        plgpu.wgmma(s, k_s.at[wg], q_s.at[slot].transpose((1, 0)))
                        plgpu.barrier_wait(do_bar.at[slot])
                        plgpu.wgmma(dp, v_s.at[wg], do_s.at[slot].transpose((1, 0)))
                        lse = plgpu.load(lse_s.at[slot], layout=BY_COLUMN)
                        scores = plgpu.wgmma_accumulator_load(s, wait_n=1)
                        p = jnp.exp2(scores * (scale * LOG2E) - across(lse, shape, 1))
                        p = maybe(needs_mask, config, masked, p)
                        multiply(dv, p.astype(dtype), do_s.at[slot], spares[0])
                        delta = plgpu.load(delta_s.at[slot], layout=BY_COLUMN)
                        ds = p * (plgpu.wgmma_accumulator_load(dp, wait_n=1) - across(delta, shape, 1))
                        multiply(dk, ds.astype(dtype), q_s.at[slot], spares[1])
                        plgpu.wgmma_wait(0)

                    plgpu.barrier_arrive(free_bar.at[slot])

                def of_head(member, _):
                    step0 = member * num - first
                    lax.fori_loop(step0 + first, step0 + own_first, skip, None)
                    lax.fori_loop(own_first, own_last, lambda number, _: visit(step0 + number, number), None)
                    lax.fori_loop(step0 + own_last, step0 + last, skip, None)

                lax.fori_loop(0, group, of_head, None)
                k_s[wg] = (dk[...] * scale).astype(dtype)
                v_s[wg] = dv[...].astype(dtype)

            plgpu.commit_smem()
            own = rows(own_row0), head
            plgpu.copy_smem_to_gmem(k_s.at[wg], dk_g.at[own])
            plgpu.copy_smem_to_gmem(v_s.at[wg], dv_g.at[own])
            plgpu.wait_smem_to_gmem(0)

    scratch = [
        tile(WARPGROUPS, TILE, C, dtype=dtype),
        tile(WARPGROUPS, TILE, C, dtype=dtype),
        tile(stages, TILE, C, dtype=dtype),
        tile(stages, TILE, C, dtype=dtype),
        plgpu.SMEM((stages, TILE), jnp.float32),
        plgpu.SMEM((stages, TILE), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    ]
    if config.through_smem:
        scratch += [tile(WARPGROUPS, *shape, dtype=dtype)] * 2
    out = jax.ShapeDtypeStruct((T, num_keys, C), dtype)
    run = kernel(body, (out, out), heads=num_keys, blocks=T // KEYS, scratch=scratch, config=config)
    return run(q_THC, k_TKC, v_TKC, do_THC, lse2_HT, delta_HT, end_T)
