"""Packed causal attention behind one call, isolated between segments.

Dims: `T` packed tokens · `H` heads · `K` key heads, H a multiple · `C` head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .attention_cudnn import cudnn_backward, cudnn_forward, on_hopper_or_later, why_not
from .attention_kept import kept
from .attention_pallas import pallas_backward, pallas_forward
from .attention_xla import xla_backward, xla_forward
from .segments import Segments

AttentionImplementation = Literal["xla", "cudnn", "pallas_mosaic_gpu"]


def attention(
    q: Float[Array, "T H C"],
    k: Float[Array, "T K C"],
    v: Float[Array, "T K C"],
    segments: Segments,
    *,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "T H C"]:
    """Attends to the earlier rows of the same segment; groups of H / K query heads share a key head.

    o[t] = Σ_s softmax_s(q[t]·k[s] / √C) v[s],  s ≤ t, segment(s) = segment(t).

    A NaN or infinity in a segment reaches the rows of that segment and no others, forward and backward. A product
    with a zero weight would spread it (0 · NaN = NaN), so bad values are cut out before the kernel and come back as
    NaN in the rows that depend on them.

    What backward needs is named "attention" (see `attention_kept`), for rematerialisation policies.

    Args:
        implementation: "cudnn" (Hopper or later, bfloat16 or float16), "xla" (everywhere), None = the faster one that
            serves these inputs.
    Raises:
        NotImplementedError: "cudnn" was asked for and cannot serve these inputs.

    Example:
        >>> x = jnp.ones((8, 2, 16))
        >>> attention(x, x[:, :1], x[:, :1], Segments.from_lengths([3, 5], 8)).shape
        (8, 2, 16)
    """
    return _isolated(implementation or default_implementation(q), q, k, v, segments)


def default_implementation(q: jax.Array) -> AttentionImplementation:
    """The fastest implementation for this device, dtype and head width."""
    return "cudnn" if not why_not(q) and on_hopper_or_later() else "xla"


# forward: (q, k, v, segments) -> o and what backward needs; backward: (that, do) -> dq, dk, dv.
_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "xla": (xla_forward, xla_backward),
    "cudnn": (cudnn_forward, cudnn_backward),
    "pallas_mosaic_gpu": (pallas_forward, pallas_backward),
}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _isolated(implementation, q, k, v, segments):
    return _isolated_fwd(implementation, q, k, v, segments)[0]


def _isolated_fwd(implementation, q, k, v, segments):
    if implementation not in _KERNELS:
        raise ValueError(f"implementation={implementation!r} is none of {', '.join(map(repr, _KERNELS))}")
    bad_q, bad_kv = kept((_bad_rows(q), _bad_rows(k) | _bad_rows(v)))
    o, residuals = _KERNELS[implementation][0](_clean(q), _clean(k), _clean(v), segments)
    o = _poison(o, bad_q | _reached(bad_kv, segments.ids))
    return o, (residuals, bad_q | bad_kv, segments.ids)


def _isolated_bwd(implementation, everything, do):
    residuals, bad, ids = everything
    grads = _KERNELS[implementation][1](residuals, _clean(do))
    # A bad row spoils the gradients of its whole segment: queries after it, keys before it, and through them the rest.
    spoiled = _whole_segment(bad | _bad_rows(do), ids)
    return *(_poison(grad, spoiled) for grad in grads), None


_isolated.defvjp(_isolated_fwd, _isolated_bwd)


def _bad_rows(x_THC: jax.Array) -> jax.Array:
    return ~jnp.isfinite(x_THC).all(axis=(1, 2))


def _clean(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _poison(x_THC: jax.Array, bad_T: jax.Array) -> jax.Array:
    return jnp.where(bad_T[:, None, None], jnp.asarray(jnp.nan, x_THC.dtype), x_THC)


def _reached(bad_T: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Rows at or after a bad row of their segment: ids rise, so the last bad row's id tells."""
    return lax.cummax(jnp.where(bad_T, jnp.asarray(ids_T), -1)) == ids_T


def _whole_segment(bad_T: jax.Array, ids_T: jax.Array) -> jax.Array:
    after = _reached(bad_T, ids_T)
    top = jnp.iinfo(jnp.int32).max
    before = lax.cummin(jnp.where(bad_T, jnp.asarray(ids_T), top), reverse=True) == ids_T
    return after | before
