"""Keeps NaN and infinity inside their own segment, for attention kernels that do not.

A kernel multiplies other segments by zero weights, and 0 · NaN = NaN. So bad inputs are set to zero first, and the rows
that they affect are set to NaN afterwards. This costs extra passes over q, o, dO and dq.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lorafusion_jax.models.attention.checkpoint_names import checkpointed

ALL_PAIRS = 256  # rows of which every pair is compared: a cumulative maximum is four kernels of a program, this is one
Forward = Callable[..., tuple[jax.Array, Any]]  # q, k, v, segments, rule -> o [T, H·C], residuals
Backward = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]  # residuals, do [T, H, C], rule -> dq, dk, dv


def isolated(forward: Callable, backward: Backward) -> tuple[Forward, Backward]:
    """Wraps forward and backward so that segments are isolated; forward may also return [T, H, C]."""

    def isolated_forward(q, k, v, segments, rule, **sinks):
        bad_q, bad_kv = checkpointed((_bad_rows(q), _bad_rows(k) | _bad_rows(v)))
        o, residuals = forward(_zero_bad_values(q), _zero_bad_values(k), _zero_bad_values(v), segments, rule, **sinks)
        o = _fill_nan(o, bad_q | _affected_rows(bad_kv, segments.ids))
        return o.reshape(len(o), -1), (residuals, bad_q | bad_kv, segments.ids)

    def isolated_backward(everything, do, rule):
        residuals, bad, ids = everything
        dq, dk, dv = backward(residuals, _zero_bad_values(do), rule)
        # A bad row affects the gradients of its whole segment: later queries, earlier keys, and through them the rest.
        spoiled = _whole_segment(bad | _bad_rows(do), ids)
        return _fill_nan(dq, spoiled), _fill_nan(dk, spoiled), _fill_nan(dv, spoiled)

    return isolated_forward, isolated_backward


def _bad_rows(x_THC: jax.Array) -> jax.Array:
    return ~jnp.isfinite(x_THC).all(axis=(1, 2))


def _zero_bad_values(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _fill_nan(x_THC: jax.Array, bad_T: jax.Array) -> jax.Array:
    return jnp.where(bad_T[:, None, None], jnp.asarray(jnp.nan, x_THC.dtype), x_THC)


def _affected_rows(bad_T: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Rows at or after a bad row of their segment. Ids increase, so the id of the last bad row decides."""
    if len(bad_T) <= ALL_PAIRS:
        rows = jnp.arange(len(bad_T))
        return (bad_T & (ids_T[:, None] == ids_T) & (rows[:, None] >= rows)).any(1)
    return lax.cummax(jnp.where(bad_T, jnp.asarray(ids_T), -1)) == ids_T


def _whole_segment(bad_T: jax.Array, ids_T: jax.Array) -> jax.Array:
    if len(bad_T) <= ALL_PAIRS:
        return (bad_T & (ids_T[:, None] == ids_T)).any(1)
    after = _affected_rows(bad_T, ids_T)
    top = jnp.iinfo(jnp.int32).max
    before = lax.cummin(jnp.where(bad_T, jnp.asarray(ids_T), top), reverse=True) == ids_T
    return after | before
