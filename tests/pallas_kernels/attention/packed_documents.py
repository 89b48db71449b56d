"""Packed documents with random inputs, and what attention over them is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from host_arrays import on_device

from pallas_kernels.attention import document_rows
from pallas_kernels.attention.reference import attention_reference

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
    o, pullback = jax.vjp(lambda *x: attention_reference(*x, first), q, k, v)
    return o, *pullback(do)
