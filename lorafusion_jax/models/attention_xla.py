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

BLOCK = 128
_MASKED = float("-inf")


def xla_attention(q_THC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, ids_T: jax.Array) -> jax.Array:
    """softmax(q kᵀ / √C) v over the earlier rows of the same segment, float32 inside."""
    T, H, C = q_THC.shape
    num_keys = k_TKC.shape[1]
    block = min(BLOCK, -(-T // 8) * 8)
    pad = -T % block
    rows = ((0, pad), (0, 0), (0, 0))
    ids_T = jnp.pad(jnp.asarray(ids_T), (0, pad), constant_values=jnp.iinfo(jnp.int32).max)
    q_nKGBC = _blocks(jnp.pad(q_THC, rows).reshape(T + pad, num_keys, H // num_keys, C), block)
    k_KTC, v_KTC = (jnp.pad(x, rows).transpose(1, 0, 2) for x in (k_TKC, v_TKC))
    o_nKGBC = _banded(q_nKGBC, k_KTC, v_KTC, ids_T)
    return o_nKGBC.transpose(0, 3, 1, 2, 4).reshape(T + pad, H, C)[:T]


def _blocks(x_TKGC: jax.Array, block: int) -> jax.Array:
    T, K, G, C = x_TKGC.shape
    return x_TKGC.reshape(T // block, block, K, G, C).transpose(0, 2, 3, 1, 4)


@jax.custom_vjp
def _banded(q, k, v, ids):
    return _forward(q, k, v, ids)[0]


def _forward(q_nKGBC, k_KTC, v_KTC, ids_T):
    n, K, G, B, _ = q_nKGBC.shape
    k_pad, v_pad, ids_pad = _before(k_KTC, v_KTC, ids_T)

    def step(d, carry):
        m, total, o = carry
        k_nKBC, v_nKBC, seen = _shifted(k_pad, v_pad, ids_pad, ids_T, d, n, B)
        s = jnp.where(seen, _scores(q_nKGBC, k_nKBC), _MASKED)
        m_new = jnp.maximum(m, s.max(-1))
        p, fade = jnp.exp(s - m_new[..., None]), jnp.exp(m - m_new)
        o = o * fade[..., None] + _product("nkgbs,nksc->nkgbc", p.astype(v_KTC.dtype), v_nKBC)
        return m_new, total * fade + p.sum(-1), o

    empty = jnp.full((n, K, G, B), _MASKED, jnp.float32)
    start = (empty, jnp.zeros_like(empty), jnp.zeros(q_nKGBC.shape, jnp.float32))
    # Step 0 holds the diagonal, so every row has seen itself and m is finite from there on.
    m, total, o = lax.fori_loop(0, _reach(ids_T, B), step, start)
    return (o / total[..., None]).astype(q_nKGBC.dtype), m + jnp.log(total)


def _banded_fwd(q, k, v, ids):
    o, lse = _forward(q, k, v, ids)
    return o, (q, k, v, ids, o, lse)


def _banded_bwd(residuals, do_nKGBC):
    q_nKGBC, k_KTC, v_KTC, ids_T, o, lse = residuals
    n, _, _, B, C = q_nKGBC.shape
    k_pad, v_pad, ids_pad = _before(k_KTC, v_KTC, ids_T)
    delta = (do_nKGBC.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1)
    do_nKGBC = do_nKGBC.astype(q_nKGBC.dtype)

    def step(d, carry):
        dq, dk_pad, dv_pad = carry
        k_nKBC, v_nKBC, seen = _shifted(k_pad, v_pad, ids_pad, ids_T, d, n, B)
        p = jnp.where(seen, jnp.exp(_scores(q_nKGBC, k_nKBC) - lse[..., None]), 0.0)
        dp = _product("nkgbc,nksc->nkgbs", do_nKGBC, v_nKBC)
        ds = jnp.where(seen, p * (dp - delta[..., None]) * C**-0.5, 0.0).astype(q_nKGBC.dtype)
        dq = dq + _product("nkgbs,nksc->nkgbc", ds, k_nKBC)
        dk_pad = _add_at(dk_pad, _product("nkgbs,nkgbc->knsc", ds, q_nKGBC), d, n, B)
        dv_pad = _add_at(dv_pad, _product("nkgbs,nkgbc->knsc", p.astype(do_nKGBC.dtype), do_nKGBC), d, n, B)
        return dq, dk_pad, dv_pad

    zeros = jnp.zeros(k_pad.shape, jnp.float32)
    start = (jnp.zeros(q_nKGBC.shape, jnp.float32), zeros, zeros)
    dq, dk_pad, dv_pad = lax.fori_loop(0, _reach(ids_T, B), step, start)
    own = slice(k_pad.shape[1] - k_KTC.shape[1], None)
    return dq.astype(q_nKGBC.dtype), dk_pad[:, own].astype(k_KTC.dtype), dv_pad[:, own].astype(v_KTC.dtype), None


_banded.defvjp(_banded_fwd, _banded_bwd)


def _reach(ids_T: jax.Array, block: int) -> jax.Array:
    """Steps needed: 1 + the most blocks between a block of queries and the segment start of its first row."""
    rows = jnp.arange(ids_T.shape[0], dtype=jnp.int32)
    is_start = jnp.concatenate([jnp.ones(1, bool), ids_T[1:] != ids_T[:-1]])
    start = lax.cummax(jnp.where(is_start, rows, 0))[::block]
    return jnp.max(rows[::block] // block - start // block) + 1


def _before(k_KTC, v_KTC, ids_T):
    """Puts T rows of nobody in front, so that looking back never leaves the array."""
    front = ((0, 0), (k_KTC.shape[1], 0), (0, 0))
    return jnp.pad(k_KTC, front), jnp.pad(v_KTC, front), jnp.pad(ids_T, (ids_T.shape[0], 0), constant_values=-1)


def _shifted(k_pad, v_pad, ids_pad, ids_T, d, n, B):
    """Keys and values of the block d before each block, and which of them its queries may see."""
    T = n * B
    cut = partial(lax.dynamic_slice_in_dim, start_index=T - d * B, slice_size=T)
    k_nKBC, v_nKBC = (cut(x, axis=1).reshape(x.shape[0], n, B, -1).transpose(1, 0, 2, 3) for x in (k_pad, v_pad))
    same = ids_T.reshape(n, B, 1) == cut(ids_pad, axis=0).reshape(n, 1, B)
    rows = jnp.arange(B)
    seen = same & ((rows[:, None] >= rows) | (d > 0))
    return k_nKBC, v_nKBC, seen[:, None, None]


def _add_at(pad_KTC, update_KnBC, d, n, B):
    T = n * B
    at = T - d * B
    old = lax.dynamic_slice_in_dim(pad_KTC, at, T, axis=1)
    return lax.dynamic_update_slice_in_dim(pad_KTC, old + update_KnBC.reshape(old.shape), at, axis=1)


def _scores(q_nKGBC, k_nKBC):
    return _product("nkgbc,nksc->nkgbs", q_nKGBC, k_nKBC) * q_nKGBC.shape[-1] ** -0.5


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
