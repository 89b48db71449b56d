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
from lorafusion_jax.adapters.table import adapter_kind, leaves_of, prepared_by
from pallas_kernels.frozen_weight import FrozenWeight, dense

NO_KIND = -1  # number of the kind of an adapter that does not target the projection


class Bank(NamedTuple):
    """The adapters of a projection.

    Attributes:
        a_AKC, b_ACN: the low-rank pairs.
        f_AN: factors of the output's columns; None: no kind has any.
        scaled_A: whether an adapter has factors.
        g_AN, shifted_A: the same for what is added to the columns.
    """

    a_AKC: Float[Array, "A K C"]
    b_ACN: Float[Array, "A C N"]
    f_AN: Float[Array, "A N"] | None = None
    scaled_A: Array | None = None
    g_AN: Float[Array, "A N"] | None = None
    shifted_A: Array | None = None

    def finish(
        self,
        y: Float[Array, "*B N"],
        tile_adapter: Integer[Array, " tiles"] | np.ndarray,
        bias: Float[Array, " N"] | None,
        dropped: Float[Array, "*B N"] | None = None,
    ) -> Float[Array, "*B N"]:
        """Applies what each tile's adapter does to the columns of y, and adds the bias if factors come before it.

        Args:
            dropped: (drop(x) - x) W, to which factors less 1 apply (None: there is no dropout).
        """
        if self.f_AN is not None and self.scaled_A is not None:
            y = scale_columns(y, self.f_AN, self.scaled_A, tile_adapter, dropped)
            y = y if bias is None else y + bias
        if self.g_AN is not None and self.shifted_A is not None:
            y = shift_columns(y, self.g_AN, self.shifted_A, tile_adapter)
        return y

    def tile_factors(self, tile_adapter: Integer[Array, " tiles"] | np.ndarray) -> Float[Array, "tiles N"]:
        """Factors of the columns of each tile's rows; 1 where its adapter has none. Float32."""
        if self.f_AN is None or self.scaled_A is None:
            return jnp.ones((len(tile_adapter), self.b_ACN.shape[2]))
        mine = self.scaled_A[jnp.maximum(tile_adapter, 0)] & (tile_adapter >= 0)
        return jnp.where(mine[:, None], rows_of(self.f_AN, tile_adapter), 1.0).astype(jnp.float32)


def kind_numbers(names: Sequence[str], kinds: Sequence[str | None]) -> np.ndarray | None:
    """Numbers the adapters' kinds, int32 [A]; None if all are of one kind that is a low-rank product.

    Args:
        names: kinds, each once.
        kinds: of each adapter; None: it does not target the projection.
    """
    if len(names) <= 1 and not any(adapter_kind(name).changes_columns for name in names):
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
    leaf_of = {leaf.name: leaf for leaf in (*leaves_of(names), *prepared_by(names))}
    leaves = {name: _of_projection(leaf_of[name], array, shape) for name, array in leaves.items() if name in leaf_of}
    parts = []
    for number, name in enumerate(names):
        kind = adapter_kind(name)
        # Select before and after, so that neither values nor gradients of other kinds pass through this one.
        tensors = {leaf.name: _where(number_A, number, leaves[leaf.name], 0.0) for leaf in kind.leaves}
        # 1, because kinds may divide by what they have prepared
        tensors |= {
            leaf.name: _where(number_A, number, leaves[leaf.name], 1.0) for leaf in kind.prepared if leaf.name in leaves
        }
        tensors, kind_rank = _at_one_rank(kind, tensors, rank)
        parts.append(_of_kind(kind, tensors, (*shape, kind_rank), scale_A, kernel, dtype))
    if number_A is None:
        return parts[0]
    columns = max(bank.a_AKC.shape[2] for bank in parts)
    a, b = jnp.zeros((), parts[0].a_AKC.dtype), jnp.zeros((), parts[0].b_ACN.dtype)
    f, scaled = jnp.ones(()), jnp.zeros((), bool)
    g, shifted = jnp.zeros(()), jnp.zeros((), bool)
    for number, bank in enumerate(parts):
        wide = [(0, 0), (0, 0), (0, columns - bank.a_AKC.shape[2])]
        a = _where(number_A, number, jnp.pad(bank.a_AKC, wide), a)
        b = _where(number_A, number, jnp.pad(bank.b_ACN, [wide[0], wide[2], wide[1]]), b)
        if bank.f_AN is not None:
            f, scaled = _where(number_A, number, bank.f_AN, f), scaled | (number_A == number)
        if bank.g_AN is not None:
            g, shifted = _where(number_A, number, bank.g_AN, g), shifted | (number_A == number)
    bank = Bank(a, b, f, scaled) if f.ndim else Bank(a, b)
    return bank._replace(g_AN=g, shifted_A=shifted) if g.ndim else bank


