"""Packed causal attention in plain jnp: blocks along a band below the diagonal, for every device.

Rows are cut into blocks; step d of the loop lets every block of queries see the block of keys d blocks before it,
with the running softmax of flash attention. The number of steps is the reach of the longest segment, known at run
time, so short segments cost a few small products and not T x T, and no more than T x block scores exist at once.
Dims: `T` rows, a multiple of the block · `n` blocks · `B` rows a block · `H` heads = `K` key heads x `G` · `C` head
    width.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 64
_MASKED = float("-inf")


def xla_attention(q_THC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, ids_T: jax.Array) -> jax.Array:
    """softmax(q kᵀ / √C) v over the earlier rows of the same segment, float32 inside."""
    T, H, C = q_THC.shape
    block = min(BLOCK, -(-T // 8) * 8)
    pad = -T % block
    ids_T = jnp.pad(jnp.asarray(ids_T), (0, pad), constant_values=jnp.iinfo(jnp.int32).max)
    q, k, v = (_blocks(jnp.pad(x, ((0, pad), (0, 0), (0, 0))), block, k_TKC.shape[1]) for x in (q_THC, k_TKC, v_TKC))
    o_nKGBC = _banded(q, k[:, :, 0], v[:, :, 0], ids_T.reshape(-1, block))
    return o_nKGBC.transpose(0, 3, 1, 2, 4).reshape(T + pad, H, C)[:T]


def _blocks(x_THC: jax.Array, block: int, num_keys: int) -> jax.Array:
    T, H, C = x_THC.shape
    return x_THC.reshape(T // block, block, num_keys, H // num_keys, C).transpose(0, 2, 3, 1, 4)


@jax.custom_vjp
def _banded(q_nKGBC, k_nKBC, v_nKBC, ids_nB):
    return _forward(q_nKGBC, k_nKBC, v_nKBC, ids_nB)[0]


def _forward(q_nKGBC, k_nKBC, v_nKBC, ids_nB):
    before = _before(k_nKBC, v_nKBC, ids_nB)

    def step(d, carry):
        m, total, o = carry
        k, v, seen = _shifted(before, ids_nB, d)
        s = jnp.where(seen, _scores(q_nKGBC, k), _MASKED)
        m_new = jnp.maximum(m, s.max(-1))
        p, fade = jnp.exp(s - m_new[..., None]), jnp.exp(m - m_new)
        o = o * fade[..., None] + _product("nkrs,nksc->nkrc", p.astype(v.dtype), v)
        return m_new, total * fade + p.sum(-1), o

    empty = jnp.full(q_nKGBC.shape[:-1], _MASKED, jnp.float32)
    start = (empty, jnp.zeros_like(empty), jnp.zeros(q_nKGBC.shape, jnp.float32))
    # Step 0 holds the diagonal, so every row has seen itself and m is finite from there on.
    m, total, o = lax.fori_loop(0, _reach(ids_nB), step, start)
    return (o / total[..., None]).astype(q_nKGBC.dtype), m + jnp.log(total)


def _banded_fwd(q, k, v, ids):
    o, lse = _forward(q, k, v, ids)
    return o, (q, k, v, ids, o, lse)


def _banded_bwd(residuals, do_nKGBC):
    q_nKGBC, k_nKBC, v_nKBC, ids_nB, o, lse = residuals
    before = _before(k_nKBC, v_nKBC, ids_nB)
    delta = (do_nKGBC.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1)
    do_nKGBC = do_nKGBC.astype(q_nKGBC.dtype)

    def step(d, carry):
        dq, dk, dv = carry
        k, v, seen = _shifted(before, ids_nB, d)
        p = jnp.where(seen, jnp.exp(_scores(q_nKGBC, k) - lse[..., None]), 0.0)
        dp = _product("nkrc,nksc->nkrs", do_nKGBC, v)
        ds = jnp.where(seen, p * (dp - delta[..., None]) * q_nKGBC.shape[-1] ** -0.5, 0.0).astype(q_nKGBC.dtype)
        dq = dq + _product("nkrs,nksc->nkrc", ds, k)
        dk = _add_at(dk, _product("nkrs,nkrc->nksc", ds, q_nKGBC), d)
        dv = _add_at(dv, _product("nkrs,nkrc->nksc", p.astype(do_nKGBC.dtype), do_nKGBC), d)
        return dq, dk, dv

    n = len(k_nKBC)
    zeros = jnp.zeros((2 * n, *k_nKBC.shape[1:]), jnp.float32)
    dq, dk, dv = lax.fori_loop(0, _reach(ids_nB), step, (jnp.zeros(q_nKGBC.shape, jnp.float32), zeros, zeros))
    return dq.astype(q_nKGBC.dtype), dk[n:].astype(k_nKBC.dtype), dv[n:].astype(v_nKBC.dtype), None


_banded.defvjp(_banded_fwd, _banded_bwd)


def _reach(ids_nB: jax.Array) -> jax.Array:
    """Steps needed: 1 + the most blocks between a block of queries and the segment start of its first row."""
    n, B = ids_nB.shape
    ids_T = ids_nB.reshape(-1)
    is_start = jnp.concatenate([jnp.ones(1, bool), ids_T[1:] != ids_T[:-1]])
    start = lax.cummax(jnp.where(is_start, jnp.arange(n * B, dtype=jnp.int32), 0))[::B]
    return jnp.max(jnp.arange(n, dtype=jnp.int32) - start // B) + 1


def _before(k_nKBC, v_nKBC, ids_nB):
    """Puts n blocks of nobody in front, so that looking back never leaves the array."""
    front = lambda x, value: jnp.pad(x, ((len(x), 0), *[(0, 0)] * (x.ndim - 1)), constant_values=value)  # noqa: E731
    return front(k_nKBC, 0), front(v_nKBC, 0), front(ids_nB, -1)


def _shifted(before, ids_nB, d):
    """Keys and values of the block d before each block, and which of them its queries may see."""
    n, B = ids_nB.shape
    k, v, ids = (lax.dynamic_slice_in_dim(x, n - d, n) for x in before)
    rows = jnp.arange(B)
    seen = (ids_nB[:, :, None] == ids[:, None]) & ((rows[:, None] >= rows) | (d > 0))
    return k, v, seen[:, None, None]


def _add_at(acc, update, d):
    n = len(update)
    old = lax.dynamic_slice_in_dim(acc, n - d, n)
    return lax.dynamic_update_slice_in_dim(acc, old + update, n - d, 0)


def _scores(q_nKGBC, k_nKBC):
    return _product("nkrc,nksc->nkrs", q_nKGBC, k_nKBC) * q_nKGBC.shape[-1] ** -0.5


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Contracts; an operand of queries [n, K, G, B, ·] goes in and comes out as rows [n, K, G·B, ·]."""
    rows = next(x.shape[2:4] for x in (a, b) if x.ndim == 5)
    a, b = (x.reshape(*x.shape[:2], -1, x.shape[-1]) if x.ndim == 5 else x for x in (a, b))
    out = jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
    return out.reshape(*out.shape[:2], *rows, -1) if spec.split("->")[1][2] == "r" else out
