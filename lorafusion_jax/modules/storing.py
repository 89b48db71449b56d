"""Stores a frozen weight in fewer bytes where it lies: on one device, or split over a mesh.

K in · N out
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules.linear import Linear
from lorafusion_jax.modules.stored_weight import StoredWeight, form_of
from lorafusion_jax.weights.table import StoredKind
from pallas_kernels.linear.mesh.split_weight import Axes, per_element, spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Mesh axes of a weight: of every axis of its stack, of its in and of its out features."""

    mesh: Mesh
    stack: tuple[Axes, ...]
    k: Axes
    n: Axes

    def specs(self, form: StoredKind, product: Linear) -> dict[str, P]:
        """Partition specs of the stored arrays of one layer, by name."""
        arrays = form.arrays(product.in_features, product.out_features)
        return {name: spec_of(array.dimensions or "", self.k, self.n) for name, array in arrays.items()}


def check_mesh(weight: Array, product: Linear, stack: int, kind: str, where: str) -> None:
    """Checks that a weight can be stored on the mesh where it lies, if it lies on one.

    Raises:
        ConfigError: `lora.quantize-mesh`.
    """
    if not _is_on_mesh(weight):
        return
    form, sizes = form_of(kind, on_mesh=True), (product.in_features, product.out_features)
    dimensions = [array.dimensions for array in form.arrays(*sizes).values()]
    if None in dimensions:
        raise _refused(where, f"the arrays of {kind} do not follow the axes of a weight", "fp8, int8 or nf4")
    if reason := form.unsupported_reason(*sizes):
        raise _refused(where, reason, "fp8 or int8")
    if not _is_split(weight):
        return
    if not isinstance(weight.sharding, NamedSharding):
        fix = "jax.device_put(weight, NamedSharding(mesh, PartitionSpec(…)))"
        raise _refused(where, f"its sharding is a {type(weight.sharding).__name__}", fix)
    _check_axes(weight, product, stack, where)
    placement = _placement(weight, product, stack)
    words = [word for text in dimensions for word in (text or "").split()]
    for letter, size, axes in (("k", sizes[0], placement.k), ("n", sizes[1], placement.n)):
        block = max((per_element(word) for word in words if word[0] == letter), default=1)
        devices = math.prod(placement.mesh.shape[axis] for axis in axes)
        if axes and size % (block * devices):
            feature = "in" if letter == "k" else "out"
            why = f"{devices} devices of {_named(axes)} share {size} {feature} features, which cuts blocks of {block}"
            raise _refused(where, why, f"fp8 or int8, or split its {'out' if letter == 'k' else 'in'} features")


def store(weight: Array, product: Linear, stack: int, kind: str) -> StoredWeight:
    """Stores a weight with `stack` leading axes of layers, which are converted one after another."""
    form = form_of(kind, on_mesh=(on_mesh := _is_on_mesh(weight)))
    placement = _placement(weight, product, stack) if _is_split(weight) else None
    if placement is None:
        arrays = _convert(weight, product, stack, form)
    else:
        arrays = _convert_on_mesh(weight, product, stack, form, placement)
    return StoredWeight(
        arrays=arrays, kind=kind, on_mesh=on_mesh, shape=product.shape, dtype=weight.dtype, inside=product.inside
    )


def _convert(
    weight: Array, product: Linear, stack: int, form: StoredKind, shardings: dict[str, NamedSharding] | None = None
) -> dict[str, Array]:
    inside, free = _orders(product)
    order = [*range(stack), *(stack + axis for axis in (*inside, *free))]
    kernels = jnp.transpose(weight, order).reshape(-1, product.in_features, product.out_features)
    quantise = _quantiser(form, None if shardings is None else tuple(sorted(shardings.items())))
    layers = [quantise(kernel) for kernel in kernels]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves).reshape(*weight.shape[:stack], *leaves[0].shape), *layers)


@functools.cache  # equal weights of a model are traced and compiled once
def _quantiser(
    form: StoredKind, shardings: tuple[tuple[str, NamedSharding], ...] | None
) -> Callable[[Array], dict[str, Array]]:
    def quantise(kernel: Array) -> dict[str, Array]:
        return dict(form.quantise(kernel.astype(jnp.float32)))

    return jax.jit(quantise, out_shardings=None if shardings is None else dict(shardings))


def _convert_on_mesh(
    weight: Array, product: Linear, stack: int, form: StoredKind, placement: Placement
) -> dict[str, Array]:
    """On automatic axes, so that XLA splits the conversion: its results do not depend on how it does."""
    mesh, specs = Mesh(placement.mesh.devices, placement.mesh.axis_names), placement.specs(form, product)
    with jax.set_mesh(mesh):
        weight = jax.device_put(weight, NamedSharding(mesh, P(*_axes(weight))))
        shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        arrays = _convert(weight, product, stack, form, shardings)
    return {
        name: jax.device_put(array, NamedSharding(placement.mesh, P(*placement.stack, *specs[name])))
        for name, array in arrays.items()
    }


def _is_split(weight: Array) -> bool:
    return len(weight.sharding.device_set) > 1


def _is_on_mesh(weight: Array) -> bool:
    """Whether its products run on a mesh: it lies there, or there is one in scope."""
    return _is_split(weight) or jax.sharding.get_abstract_mesh().size > 1


def _placement(weight: Array, product: Linear, stack: int) -> Placement:
    axes, (inside, free) = _axes(weight), _orders(product)
    assert isinstance(weight.sharding, NamedSharding)
    mesh = weight.sharding.mesh
    assert isinstance(mesh, Mesh)  # that of a concrete array
    return Placement(mesh=mesh, stack=axes[:stack], k=axes[stack + inside[0]], n=axes[stack + free[0]])


def _check_axes(weight: Array, product: Linear, stack: int, where: str) -> None:
    """Checks that in and out features are split in one piece for each device."""
    axes = _axes(weight)
    for order, features in zip(_orders(product), ("in", "out"), strict=True):
        for axis in order[1:]:
            if cut := axes[stack + axis]:
                why = f"axis {axis} of its weight lies on {_named(cut)}: no device has neighbouring {features} features"
                raise _refused(where, why, f"split axis {order[0]} instead")


def _orders(product: Linear) -> tuple[Sequence[int], Sequence[int]]:
    """Axes of the weight that make up K, and N."""
    return product.inside, [axis for axis in range(len(product.shape)) if axis not in product.inside]


def _axes(weight: Array) -> tuple[Axes, ...]:
    """Mesh axes of every axis of a weight."""
    assert isinstance(weight.sharding, NamedSharding)
    spec = weight.sharding.spec
    entries = (*spec, *(None,) * (weight.ndim - len(spec)))
    return tuple(() if e is None else e if isinstance(e, tuple) else (e,) for e in entries)


def _named(axes: Axes) -> str:
    return "mesh axis " + ", ".join(axes)


def _refused(where: str, why: str, fix: str) -> ConfigError:
    return ConfigError(
        "lora.quantize-mesh", "this weight cannot be quantised on a mesh.", where=where, why=why, fix=fix
    )
