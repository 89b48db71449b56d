"""Packed documents with random inputs, and what attention over them is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from host_arrays import on_device

from pallas_kernels.attention import document_rows

POISONED = "documents that straddle tiles"  # a case of each backend
_document_rows = jax.jit(document_rows)


def inputs(case: Sequence[Any], dtype: Any) -> tuple[list[jax.Array], tuple[jax.Array, jax.Array]]:
    """Of a case (rows, query heads, key heads, width, lengths of documents, …): q, k, v, do, and rows of documents."""
    T, H, K, C, lengths, *_ = case
    random = np.random.default_rng(0)
    return [on_device(random.normal(size=(T, heads, C)), dtype) for heads in (H, K, K, H)], rows_of(lengths, T)


def rows_of(lengths: Sequence[int], T: int) -> tuple[jax.Array, jax.Array]:
    """First row and end of each row's document; the rest of the rows is one more."""
    sizes = np.array([*lengths, T - sum(lengths)] if sum(lengths) < T else lengths, np.int32)
    ids = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    return _document_rows(ids, np.cumsum(sizes) - sizes, sizes)


@jax.jit
def definition(q, k, v, do, first):
    """o and the gradients, in float32."""
    q, k, v, do = (x.astype(jnp.float32) for x in (q, k, v, do))
    o, pullback = jax.vjp(lambda *x: _attention(*x, first), q, k, v)
    return o, *pullback(do)


def _attention(q_THC, k_TKC, v_TKC, first_T):
    """o[t] = Σ_s softmax_s(q[t]·k[s] / √C) v[s] over first[t] ≤ s ≤ t, with a full matrix of scores."""
    T, H, C = q_THC.shape
    group = H // k_TKC.shape[1]
    k, v = jnp.repeat(k_TKC, group, 1), jnp.repeat(v_TKC, group, 1)
    row = jnp.arange(T)
    visible = (row <= row[:, None]) & (row >= first_T[:, None])
    s = jnp.einsum("thc,shc->hts", q_THC, k, precision="highest") * C**-0.5
    p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), -1)
    return jnp.einsum("hts,shc->thc", p, v, precision="highest")