def start_bank(
    names: Sequence[str],
    number_A: np.ndarray | None,
    leaves: Mapping[str, Array],
    kernel: FrozenWeight,
    *,
    shape: tuple[int, int],
    ranks: Sequence[int],
    scales: Sequence[float],
) -> dict[str, Array]:
    """Replaces the initial values that depend on the kernel, see `AdapterKind.start`; arguments as in `make_bank`.

    Args:
        ranks, scales: of each adapter.
    """
    started = dict(leaves)
    for number, name in enumerate(names):
        kind = adapter_kind(name)
        if kind.start is None:
            continue
        for index, (rank, scale) in enumerate(zip(ranks, scales, strict=True)):
            if number_A is not None and number_A[index] != number:
                continue
            tensors = {
                leaf.name: leaf.at_rank(_of_projection(leaf, leaves[leaf.name][index], shape), rank)
                for leaf in kind.leaves
            }
            for key, array in start_tensors(kind, kernel, tensors, (*shape, rank), scale).items():
                corner = tuple(slice(size) for size in array.shape)
                started[key] = started[key].at[(index, *corner)].set(array)
    return started


def start_tensors(
    kind: AdapterKind, kernel: FrozenWeight, tensors: Mapping[str, Array], size: tuple[int, int, int], scale: Any
) -> dict[str, Array]:
    """Returns the tensors of one adapter whose initial values depend on the kernel."""
    assert kind.start is not None
    sizes = Sizes(K=size[0], N=size[1], R=size[2], scale=scale, np=jnp)
    return dict(kind.start(dense(kernel, jnp.float32), tensors, sizes))


def prepare_tensors(
    kind: AdapterKind, kernel: FrozenWeight, tensors: Mapping[str, Array], size: tuple[int, int, int], scale: Any,
    dtype: Any,
) -> dict[str, Array]:  # fmt: skip
    """Returns what a kind prepares for one adapter, see `AdapterKind.prepare`; float32."""
    assert kind.prepare is not None
    sizes = Sizes(K=size[0], N=size[1], R=size[2], scale=scale, np=jnp)
    prepared = kind.prepare(dense(kernel, dtype), tensors, sizes)
    return {leaf.name: prepared[leaf.name].astype(jnp.float32) for leaf in kind.prepared}


def scale_columns(
    y: Float[Array, "*B N"],
    f_AN: Float[Array, "A N"],
    scaled_A: Array,
    tile_adapter: Integer[Array, " tiles"] | np.ndarray,
    dropped: Float[Array, "*B N"] | None = None,
) -> Float[Array, "*B N"]:
    """Multiplies the columns of each tile's rows by its adapter's factors. Rows of other adapters stay bitwise.

    f y + (f - 1) dropped
    """
    index, mine = jnp.maximum(tile_adapter, 0), tile_adapter >= 0
    y = checkpoint_name(y, "unscaled")
    tiles_y = y.reshape(len(tile_adapter), -1, y.shape[-1])
    f = rows_of(f_AN, tile_adapter)[:, None]
    scaled = tiles_y.astype(f.dtype) * f
    if dropped is not None:
        scaled += (f - 1) * checkpoint_name(dropped, "unscaled").reshape(tiles_y.shape).astype(f.dtype)
    scaled = scaled.astype(y.dtype)
    return jnp.where((scaled_A[index] & mine)[:, None, None], scaled, tiles_y).reshape(y.shape)


