"""What a frozen weight must offer to the ops in place of an array, and the two products of either.

T packed tokens · K in features · N out features
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.exact import precision_of


@runtime_checkable
class QuantisedWeight(Protocol):
    """A frozen [K, N] weight that multiplies without becoming an array first: a pytree, and constant for gradients.

    `shape` is (K, N) and `ndim` is 2, whatever its arrays look like.
    """

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def ndim(self) -> int: ...

    def multiply(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        """x W in the type of x. A row of the result depends on that row of x only."""
        ...

    def multiply_transposed(self, dy: Float[Array, "*B N"]) -> Float[Array, "*B K"]:
        """dY W^T in the type of dY, row by row as well."""
        ...


@runtime_checkable
class SplittableWeight(QuantisedWeight, Protocol):
    """A quantised weight whose arrays can lie on a mesh: each device multiplies by its own part."""

    def dimensions(self) -> Any:
        """Which dimension of the weight each axis of each array follows; None if the weight cannot be split.

        The same pytree with a text for every array, a word per axis: "n" out features, "k" in features, "k/64" one
        element for 64 of them, "*" neither, so every device holds the whole axis. One array has both "n" and "k".
        """
        ...


@runtime_checkable
class DequantisableWeight(QuantisedWeight, Protocol):
    """A quantised weight that can become an array."""

    def dense(self, dtype: Any) -> Float[Array, "K N"]:
        """The values that it multiplies by."""
        ...


@runtime_checkable
class EightBitWeight(QuantisedWeight, Protocol):
    """W[k, n] = values[n, k] · scales[n], which multiplies rows of the same type."""

    @property
    def values(self) -> Float[Array, "N K"]: ...

    @property
    def scales(self) -> Float[Array, " N"]: ...

    def rounded_rows(self, x: Float[Array, "T K"]) -> tuple[Float[Array, "T K"], Float[Array, "T 1"]]:
        """x as it is multiplied, in the type of the values, and a scale of each row; in one launch on a GPU."""
        ...


type FrozenWeight = jax.Array | QuantisedWeight


def is_quantised(w: Any) -> bool:
    """Whether a weight multiplies by itself."""
    return isinstance(w, QuantisedWeight)


def dimensions_of(w: Any) -> Any:
    """A weight's dimensions, see `SplittableWeight`; None if it cannot be split."""
    return w.dimensions() if isinstance(w, SplittableWeight) else None


def dense(w: FrozenWeight, dtype: Any) -> Float[Array, "K N"]:
    """The values of a weight as an array; of a quantised one by a product with one, if it has no other way."""
    if isinstance(w, DequantisableWeight):
        return w.dense(dtype)
    return w.multiply(jnp.eye(w.shape[0], dtype=dtype)) if isinstance(w, QuantisedWeight) else w.astype(dtype)


def read_with(rows: Any, stored: Any) -> tuple[Any, Any]:
    """The rows and the arrays of weights that they multiply, neither there before the other.

    Nothing else holds XLA from turning back or gathering all weights of a model once, for forward and backward, and
    keeping them all: as many bytes as if nothing were stored in fewer, or on several devices.
    """
    return lax.optimization_barrier((rows, stored))


def frozen_product(x: Float[Array, "*B K"], w: FrozenWeight, dtype: Any = None) -> Float[Array, "*B N"]:
    """x W in the type of x, unless another is asked for: a float32 result of a half type doubles the bytes written."""
    dtype = x.dtype if dtype is None else dtype
    if isinstance(w, QuantisedWeight):
        return _quantised_product(x, w).astype(dtype)
    return jnp.matmul(x, w.astype(x.dtype), precision=precision_of(x.dtype), preferred_element_type=dtype)


@jax.custom_vjp
def _quantised_product(x: jax.Array, w: QuantisedWeight) -> jax.Array:
    """Rounding has no slope of use, so the gradient is that of the product by the values."""
    return w.multiply(x)


_quantised_product.defvjp(lambda x, w: (w.multiply(x), w), lambda w, dy: (w.multiply_transposed(dy), None))


def frozen_product_transposed(dy: Float[Array, "*B N"], w: FrozenWeight) -> Float[Array, "*B K"]:
    """dY W^T in the type of dY."""
    if isinstance(w, QuantisedWeight):
        return w.multiply_transposed(dy)
    return jnp.matmul(dy, w.astype(dy.dtype).T, precision=precision_of(dy.dtype))
