"""Root-mean-square norm as a pure function, optionally fused with the preceding residual addition.

T rows · D width
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import config_store, policy
from pallas_kernels.device import device_kind, interprets, is_hopper
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.policy import NormImplementation

# The custom_vjp of the norm. Residuals are the rows and one number per row.
#
# T rows · D width

_HOMES: dict[NormImplementation, str] = {
    "xla": "pallas_kernels.norm.xla",
    "pallas_triton": "pallas_kernels.norm.triton.norm",
}


@runtime_checkable
class NormBackend(Protocol):
    """Protocol of an implementation; see `norm.xla`."""

    def norm_forward(
        self, x: jax.Array, delta: jax.Array | None, weight: jax.Array, *, eps: float, interpret: bool
    ) -> tuple[jax.Array, ...]: ...

    def norm_backward(
        self,
        dy: jax.Array,
        ds: jax.Array | None,
        s: jax.Array,
        inverse: jax.Array,
        weight: jax.Array,
        *,
        interpret: bool,
    ) -> jax.Array: ...  # fmt: skip


def load(name: str) -> NormBackend:
    """Returns an implementation.

    Raises:
        ValueError: unknown name.
    """
    if name not in _HOMES:
        raise ValueError(f"implementation={name!r} is none of {', '.join(map(repr, _HOMES))}")
    return cast(NormBackend, importlib.import_module(_HOMES[name]))


@functools.cache
def load_available(name: NormImplementation) -> NormBackend:
    """Returns an implementation, or XLA's if this version of jax cannot import the kernel."""
    try:
        return load(name)
    except ImportError as missing:
        warnings.warn(
            f"norms run as plain XLA and are slower: their kernel cannot be imported ({missing})", stacklevel=2
        )
        return load("xla")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def apply(backend: NormBackend, eps: float, with_residual: bool, x, delta, weight):
    """Returns (sum or x, y), or only y if neither was requested."""
    return _forward(backend, eps, with_residual, x, delta, weight)[0]


def _forward(backend: NormBackend, eps: float, with_residual: bool, x, delta, weight):
    *added, y, inverse = backend.norm_forward(x, delta, weight, eps=eps, interpret=interprets())
    s = added[0] if added else x
    sums = [x] if with_residual else added
    return (*sums, y), (s, inverse, weight)


def _backward(backend: NormBackend, eps: float, with_residual: bool, residuals, cotangents):
    del eps  # unused: included in `inverse`
    s, inverse, weight = residuals
    *ds, dy = cotangents
    ds = ds[0] if ds else None
    dx = backend.norm_backward(dy, ds, s, inverse, weight, interpret=interprets())
    # Removed by the compiler if the base is frozen.
    dweight = jnp.sum(dy.astype(jnp.float32) * s.astype(jnp.float32) * inverse[:, None], axis=0).astype(weight.dtype)
    return dx, None if ds is None or with_residual else dx, dweight


apply.defvjp(_forward, _backward)


def rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, " D"], *, eps: float,
    implementation: NormImplementation | None = None,
) -> Float[Array, "*B D"]:  # fmt: skip
    """Normalises the last axis in float32 and casts back.

    y = weight · x / sqrt(mean(x²) + eps)

    The residuals are x and one number per row.

    Args:
        x: [..., D], floating.
        weight: [D], floating, of any width. It is usually frozen; its gradient is only computed if it is used.
        implementation: None selects the fastest measured one.
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
    x: Float[Array, "*B D"],
    delta: Float[Array, "*B D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    implementation: NormImplementation | None = None,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """Returns (s, y) with s = x + delta and y = rms_norm(s).

    Args:
        x, delta: [..., D], of equal shape and floating dtype. s is rounded to this dtype before it is normalised.
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


def rms_norm_with_residual(
    x: Float[Array, "*B D"], weight: Float[Array, " D"], *, eps: float,
    implementation: NormImplementation | None = None,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:  # fmt: skip
    """Returns (x, rms_norm(x)), the start of a residual branch. Backward adds the two gradients of x in its kernel.

    Args, Raises: as in `rms_norm`.
    Returns:
        x itself and its norm.

    Example:
        >>> x, y = rms_norm_with_residual(jnp.full((1, 4), 2.0), jnp.ones(4), eps=0.0)
        >>> x.tolist(), y.tolist()
        ([[2.0, 2.0, 2.0, 2.0]], [[1.0, 1.0, 1.0, 1.0]])
    """
    s, y = _flat(x, None, weight, eps, implementation, with_residual=True)
    return s, y


def _flat(x, delta, weight, eps, implementation, *, with_residual: bool = False):
    name = "add_rms_norm" if delta is not None else "rms_norm_with_residual" if with_residual else "rms_norm"
    _check(name, x, delta, weight)
    backend = _select(x, implementation)
    # outside the custom_vjp, so that their gradients are summed over the mesh
    delta, weight = vary_like((delta, weight), x)
    rows = (-1, x.shape[-1])
    delta = None if delta is None else delta.reshape(rows)
    outs = apply(backend, float(eps), with_residual, x.reshape(rows), delta, weight)
    return tuple(out.reshape(x.shape) for out in outs)


def _select(x: jax.Array, implementation: str | None) -> NormBackend:
    if implementation is not None:
        return load(implementation)
    width, measured = x.shape[-1], functools.partial(config_store.fastest, device_kind())
    sizes = {"rows": x.size // width, "width": width, "dtype": str(x.dtype)}
    return load_available(policy.preferred_norm(**sizes, hopper=is_hopper(), measured=measured))


def _check(name: str, x: jax.Array, delta: jax.Array | None, weight: jax.Array) -> None:
    """Raises a ValueError with all mismatches, because a kernel would read out of bounds."""
    wrong = []
    if x.ndim == 0 or x.size == 0:
        wrong.append(f"x has shape {x.shape}, expected [..., D] with at least one element")
    elif weight.shape != x.shape[-1:]:
        wrong.append(f"weight has shape {weight.shape}, expected {x.shape[-1:]}, the last axis of x")
    wrong += [
        f"{operand} is {array.dtype}, not a floating type"
        for operand, array in (("x", x), ("weight", weight))
        if not jnp.issubdtype(array.dtype, jnp.floating)
    ]
    if delta is not None and (delta.shape, delta.dtype) != (x.shape, x.dtype):
        wrong.append(
            f"delta is {delta.dtype}{list(delta.shape)}, but x is {x.dtype}{list(x.shape)}: cast or broadcast it"
        )
    if wrong:
        raise ValueError(f"{name}: {'; '.join(wrong)}")