def shift_columns(
    y: Float[Array, "*B N"],
    g_AN: Float[Array, "A N"],
    shifted_A: Array,
    tile_adapter: Integer[Array, " tiles"] | np.ndarray,
) -> Float[Array, "*B N"]:
    """Adds its adapter's numbers to the columns of each tile's rows. Rows of other adapters stay bitwise."""
    index, mine = jnp.maximum(tile_adapter, 0), tile_adapter >= 0
    tiles_y = y.reshape(len(tile_adapter), -1, y.shape[-1])
    g = rows_of(g_AN, tile_adapter)[:, None]
    shifted = (tiles_y.astype(g.dtype) + g).astype(y.dtype)
    return jnp.where((shifted_A[index] & mine)[:, None, None], shifted, tiles_y).reshape(y.shape)


@jax.custom_vjp
def rows_of(values_A: Array, owner: Array) -> Array:
    """Returns the values [A, ...] of each owner; those of the first one for an owner below 0.

    Gradients are selected, never multiplied, and summed in order of the owners, without atomics.
    """
    return values_A[jnp.maximum(owner, 0)]


def _rows_fwd(values_A: Array, owner: Array) -> tuple[Array, tuple[Array, Array]]:
    return rows_of(values_A, owner), (values_A, owner)


def _rows_bwd(residuals: tuple[Array, Array], slope: Array) -> tuple[Array, None]:
    values_A, owner = residuals
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
    constant = {leaf.name for leaf in (*kind.leaves, *kind.prepared) if not leaf.trainable}
    tensors = {name: lax.stop_gradient(array) if name in constant else array for name, array in tensors.items()}

    def sizes(scale: Any) -> Sizes:
        return Sizes(K=size[0], N=size[1], R=size[2], scale=scale, np=jnp)

    a, b = jax.vmap(lambda tensors, scale: kind.low_rank(tensors, sizes(scale)))(tensors, scale_A)
    bank = Bank(a, b)
    if kind.shift is not None:
        shift = kind.shift
        bank = bank._replace(g_AN=jax.vmap(lambda tensors, scale: shift(tensors, sizes(scale)))(tensors, scale_A))
    if kind.column_scale is None:
        return bank
    w_KN = lax.stop_gradient(dense(kernel, dtype))
    f = jax.vmap(lambda tensors, scale: kind.factors(w_KN, tensors, sizes(scale)))(tensors, scale_A)
    return bank._replace(f_AN=f)


def _at_one_rank(kind: AdapterKind, tensors: dict[str, Any], rank: int) -> tuple[dict[str, Any], int]:
    """Cuts the tensors of a kind to one rank: other kinds may have larger ones under the same names."""
    ranks = [tensors[leaf.name].shape[1 + leaf.axes.index("R")] for leaf in kind.leaves if "R" in leaf.axes]
    least = min(ranks, default=rank)
    if max(ranks, default=rank) == least:
        return tensors, least
    return tensors | {leaf.name: leaf.at_rank(tensors[leaf.name], least) for leaf in kind.leaves}, least


def _of_projection(leaf: Leaf, array: Any, shape: tuple[int, int]) -> Any:
    return leaf.cut(array, {"K": shape[0], "N": shape[1]}) if leaf.shared else array


def _where(number_A: Any, number: int, values: Any, other: Any) -> Any:
    if number_A is None:
        return values
    return jnp.where((number_A == number).reshape(-1, *(1,) * (values.ndim - 1)), values, other)
