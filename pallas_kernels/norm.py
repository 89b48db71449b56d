"""Root-mean-square norm as a pure function, alone or together with the residual addition before it.

T rows · D width
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import interprets, is_hopper
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.triton.norm import norm_backward, norm_forward

NormImplementation = Literal["xla", "pallas_triton"]
MIN_SIZE = 2**22  # smaller arrays stay in the L2 cache: nothing to save


def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, implementation: NormImplementation | None = None
) -> jax.Array:
    """Normalises the last axis in float32 and casts back.

    y = weight · x / sqrt(mean(x²) + eps)

    Backward keeps x and one number per row.

    Args:
        x: [..., D], floating.
        weight: [D], floating, of any width; frozen as a rule (its gradient costs nothing unless somebody asks for it).
        implementation: None takes the one that measured fastest.
    Returns:
        [..., D] in the dtype of x.
    Raises:
        ValueError: shapes or dtypes do not fit, or the implementation is unknown.

    Example:
        >>> rms_norm(jnp.full((1, 4), 2.0), jnp.ones(4), eps=0.0).tolist()
        [[1.0, 1.0, 1.0, 1.0]]
    """
    (y,) = _flat(x, None, weight, eps, implementation)
    return y


def add_rms_norm(
    x: jax.Array,
    delta: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    implementation: NormImplementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds and normalises: (s, y) with s = x + delta and y = rms_norm(s).

    Args:
        x, delta: [..., D], of one shape and one floating dtype, in which s is rounded before it is normalised.
        weight, implementation: as in `rms_norm`.
    Returns:
        s and y, both with the shape and dtype of x.
    Raises:
        ValueError: shapes or dtypes do not fit, or the implementation is unknown.

    Example:
        >>> s, y = add_rms_norm(jnp.ones((1, 4)), jnp.ones((1, 4)), jnp.ones(4), eps=0.0)
        >>> s.tolist(), y.tolist()
        ([[2.0, 2.0, 2.0, 2.0]], [[1.0, 1.0, 1.0, 1.0]])
    """
    s, y = _flat(x, delta, weight, eps, implementation)
    return s, y


def rms_norm_beside(
    x: jax.Array, weight: jax.Array, *, eps: float, implementation: NormImplementation | None = None
) -> tuple[jax.Array, jax.Array]:
    """(x, rms_norm(x)): the start of a residual branch. The two gradients of x are added in the norm's own pass.

    Args, Raises: as in `rms_norm`.
    Returns:
        x itself and its norm.

    Example:
        >>> x, y = rms_norm_beside(jnp.full((1, 4), 2.0), jnp.ones(4), eps=0.0)
        >>> x.tolist(), y.tolist()
        ([[2.0, 2.0, 2.0, 2.0]], [[1.0, 1.0, 1.0, 1.0]])
    """
    s, y = _flat(x, None, weight, eps, implementation, beside=True)
    return s, y


def _flat(x, delta, weight, eps, implementation, *, beside: bool = False):
    _check("add_rms_norm" if delta is not None else "rms_norm_beside" if beside else "rms_norm", x, delta, weight)
    chosen = implementation or ("pallas_triton" if _kernel_wins(x) else "xla")
    if chosen not in ("xla", "pallas_triton"):
        raise ValueError(f"implementation={chosen!r} is none of 'xla', 'pallas_triton'")
    delta, weight = vary_like(
        (delta, weight), x
    )  # outside of the rule, so that their gradients are summed over the mesh
    rows = (-1, x.shape[-1])
    delta = None if delta is None else delta.reshape(rows)
    outs = _norm(chosen, float(eps), beside, x.reshape(rows), delta, weight)
    return tuple(out.reshape(x.shape) for out in outs)


def _check(name: str, x: jax.Array, delta: jax.Array | None, weight: jax.Array) -> None:
    """Raises one ValueError that lists everything that does not fit: a kernel would read beyond a short array."""
    wrong = []
    if x.ndim == 0 or x.size == 0:
        wrong.append(f"x has shape {x.shape}, expected [..., D] with at least one element")
    elif weight.shape != x.shape[-1:]:
        wrong.append(f"weight has shape {weight.shape}, expected {x.shape[-1:]}, the last axis of x")
    wrong += [
        f"{what} is {array.dtype}, not a floating type"
        for what, array in (("x", x), ("weight", weight))
        if not jnp.issubdtype(array.dtype, jnp.floating)
    ]
    if delta is not None and (delta.shape, delta.dtype) != (x.shape, x.dtype):
        wrong.append(
            f"delta is {delta.dtype}{list(delta.shape)}, but x is {x.dtype}{list(x.shape)}: cast or broadcast it"
        )
    if wrong:
        raise ValueError(f"{name}: {'; '.join(wrong)}")


def _kernel_wins(x: jax.Array) -> bool:
    return is_hopper() and x.dtype in (jnp.bfloat16, jnp.float16) and x.size >= MIN_SIZE


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _norm(implementation, eps, beside, x, delta, weight):
    return _forward(implementation, eps, beside, x, delta, weight)[0]


def _forward(implementation, eps, beside, x, delta, weight):
    if implementation == "pallas_triton":
        *added, y, inverse = norm_forward(x, delta, weight, eps=eps, interpret=interprets())
    else:
        added = [] if delta is None else [x + delta]
        wide = (added[0] if added else x).astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)
        y = (wide * inverse[:, None] * weight.astype(jnp.float32)).astype(x.dtype)
    s = added[0] if added else x
    sums = [x] if beside else added
    return (*sums, y), (s, inverse, weight)


def _backward(implementation, eps, beside, residuals, cotangents):
    del eps  # unused: it is in `inverse`
    s, inverse, weight = residuals
    *ds, dy = cotangents
    ds = ds[0] if ds else None
    if implementation == "pallas_triton":
        dx = norm_backward(dy, ds, s, inverse, weight, interpret=interprets())
    else:
        unit, u = s.astype(jnp.float32) * inverse[:, None], dy.astype(jnp.float32) * weight.astype(jnp.float32)
        dx = inverse[:, None] * (u - unit * jnp.mean(unit * u, axis=-1, keepdims=True))
        dx = (dx if ds is None else dx + ds.astype(jnp.float32)).astype(s.dtype)
    # Dropped by the compiler where the base is frozen.
    dweight = jnp.sum(dy.astype(jnp.float32) * s.astype(jnp.float32) * inverse[:, None], axis=0).astype(weight.dtype)
    return dx, None if ds is None or beside else dx, dweight


_norm.defvjp(_forward, _backward)
