"""Gradients of keys and values for Hopper.

With Sᵀ = K Qᵀ, Pᵀ = exp(Sᵀ · scale − lse), dPᵀ = V dOᵀ, dSᵀ = Pᵀ ∘ (dPᵀ − delta):
    dV = Σ_heads Pᵀ dO,   dK = scale · Σ_heads dSᵀ Q

An item of work is 128 keys of one key head. Each of two warpgroups owns 64 of them, with K, V in shared memory and dK,
dV in accumulators. The third streams (q, dO, lse, delta) tiles of 64 queries: for each query head of the group the
tiles from the diagonal to the end of the last key's document. Scores are transposed, so that Pᵀ and dSᵀ come out of one
product in the registers that the next one takes its left operand from. The sum over the group happens here, in a fixed
order: deterministic, no atomics.

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
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    TILE,
    WARPGROUPS,
    WGMMA,
    AttentionConfig,
    Walk,
    across,
    div,
    kernel,
    multiply,
    rem,
    rows,
    seen_by,
    tile,
    wait_for_rest,
    wait_for_room,
)

KEYS = TILE * WARPGROUPS


def dkv(
    q_THC, k_TKC, v_TKC, do_THC, lse2_HT, delta_HT, end_T, table, dirty, *, scale: float, sms: int,
    config: AttentionConfig,
):  # fmt: skip
    """Returns dk and dv [T, K, C].

    Args:
        lse2_HT: base-2 logarithms of the softmax's sums; NaN in rows whose q or do is not finite.
        table: `key_blocks(end_T, KEYS, TILE)`.
        dirty: int32 [1], whether any of lse2 is not finite. Then tiles of queries are cleaned where they meet keys of
            another document: a weight of zero does not keep a NaN out of a product.
    """
    T, H, C = q_THC.shape
    num_keys, dtype = k_TKC.shape[1], q_THC.dtype
    group, stages, places, shape = H // num_keys, config.dkv_stages, config.places, (TILE, TILE)
    sms = min(sms, T // KEYS * num_keys)
    walk = Walk(blocks=T // KEYS, heads=num_keys, sms=sms, repeats=group)

    def body(q_g, k_g, v_g, do_g, lse_g, delta_g, end_g, table_g, dirty_g, dk_g, dv_g, *scratch):
        k_s, v_s, q_s, do_s, lse_s, delta_s, own_bar, own_free, q_bar, do_bar, free_bar, *spare = scratch
        wg = lax.axis_index("wg")

        @pl.when(wg == WARPGROUPS)
        def stream():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            def item(number, block, head, begin, num, step0):
                place = rem(number, places)
                for i in range(WARPGROUPS):
                    wait_for_room(own_free, number, places, i, WARPGROUPS)
                    own = rows(block * KEYS + i * TILE), head
                    plgpu.copy_gmem_to_smem(k_g.at[own], k_s.at[place, i], own_bar.at[place * WARPGROUPS + i])
                    plgpu.copy_gmem_to_smem(v_g.at[own], v_s.at[place, i], own_bar.at[place * WARPGROUPS + i])

                @pl.loop(0, num * group)
                def _(step):
                    member = lax.div(step, num)
                    query_head = head * group + member
                    here = rows((begin + step - member * num) * TILE)
                    slot = rem(step0 + step, stages)
                    wait_for_room(free_bar, step0 + step, stages)
                    plgpu.copy_gmem_to_smem(q_g.at[here, query_head], q_s.at[slot], q_bar.at[slot])
                    plgpu.copy_gmem_to_smem(lse_g.at[query_head, here], lse_s.at[slot], q_bar.at[slot])
                    plgpu.copy_gmem_to_smem(do_g.at[here, query_head], do_s.at[slot], do_bar.at[slot])
                    plgpu.copy_gmem_to_smem(delta_g.at[query_head, here], delta_s.at[slot], do_bar.at[slot])

            items, steps = walk(table_g, item)
            wait_for_rest(own_free, items, places, WARPGROUPS)
            wait_for_rest(free_bar, steps, stages)

        @pl.when(wg < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            spares = [ref.at[wg] for ref in spare] or [None, None]
            is_dirty = dirty_g[0] != 0

            def item(number, block, head, begin, num, step0):
                place = rem(number, places)
                row0 = block * KEYS + wg * TILE
                own_first, own_last = begin + wg, div(end_g[row0 + (TILE - 1)] + (TILE - 1), TILE)
                first_end = end_g[row0]
                ends = plgpu.load(end_g.at[rows(row0)], layout=BY_ROW, optimized=False)
                k, v = k_s.at[place, wg], v_s.at[place, wg]
                plgpu.barrier_wait(own_bar.at[place * WARPGROUPS + wg])

                def skip(step, _):
                    slot = rem(step, stages)
                    plgpu.barrier_wait(q_bar.at[slot])
                    plgpu.barrier_wait(do_bar.at[slot])
                    plgpu.barrier_arrive(free_bar.at[slot])

                @functools.partial(
                    pl.run_scoped, dk=plgpu.ACC((TILE, C), jnp.float32), dv=plgpu.ACC((TILE, C), jnp.float32)
                )
                def _(dk, dv):
                    def visit(step, tile_number):
                        slot = rem(step, stages)
                        query0 = tile_number * TILE
                        other_documents = query0 + (TILE - 1) >= first_end
                        unclean = is_dirty & other_documents

                        def masked(x):
                            seen = seen_by(
                                row0,
                                query0,
                                shape,
                                lambda key, query: (key <= query) & (query < across(ends, shape, 0)),
                            )
                            return jnp.where(seen, x, jnp.zeros_like(x))

                        @functools.partial(
                            pl.run_scoped, s=plgpu.ACC(shape, jnp.float32), dp=plgpu.ACC(shape, jnp.float32)
                        )
                        def _(s, dp):
                            q, do = q_s.at[slot], do_s.at[slot]
                            plgpu.barrier_wait(q_bar.at[slot])
                            pl.when(unclean)(functools.partial(_clean, q))
                            plgpu.wgmma(s, k, q.transpose((1, 0)))
                            plgpu.barrier_wait(do_bar.at[slot])
                            pl.when(unclean)(functools.partial(_clean, do))
                            plgpu.wgmma(dp, v, do.transpose((1, 0)))
                            lse = plgpu.load(lse_s.at[slot], layout=BY_COLUMN)
                            scores = plgpu.wgmma_accumulator_load(s, wait_n=1)
                            p = jnp.exp2(scores * (scale * LOG2E) - across(lse, shape, 1))
                            p = lax.cond((tile_number == own_first) | other_documents, masked, lambda x: x, p)
                            multiply(dv, p.astype(dtype), do, spares[0])
                            delta = plgpu.load(delta_s.at[slot], layout=BY_COLUMN)
                            ds = p * (plgpu.wgmma_accumulator_load(dp, wait_n=1) - across(delta, shape, 1))
                            ds = lax.cond(unclean, functools.partial(_where_seen, p), lambda x: x, ds)
                            multiply(dk, ds.astype(dtype), q, spares[1])
                            plgpu.wgmma_wait(0)

                        plgpu.barrier_arrive(free_bar.at[slot])

                    def of_head(member, _):
                        base = step0 + member * num - begin
                        lax.fori_loop(base + begin, base + own_first, skip, None)
                        lax.fori_loop(
                            own_first, own_last, lambda tile_number, _: visit(base + tile_number, tile_number), None
                        )
                        lax.fori_loop(base + own_last, base + begin + num, skip, None)

                    lax.fori_loop(0, group, of_head, None)
                    k[...] = (dk[...] * scale).astype(dtype)
                    v[...] = dv[...].astype(dtype)

                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(k, dk_g.at[rows(row0), head])
                plgpu.copy_smem_to_gmem(v, dv_g.at[rows(row0), head])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(own_free.at[place * WARPGROUPS + wg])

            walk(table_g, item)
            plgpu.wait_smem_to_gmem(0)

    scratch = [
        tile(places, WARPGROUPS, TILE, C, dtype=dtype),
        tile(places, WARPGROUPS, TILE, C, dtype=dtype),
        tile(stages, TILE, C, dtype=dtype),
        tile(stages, TILE, C, dtype=dtype),
        plgpu.SMEM((stages, TILE), jnp.float32),
        plgpu.SMEM((stages, TILE), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=places * WARPGROUPS),
        plgpu.Barrier(num_barriers=places * WARPGROUPS),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    ]
    if config.through_smem:
        scratch += [tile(WARPGROUPS, *shape, dtype=dtype)] * 2
    out = jax.ShapeDtypeStruct((T, num_keys, C), dtype)
    run = kernel(body, (out, out), sms=sms, scratch=scratch)
    return vary_like(run(q_THC, k_TKC, v_TKC, do_THC, lse2_HT, delta_HT, end_T, table, dirty), q_THC)


def _where_seen(p, ds):
    """0 · NaN is no zero: takes out what the mask took out of p."""
    return jnp.where(p == 0, jnp.zeros_like(ds), ds)


def _clean(ref) -> None:
    """Sets what is not finite to zero. Both warpgroups do it, without waiting for each other: they write the same."""
    x = plgpu.load(ref, layout=WGMMA).astype(jnp.float32)
    ref[...] = jnp.where(x - x == 0, x, jnp.zeros_like(x)).astype(ref.dtype)
    plgpu.commit_smem()
