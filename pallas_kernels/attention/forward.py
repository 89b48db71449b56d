"""Forward attention for Hopper: one block per key head and 64 (or 128) queries, every query head of the group.

S = Q Kᵀ,   P = exp(S · scale − lse),   O = P V   by the running softmax of flash attention

Units, rounds and the stream of (K, V) tiles are those of `dq`.

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
    WGMMA,
    AttentionConfig,
    Units,
    across,
    kernel,
    maybe,
    observe,
    rem,
    rows,
    scores_seen,
    tile,
)

_FLOOR = -1e30  # running maximum of a row that has seen nothing yet: finite, so that exp2(-inf - it) is 0 and not NaN


def forward(q_THC, k_TKC, v_TKC, first_T, *, scale: float, config: AttentionConfig):
    """Returns o [T, H, C] and lse2 [H, T], the base-2 logarithm of the sum of exponentials."""
    T, H, C = q_THC.shape
    num_keys, dtype = k_TKC.shape[1], q_THC.dtype
    units = Units(group=H // num_keys, keys=config.forward_keys)
    stages, shape = config.forward_stages, (TILE, config.forward_keys)

    def body(q_g, k_g, v_g, first_g, o_g, lse_g, *scratch):
        q_s, k_s, v_s, lse_s, own_bar, k_bar, v_bar, own_free, k_free, v_free, *spare = scratch
        wg, head, block = (lax.axis_index(name) for name in ("wg", "head", "block"))
        begin, num = units.tiles(block, first_g)

        @pl.when(wg == WARPGROUPS)
        def stream():
            plgpu.set_max_registers(config.memory_registers, action="decrease")

            @pl.loop(0, units.rounds)
            def _(turn):
                place = rem(turn, 2)
                for i in range(WARPGROUPS):
                    own = units.place(head, block, turn * WARPGROUPS + i)

                    @pl.when(turn >= 2)
                    def _(i=i):
                        plgpu.barrier_wait(own_free.at[place * WARPGROUPS + i])

                    plgpu.copy_gmem_to_smem(q_g.at[own], q_s.at[place, i], own_bar.at[place * WARPGROUPS + i])

                @pl.loop(0, num)
                def _(number):
                    step = turn * num + number
                    slot = rem(step, stages)
                    here = rows((begin + number) * units.keys, units.keys), head

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(k_free.at[slot])

                    plgpu.copy_gmem_to_smem(k_g.at[here], k_s.at[slot], k_bar.at[slot])

                    @pl.when(step >= stages)
                    def _():
                        plgpu.barrier_wait(v_free.at[slot])

                    plgpu.copy_gmem_to_smem(v_g.at[here], v_s.at[slot], v_bar.at[slot])

            observe(own_free, WARPGROUPS * units.rounds, 2 * WARPGROUPS)
            observe(k_free, units.rounds * num, stages)
            observe(v_free, units.rounds * num, stages)

        @pl.when(wg < WARPGROUPS)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            spare_s = spare[0].at[wg] if spare else None

            def one_unit(turn, _):
                place = rem(turn, 2)
                own, query_head = units.place(head, block, turn * WARPGROUPS + wg)
                query0 = own.start
                firsts = plgpu.load(first_g.at[own], layout=BY_ROW, optimized=False)
                last_first = first_g[query0 + (TILE - 1)]
                q = q_s.at[place, wg]
                plgpu.barrier_wait(own_bar.at[place * WARPGROUPS + wg])

                def visit(number, carry):
                    top, total, o = carry
                    slot = rem(turn * num + number, stages)
                    key0 = (begin + number) * units.keys
                    needs_mask = (key0 + (units.keys - 1) > query0) | (key0 < last_first)

                    def masked(x):
                        seen = scores_seen(
                            query0, key0, shape, lambda query, key: (key <= query) & (key >= across(firsts, shape, 0))
                        )
                        return jnp.where(seen, x, jnp.full_like(x, -jnp.inf))

                    @functools.partial(pl.run_scoped, s=plgpu.ACC(shape, jnp.float32))
                    def scores(s):
                        plgpu.barrier_wait(k_bar.at[slot])
                        plgpu.wgmma(s, q, k_s.at[slot].transpose((1, 0)))
                        return s[...]

                    plgpu.barrier_arrive(k_free.at[slot])
                    scores = maybe(needs_mask, config, masked, scores)
                    new_top = jnp.maximum(top, scores.max(axis=1) * (scale * LOG2E))
                    fade = jnp.exp2(top - new_top)
                    p = jnp.exp2(scores * (scale * LOG2E) - across(new_top, shape, 0))
                    total = total * fade + p.sum(axis=1)
                    o = o * across(fade, (TILE, C), 0)
                    p = p.astype(dtype)
                    plgpu.barrier_wait(v_bar.at[slot])
                    o = _accumulated(o, p, v_s.at[slot], spare_s)
                    plgpu.barrier_arrive(v_free.at[slot])
                    return new_top, total, o

                empty = (
                    plgpu.layout_cast(jnp.full((TILE,), _FLOOR, jnp.float32), BY_ROW),
                    plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_ROW),
                    plgpu.layout_cast(jnp.zeros((TILE, C), jnp.float32), WGMMA),
                )
                top, total, o = lax.fori_loop(0, num, visit, empty)
                q[...] = (o / across(total, (TILE, C), 0)).astype(dtype)
                lse_s[wg] = top + jnp.log(total) * LOG2E
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q, o_g.at[own, query_head])
                plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_g.at[query_head, own])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(own_free.at[place * WARPGROUPS + wg])

            lax.fori_loop(0, units.rounds, one_unit, None)
            plgpu.wait_smem_to_gmem(0)

    scratch = [
        tile(2, WARPGROUPS, TILE, C, dtype=dtype),
        tile(stages, units.keys, C, dtype=dtype),
        tile(stages, units.keys, C, dtype=dtype),
        plgpu.SMEM((WARPGROUPS, TILE), jnp.float32),
        plgpu.Barrier(num_barriers=2 * WARPGROUPS),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=2 * WARPGROUPS),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    ]
    if config.through_smem:
        scratch.append(tile(WARPGROUPS, *shape, dtype=dtype))
    out = jax.ShapeDtypeStruct((T, H, C), dtype), jax.ShapeDtypeStruct((H, T), jnp.float32)
    run = kernel(body, out, heads=num_keys, blocks=T // units.queries, scratch=scratch, config=config)
    return run(q_THC, k_TKC, v_TKC, first_T)


def _accumulated(o, p, v, spare):
    """o + p v. Interpret mode knows no accumulator with an initial value, hence the second way."""
    if spare is None:
        return pl.run_state(lambda acc: plgpu.wgmma(acc, p, v))(plgpu.ACC.init(o))
    spare[...] = p
    plgpu.commit_smem()

    @functools.partial(pl.run_scoped, acc=plgpu.ACC(o.shape, jnp.float32))
    def product(acc):
        plgpu.wgmma(acc, spare, v)
        return acc[...]

    return o + product
