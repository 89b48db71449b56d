"""Computes what a projection needs of its adapters, of one or several kinds: A, B and factors of the output's columns.

A adapters, or places for the adapters of a microbatch · K in · N out · R padded rank · C columns of A
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from lorafusion_jax.adapters.kind import AdapterKind, Leaf, Sizes
from lorafusion_jax.adapters.table import adapter_kind, leaves_of
from pallas_kernels.frozen_weight import FrozenWeight, dense

NO_KIND = -1  # number of the kind of an adapter that does not target the projection


class Bank(NamedTuple):
    """The adapters of a projection.

    Attributes:
        a_AKC, b_ACN: the low-rank pairs.
        f_AN: factors of the output's columns; None: no kind has any.
        scaled_A: whether an adapter has factors.
    """

    a_AKC: Float[Array, "A K C"]
    b_ACN: Float[Array, "A C N"]
    f_AN: Float[Array, "A N"] | None = None
    scaled_A: Array | None = None

    def finish(
        self, y: Float[Array, "*B N"], tile_adapter: Integer[Array, " tiles"], bias: Float[Array, " N"] | None
    ) -> Float[Array, "*B N"]:
        """Multiplies the columns of each tile of y by its adapter's factors and adds the bias."""
        if self.f_AN is None or self.scaled_A is None:
            return y
        y = scale_columns(y, self.f_AN, self.scaled_A, tile_adapter)
        return y if bias is None else y + bias


def kind_numbers(names: Sequence[str], kinds: Sequence[str | None]) -> np.ndarray | None:
    """Numbers the adapters' kinds, int32 [A]; None if all are of one kind that has no column factors.

    Args:
        names: kinds, each once.
        kinds: of each adapter; None: it does not target the projection.
    """
    if len(names) <= 1 and not any(adapter_kind(name).column_scale for name in names):
        return None
    return np.array([NO_KIND if kind is None else names.index(kind) for kind in kinds], np.int32)


def make_bank(
    names: Sequence[str],
    number_A: Integer[Array, " A"] | np.ndarray | None,
    leaves: Mapping[str, Any],
    *,
    shape: tuple[int, int],
    rank: int,
    scale_A: Float[Array, " A"],
    kernel: FrozenWeight,
    dtype: Any,
) -> Bank:
    """Computes A, B and column factors. Each kind gets only the tensors of its own adapters.

    So NaN in an adapter of one kind affects neither values nor gradients of another. For plain LoRA, A and B are the
    leaves themselves.

    Args:
        names: kinds, each once.
        number_A: kind of each adapter, see `kind_numbers`; may be traced.
        leaves: by name, [A, ...]. Shared ones may have more rows and columns than the projection.
        shape: (K, N).
        rank: R.
        scale_A: factor of each adapter's low-rank product.
        kernel: [K, N].
        dtype: in which kinds with `column_scale` get the kernel.
    """
    known = {leaf.name: leaf for leaf in leaves_of(names)}
    leaves = {name: _of_projection(known[name], array, shape) for name, array in leaves.items() if name in known}
    made = []
    for number, name in enumerate(names):
        kind = adapter_kind(name)
        # Select before and after, so that neither values nor gradients of other kinds pass through this one.
        tensors = {leaf.name: _where(number_A, number, leaves[leaf.name], 0.0) for leaf in kind.leaves}
        made.append(_of_kind(kind, tensors, (*shape, rank), scale_A, kernel, dtype))
    if number_A is None:
        return made[0]
    columns = max(pair.a_AKC.shape[2] for pair in made)
    a, b = jnp.zeros((), made[0].a_AKC.dtype), jnp.zeros((), made[0].b_ACN.dtype)
    f, scaled = jnp.ones(()), jnp.zeros((), bool)
    for number, pair in enumerate(made):
        wide = [(0, 0), (0, 0), (0, columns - pair.a_AKC.shape[2])]
        a = _where(number_A, number, jnp.pad(pair.a_AKC, wide), a)
        b = _where(number_A, number, jnp.pad(pair.b_ACN, [wide[0], wide[2], wide[1]]), b)
        if pair.f_AN is not None:
            f, scaled = _where(number_A, number, pair.f_AN, f), scaled | (number_A == number)
    return Bank(a, b, f, scaled) if f.ndim else Bank(a, b)


