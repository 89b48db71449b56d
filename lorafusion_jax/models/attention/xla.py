"""Packed causal attention in plain jnp, for every device: blocks along a band below the diagonal.

Rows are split into blocks. In step d each block of queries attends to the keys d blocks before it, with the online
softmax of flash attention. Blocks are sorted by the distance that their segments reach back, so the blocks with work in
step d come first. A step processes only these, a quarter of all blocks at a time. The work is proportional to the pairs
of blocks with common segments, not to T x T or to the longest segment. Scores of T x block / 4 exist at once. A few
rows are one block, which needs no steps: tiny programs compile in half the time.
Dims: `T` rows · `n` blocks · `p` blocks at once · `B` rows per block · `H` = `K` key heads x `G` · `C` head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lorafusion_jax.models.attention.rule import ScoreRule, checkpointed
from lorafusion_jax.models.segments import Segments
from pallas_kernels.exact import contract

BLOCK = 64
ONE_BLOCK = 256  # so many rows are one block
_MASKED = float("-inf")
_NOBODY = np.iinfo(np.int32).max


def xla_forward(
    q_THC: jax.Array,
    k_TKC: jax.Array,
    v_TKC: jax.Array,
    segments: Segments,
    rule: ScoreRule,
    *,
    sinks: jax.Array | None = None,
):
    """Returns softmax(cap(scale · q kᵀ)) v over the rows that each sees, in float32, and the residuals."""
    T, num_keys = k_TKC.shape[:2]
    block = BLOCK if T > ONE_BLOCK else -(-T // 8) * 8
    ids_nB = jnp.pad(jnp.asarray(segments.ids), (0, -T % block), constant_values=_NOBODY).reshape(-1, block)
    q, k, v = (_blocks(x, block, num_keys) for x in (q_THC, k_TKC, v_TKC))
    o, lse = _forward(q, k[:, :, 0], v[:, :, 0], ids_nB, rule, sinks)
    residuals = checkpointed((q, k[:, :, 0], v[:, :, 0], ids_nB, o, lse))
    return _rows(residuals[4], T), residuals


def xla_backward(residuals, do_THC: jax.Array, rule: ScoreRule):
    """Gradients of q, k and v."""
    T, (_, num_keys, block, _) = len(do_THC), residuals[1].shape
    dq, dk, dv = _backward(residuals, _blocks(do_THC, block, num_keys), rule)
    return _rows(dq, T), _rows(dk[:, :, None], T), _rows(dv[:, :, None], T)


def _blocks(x_THC: jax.Array, block: int, num_keys: int) -> jax.Array:
    T, H, C = x_THC.shape
    x_THC = jnp.pad(x_THC, ((0, -T % block), (0, 0), (0, 0)))
    return x_THC.reshape(-1, block, num_keys, H // num_keys, C).transpose(0, 2, 3, 1, 4)


def _rows(x_nKGBC: jax.Array, T: int) -> jax.Array:
    n, K, G, B, C = x_nKGBC.shape
    return x_nKGBC.transpose(0, 3, 1, 2, 4).reshape(n * B, K * G, C)[:T]


def _forward(q_nKGBC, k_nKBC, v_nKBC, ids_nB, rule: ScoreRule, sinks_H: jax.Array | None = None):
    order, reach = _farthest_first(ids_nB, rule.window)
    keys = _padded_front(k_nKBC, v_nKBC, ids_nB)
    q, ids = q_nKGBC[order], ids_nB[order]

    def visit(d, at, carry):
        m_old, total_old, o_old, q_p, ids_p, order_p = _take((*carry, q, ids, order), at)
        k, v, visible = _earlier_block(keys, ids_p, order_p, d, rule.window)
        s = jnp.where(visible, _cap(_scores(q_p, k, rule), rule), _MASKED)
        m = jnp.maximum(m_old, s.max(-1))
        p, fade = jnp.exp(s - m[..., None]), jnp.exp(m_old - m)
        o = o_old * fade[..., None] + _product("nkrs,nksc->nkrc", p.astype(v.dtype), v)
        return _put(carry, (m, total_old * fade + p.sum(-1), o), at)

    m, total = jnp.full(q.shape[:-1], _MASKED, jnp.float32), jnp.zeros(q.shape[:-1], jnp.float32)
    if sinks_H is not None:  # a key without a value; backward finds it in the log-sum-exp
        m = jnp.broadcast_to(sinks_H.astype(jnp.float32).reshape(*q.shape[1:3], 1), m.shape)
        total = jnp.ones_like(m)
    # Step 0 is the diagonal, so every row has attended to itself and m is finite afterwards.
    m, total, o = _visit_all(visit, reach, (m, total, jnp.zeros(q.shape, jnp.float32)))
    back = jnp.argsort(order)
    return (o / total[..., None]).astype(q.dtype)[back], (m + jnp.log(total))[back]


def _backward(residuals, do_nKGBC, rule: ScoreRule):
    q_nKGBC, k_nKBC, v_nKBC, ids_nB, o, lse = residuals
    order, reach = _farthest_first(ids_nB, rule.window)
    keys = _padded_front(k_nKBC, v_nKBC, ids_nB)
    delta = (do_nKGBC.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1)
    rows = [x[order] for x in (q_nKGBC, do_nKGBC.astype(q_nKGBC.dtype), lse, delta, ids_nB)]
    n = len(k_nKBC)

    def visit(d, at, carry):
        dq, dk, dv = carry
        dq_p, q, do, lse, delta, ids_p, order_p = _take((dq, *rows, order), at)
        k, v, visible = _earlier_block(keys, ids_p, order_p, d, rule.window)
        capped = _cap(_scores(q, k, rule), rule)
        p = jnp.where(visible, jnp.exp(capped - lse[..., None]), 0.0)
        dp = _product("nkrc,nksc->nkrs", do, v)
        ds = p * (dp - delta[..., None]) * rule.scale
        if rule.soft_cap is not None:
            ds = ds * (1 - jnp.square(capped / rule.soft_cap))
        ds = jnp.where(visible, ds, 0.0).astype(q.dtype)
        (dq,) = _put((dq,), (dq_p + _product("nkrs,nksc->nkrc", ds, k),), at)
        block = n + order_p - d
        dk = dk.at[block].add(_product("nkrs,nkrc->nksc", ds, q), unique_indices=True)
        dv = dv.at[block].add(_product("nkrs,nkrc->nksc", p.astype(do.dtype), do), unique_indices=True)
        return dq, dk, dv

    zeros = jnp.zeros((2 * n, *k_nKBC.shape[1:]), jnp.float32)
    dq, dk, dv = _visit_all(visit, reach, (jnp.zeros(q_nKGBC.shape, jnp.float32), zeros, zeros))
    dq = dq[jnp.argsort(order)]
    return dq.astype(q_nKGBC.dtype), dk[n:].astype(k_nKBC.dtype), dv[n:].astype(v_nKBC.dtype)


def _farthest_first(ids_nB: jax.Array, window: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Order of blocks by the number of blocks that they attend to (descending, itself included), and these numbers."""
    n, B = ids_nB.shape
    if n == 1:
        return jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    ids_T = ids_nB.reshape(-1)
    is_start = jnp.concatenate([jnp.ones(1, bool), ids_T[1:] != ids_T[:-1]])
    start = lax.cummax(jnp.where(is_start, jnp.arange(n * B, dtype=jnp.int32), 0))[::B]
    if window is not None:
        start = jnp.maximum(start, jnp.arange(n, dtype=jnp.int32) * B - (window - 1))
    reach = jnp.arange(n, dtype=jnp.int32) - start // B + 1
    order = jnp.argsort(-reach, stable=True).astype(jnp.int32)
    return order, reach[order]


