"""Forward attention for Hopper.

S = Q Kᵀ,   P = exp(S · scale − lse),   O = P V   by the running softmax of flash attention

Items, units, rounds and the stream of (K, V) tiles are those of `dq`.

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
    rem,
    rows,
    seen_by,
    tile,
    wait_for_rest,
    wait_for_room,
)

_FLOOR = -1e30  # running maximum of a row that has seen nothing yet: finite, so that exp2(-inf - it) is 0 and not NaN


def forward(q_THC, k_TKC, v_TKC, first_T, table, *, scale: float, sms: int, config: AttentionConfig):
    """Returns o [T, H, C] and lse2 [H, T], the base-2 logarithm of the sum of exponentials.

    Args:
        v_TKC: finite. A NaN in q or k reaches the rows that see it and no others.
        table: `query_blocks(first_T, Units(group=H // K).queries, TILE)`.
    """
    T, H, C = q_THC.shape
    num_keys, dtype = k_TKC.shape[1], q_THC.dtype
    units = Units(group=H // num_keys)
    stages, places, shape = config.forward_stages, config.places, (TILE, TILE)
    sms = min(sms, T // units.queries * num_keys)
    walk = Walk(blocks=T // units.queries, heads=num_keys, sms=sms, repeats=units.rounds)

    def body(q_g, k_g, v_g, first_g, table_g, o_g, lse_g, *scratch):
        q_s, k_s, v_s, first_s, lse_s, own_bar, own_free, k_bar, v_bar, free_bar, *spare = scratch
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
                        plgpu.copy_gmem_to_smem(first_g.at[own], first_s.at[place, i], own_bar.at[at])

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
                    last_first = first_g[query0 + (TILE - 1)]
                    q = q_s.at[place, wg]
                    plgpu.barrier_wait(own_bar.at[at])
                    firsts = plgpu.load(first_s.at[place, wg], layout=BY_ROW)

                    def visit(tile_number, carry):
                        top, total, o = carry
                        slot = rem(step0 + turn * num + tile_number, stages)
                        key0 = (begin + tile_number) * TILE

                        def masked(x):
                            seen = seen_by(
                                query0,
                                key0,
                                shape,
                                lambda query, key: (key <= query) & (key >= across(firsts, shape, 0)),
                            )
                            return jnp.where(seen, x, jnp.full_like(x, -jnp.inf))

                        @functools.partial(pl.run_scoped, s=plgpu.ACC(shape, jnp.float32))
                        def scores(s):
                            plgpu.barrier_wait(k_bar.at[slot])
                            plgpu.wgmma(s, q, k_s.at[slot].transpose((1, 0)))
                            return s[...]

                        scores = lax.cond((key0 >= query0) | (key0 < last_first), masked, lambda x: x, scores)
                        new_top = jnp.maximum(top, scores.max(axis=1) * (scale * LOG2E))
                        fade = jnp.exp2(top - new_top)
                        p = jnp.exp2(scores * (scale * LOG2E) - across(new_top, shape, 0))
                        total = total * fade + p.sum(axis=1)
                        o = o * across(fade, (TILE, C), 0)
                        plgpu.barrier_wait(v_bar.at[slot])
                        o = _accumulated(o, p.astype(dtype), v_s.at[slot], spare_s)
                        plgpu.barrier_arrive(free_bar.at[slot])
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
                    plgpu.barrier_arrive(own_free.at[at])

                lax.fori_loop(0, units.rounds, one_unit, None)

            walk(table_g, item)
            plgpu.wait_smem_to_gmem(0)

    scratch = [
        tile(places, WARPGROUPS, TILE, C, dtype=dtype),
        tile(stages, TILE, C, dtype=dtype),
        tile(stages, TILE, C, dtype=dtype),
        plgpu.SMEM((places, WARPGROUPS, TILE), jnp.int32),
        plgpu.SMEM((WARPGROUPS, TILE), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=places * WARPGROUPS),
        plgpu.Barrier(num_barriers=places * WARPGROUPS),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    ]
    if config.through_smem:
        scratch.append(tile(WARPGROUPS, *shape, dtype=dtype))
    out = jax.ShapeDtypeStruct((T, H, C), dtype), jax.ShapeDtypeStruct((H, T), jnp.float32)
    run = kernel(body, out, sms=sms, scratch=scratch)
    return vary_like(run(q_THC, k_TKC, v_TKC, first_T, table), q_THC)


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