def start_bank(
    names: Sequence[str],
    number_A: np.ndarray | None,
    leaves: Mapping[str, Array],
    kernel: FrozenWeight,
    *,
    shape: tuple[int, int],
    rank: int,
    scales: Sequence[float],
) -> dict[str, Array]:
    """Replaces the initial values that depend on the kernel, see `AdapterKind.start`; arguments as in `make_bank`."""
    started = dict(leaves)
    for number, name in enumerate(names):
        kind = adapter_kind(name)
        if kind.start is None:
            continue
        for index, scale in enumerate(scales):
            if number_A is not None and number_A[index] != number:
                continue
            tensors = {leaf.name: _of_projection(leaf, leaves[leaf.name][index], shape) for leaf in kind.leaves}
            for key, array in start_tensors(kind, kernel, tensors, (*shape, rank), scale).items():
                started[key] = started[key].at[index].set(array)
    return started


def start_tensors(
    kind: AdapterKind, kernel: FrozenWeight, tensors: Mapping[str, Array], size: tuple[int, int, int], scale: Any
) -> dict[str, Array]:
    """Returns the tensors of one adapter whose initial values depend on the kernel."""
    assert kind.start is not None
    sizes = Sizes(K=size[0], N=size[1], R=size[2], scale=scale, np=jnp)
    return dict(kind.start(dense(kernel, jnp.float32), tensors, sizes))


def scale_columns(
    y: Float[Array, "*B N"],
    f_AN: Float[Array, "A N"],
    scaled_A: Array,
    tile_adapter: Integer[Array, " tiles"],
) -> Float[Array, "*B N"]:
    """Multiplies the columns of each tile's rows by its adapter's factors. Rows of other adapters stay bitwise."""
    index, mine = jnp.maximum(tile_adapter, 0), tile_adapter >= 0
    y = checkpoint_name(y, "unscaled")
    tiles_y = y.reshape(len(tile_adapter), -1, y.shape[-1])
    f = rows_of(f_AN, tile_adapter)[:, None]
    scaled = (tiles_y.astype(f.dtype) * f).astype(y.dtype)
    return jnp.where((scaled_A[index] & mine)[:, None, None], scaled, tiles_y).reshape(y.shape)


@jax.custom_vjp
def rows_of(values_A: Array, owner: Array) -> Array:
    """Returns the values [A, ...] of each owner; those of the first one for an owner below 0.

    Gradients are selected, never multiplied, and summed in order of the owners, without atomics.
    """
    return values_A[jnp.maximum(owner, 0)]


def _rows_fwd(values_A: Array, owner: Array) -> tuple[Array, tuple[Array, Array]]:
    return rows_of(values_A, owner), (values_A, owner)


def _rows_bwd(kept: tuple[Array, Array], slope: Array) -> tuple[Array, None]:
    values_A, owner = kept
    mine = (owner == jnp.arange(len(values_A))[:, None]).reshape(len(values_A), len(owner), *(1,) * (slope.ndim - 1))
    return jnp.where(mine, slope, 0.0).sum(1).astype(values_A.dtype), None


rows_of.defvjp(_rows_fwd, _rows_bwd)


def _of_kind(
    kind: AdapterKind,
    tensors: dict[str, Any],
    size: tuple[int, int, int],
    scale_A: Array,
    kernel: FrozenWeight,
    dtype: Any,
) -> Bank:
    constant = {leaf.name for leaf in kind.leaves if not leaf.trainable}
    tensors = {name: lax.stop_gradient(array) if name in constant else array for name, array in tensors.items()}

    def sizes(scale: Any) -> Sizes:
        return Sizes(K=size[0], N=size[1], R=size[2], scale=scale, np=jnp)

    a, b = jax.vmap(lambda tensors, scale: kind.low_rank(tensors, sizes(scale)))(tensors, scale_A)
    if kind.column_scale is None:
        return Bank(a, b)
    column_scale = kind.column_scale
    w_KN = lax.stop_gradient(dense(kernel, dtype))
    f = jax.vmap(lambda tensors, scale: column_scale(w_KN, tensors, sizes(scale)))(tensors, scale_A)
    return Bank(a, b, f)


def _of_projection(leaf: Leaf, array: Any, shape: tuple[int, int]) -> Any:
    return leaf.cut(array, {"K": shape[0], "N": shape[1]}) if leaf.shared else array


def _where(number_A: Any, number: int, values: Any, other: Any) -> Any:
    if number_A is None:
        return values
    return jnp.where((number_A == number).reshape(-1, *(1,) * (values.ndim - 1)), values, other)
