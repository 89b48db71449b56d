"""A layer's frozen weight in fewer bytes: its arrays, on one device or split over a mesh, and its products.

K in · N out
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType
from jaxtyping import Array, Float

from lorafusion_jax.errors import RunError
from lorafusion_jax.modules.product import Result
from lorafusion_jax.weights.table import StoredKind, stored_kind
from pallas_kernels.frozen_weight import (
    QuantisedWeight,
    dimensions_of,
    frozen_product,
    frozen_product_transposed,
    read_with,
)
from pallas_kernels.linear.api import frozen_linear
from pallas_kernels.linear.mesh.split_weight import per_element, weight_spec

type Words = tuple[tuple[str, str | None], ...]  # which dimensions the axes of each array follow, see `ArraySpec`


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("arrays",),
    meta_fields=("kind", "on_mesh", "shape", "dtype", "inside"),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """The stored arrays of one layer's weight, or of a stack of layers.

    Args:
        arrays: by name, after the stack's axes.
        kind: name of a stored kind, "nf4".
        on_mesh: whether the arrays are those that the kind has on a mesh.
        shape: shape of one layer's weight before it was stored.
        dtype: its dtype.
        inside: axes that the product sums over.
    """

    arrays: Mapping[str, Array]
    kind: str
    on_mesh: bool
    shape: tuple[int, ...]
    dtype: Any
    inside: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.arrays.values())

    @property
    def num_weights(self) -> int:
        """Weights of all layers of the stack."""
        name, array = next(iter(self._form.arrays(*self.matrix).items()))
        return math.prod(self.shape) * (self.arrays[name].size // math.prod(array.shape))

    @property
    def matrix(self) -> tuple[int, int]:
        """(K, N)."""
        inside = math.prod(self.shape[axis] for axis in self.inside)
        return inside, math.prod(self.shape) // inside

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """The type of the weight as its layer expects it; on explicit mesh axes, split as its product's result is."""
        plain = jax.ShapeDtypeStruct(self.shape, self.dtype)
        operand = self.operand()
        sharding = jax.typeof(jax.tree.leaves(operand)[0]).sharding
        if AxisType.Explicit not in sharding.mesh.axis_types or dimensions_of(operand) is None:
            return plain
        spec: list[Any] = [None] * self.ndim
        free = next(axis for axis in range(self.ndim) if axis not in self.inside)
        spec[free] = weight_spec(operand, lambda array: jax.typeof(array).sharding.spec)[1]
        return plain.update(sharding=sharding.update(spec=spec))

    def operand(self) -> QuantisedWeight:
        """The weight [K, N] as the ops take it.

        Raises:
            RunError: `lora.quantized-part`, the arrays hold another weight than one whole layer's.
        """
        form = self._form
        if form.operand is not None:
            operand = form.operand(self.arrays)
        else:
            words = tuple((name, array.dimensions) for name, array in form.arrays(*self.matrix).items())
            operand = DequantisedWeight(arrays=self.arrays, kind=form, words=words, matrix=self.matrix)
        if operand.shape != self.matrix:
            raise RunError(
                "lora.quantized-part",
                f"a stored weight {list(self.matrix)} was called with arrays of {list(operand.shape)}.",
                why="inside shard_map they are a part of it, outside of nnx.scan they are a stack of layers",
                fix="leave it whole in shard_map's in_specs, or let mesh axes split it without shard_map; call a stack "
                "inside nnx.scan or nnx.vmap",
            )
        return operand

    def multiply(self, x: Array, inside: tuple[int, ...], result: Result) -> Array:
        """The product of a layer without adapters: x [rows, contracted axes] → [rows, other axes]."""
        rows, operand = x.shape[: x.ndim - len(inside)], self.operand()
        y = frozen_linear(
            x.reshape(*rows, operand.shape[0]),
            operand,
            out_sharding=result.flat(len(rows)),
            preferred_element_type=None if result.dtype == x.dtype else result.dtype,
        )
        return result.place(y.reshape(*rows, *(size for axis, size in enumerate(self.shape) if axis not in inside)))

    @property
    def _form(self) -> StoredKind:
        return form_of(self.kind, on_mesh=self.on_mesh)


def form_of(name: str, *, on_mesh: bool) -> StoredKind:
    """A kind by its name, as it stores weights on one device or on a mesh."""
    kind = stored_kind(name)
    assert kind is not None
    return kind.on_mesh if on_mesh and kind.on_mesh is not None else kind


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("arrays",),
    meta_fields=("kind", "words", "matrix"),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class DequantisedWeight:
    """Dequantises in each product, so a backward pass holds the stored arrays and not the weight.

    Args:
        arrays: stored arrays, or those of a shard.
        kind: how they store the weight.
        words: which dimensions their axes follow.
        matrix: (K, N) of the whole weight.
    """

    arrays: Mapping[str, Any]
    kind: StoredKind
    words: Words
    matrix: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N) of what these arrays hold."""
        for name, text in self.words if self._is_splittable else ():
            sizes = zip((text or "").split(), self.arrays[name].shape, strict=False)  # a stack is no weight
            dimensions = {word[0]: per_element(word) * size for word, size in sizes}
            if {"k", "n"} <= dimensions.keys():
                return dimensions["k"], dimensions["n"]
        return self.matrix

    @property
    def ndim(self) -> int:
        return 2

    def dense(self, dtype: Any) -> Float[Array, "K N"]:
        """W."""
        return self.kind.dequantise(self.arrays, dtype)

    def multiply(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        """x W."""
        x, arrays = read_with(x, dict(self.arrays))
        return frozen_product(x, self.kind.dequantise(arrays, x.dtype))

    def multiply_transposed(self, dy: Float[Array, "*B N"]) -> Float[Array, "*B K"]:
        """dY W^T."""
        dy, arrays = read_with(dy, dict(self.arrays))
        return frozen_product_transposed(dy, self.kind.dequantise(arrays, dy.dtype))

    def dimensions(self) -> DequantisedWeight | None:
        """See `SplittableWeight`."""
        return replace(self, arrays=dict(self.words)) if self._is_splittable else None

    @property
    def _is_splittable(self) -> bool:
        return all(text is not None for _, text in self.words)
