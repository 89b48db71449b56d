"""The custom_vjp of the norm. Residuals are the rows and one number per row.

T rows · D width
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels.device import interprets
from pallas_kernels.policy import NormImplementation

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