def _visit_all(visit, reach_n: jax.Array, carry):
    """Calls `visit(d, at, carry)` for all pairs of blocks with work; `at` is a slice of the sorted blocks."""
    n = len(reach_n)
    if n == 1:
        return visit(0, (0, 1), carry)
    size = max(n // 4, 1)
    size = next(size for size in range(size, 0, -1) if n % size == 0)

    def step(d, carry):
        busy = (reach_n > d).sum(dtype=jnp.int32)
        return lax.fori_loop(0, (busy + size - 1) // size, lambda i, carry: visit(d, (i * size, size), carry), carry)

    return lax.fori_loop(0, reach_n[0], step, carry)


def _take(arrays, at):
    return tuple(lax.dynamic_slice_in_dim(x, *at) for x in arrays)


def _put(arrays, parts, at):
    return tuple(lax.dynamic_update_slice_in_dim(x, part, at[0], 0) for x, part in zip(arrays, parts, strict=True))


def _padded_front(k_nKBC, v_nKBC, ids_nB):
    """Pads n blocks of no segment in front, so that earlier blocks are always inside the array."""
    front = lambda x, value: jnp.pad(x, ((len(x), 0), *[(0, 0)] * (x.ndim - 1)), constant_values=value)  # noqa: E731
    return front(k_nKBC, 0), front(v_nKBC, 0), front(ids_nB, -1)


def _earlier_block(keys, ids_pB, order_p, d, window: int | None = None):
    """Keys and values of the block d before each block, and the mask of those that its queries attend to."""
    block = keys[0].shape[0] // 2 + order_p - d
    k, v, ids = (x.at[block].get(mode="promise_in_bounds", unique_indices=True) for x in keys)
    rows = jnp.arange(ids.shape[1])
    visible = (ids_pB[:, :, None] == ids[:, None]) & ((rows[:, None] >= rows) | (d > 0))
    if window is not None:
        visible &= d * ids.shape[1] + rows[:, None] - rows < window
    return k, v, visible[:, None, None]


def _scores(q_nKGBC, k_nKBC, rule: ScoreRule):
    return _product("nkrc,nksc->nkrs", q_nKGBC, k_nKBC) * rule.scale


def _cap(scores: jax.Array, rule: ScoreRule) -> jax.Array:
    return scores if rule.soft_cap is None else rule.soft_cap * jnp.tanh(scores / rule.soft_cap)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Contracts; query operands [n, K, G, B, ·] are reshaped to rows [n, K, G·B, ·]."""
    rows = next(x.shape[2:4] for x in (a, b) if x.ndim == 5)
    a, b = (x.reshape(*x.shape[:2], -1, x.shape[-1]) if x.ndim == 5 else x for x in (a, b))
    out = contract(spec, a, b)
    return out.reshape(*out.shape[:2], *rows, -1) if spec.split("->")[1][2] == "r" else out
