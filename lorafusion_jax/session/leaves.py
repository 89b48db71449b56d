"""The arrays of adapters on a stage. Each leaf is one array, the adapters' columns without padding.

| name | where | array |
|---|---|---|
| `layers.self_attn.q_proj.lora_a` | a projection, in all layers of the stage that have it | [L, K, C] |
| `layers.self_attn.q_proj.column_norm` | what a kind prepares: follows from the others | [L, C, N] |
| `shared.NAME` | all projections of all layers; constant | [1, ...], on every stage |
| `head.OBJECTIVE.NAME.AXES` | the head of an objective | [1, C, ...], on the last stage |
| `tokens.embed`, `tokens.head` | trained rows of the embedding, of the head | [1, D, C], on the first, the last stage |

An adapter has as many columns of a leaf as its rank, or its trainable tokens, and none of a leaf that it does not have.
A of a projection is [L, K, C] and B is [L, C, N], where C is the sum of the ranks of its adapters. A leaf with two axes
R is [L, C, W]: columns on the first, padded to the largest rank W on the second. A leaf without one is [L, C, ...], and
every adapter has one column of it. Programs get the column offsets as data, so adapters of equal shapes share programs.

A adapters · L layers · R replicas · C columns · P places for the adapters of a microbatch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from lorafusion_jax.adapters.kind import Leaf
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.adapters.tokens import LEAVES as TOKEN_LEAVES
from lorafusion_jax.adapters.tokens import TABLES, Table
from lorafusion_jax.layout.layer import Linear

Leaves = dict[str, Array]  # "layers.self_attn.q_proj.lora_a" -> [L, ...]
LAYERS, SHARED, HEAD, TOKENS = "layers.", "shared.", "head.", "tokens."  # prefixes of the names of leaves
EMBED_ROWS, HEAD_ROWS = f"{TOKENS}embed", f"{TOKENS}head"
COUNTED = ("R", "M")  # axes whose size is the adapter's: its rank, its trainable tokens
# Windows from this size on are added one by one, each by a kernel that moves its bytes once. Smaller ones are added by
# one kernel with atomic sums: a launch takes about as long as moving a megabyte.
LARGE_WINDOW = 2**20
# Each is a kernel of its own in the program of every leaf and layer: 64 took three times as long to compile.
ONE_BY_ONE = 8  # places at most; more are added by the one kernel
type Own = tuple[tuple[str, int], ...]  # names of an adapter's leaves in order, and its columns in each
WEIGHTS, SUMS = 1, 2  # number of axes before those of one layer: weights are [L, ...], sums [R, L, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns of a leaf belong to which adapter.

    Narrow adapters come first, so that a window of the widest adapter's width fits at the start of every adapter.

    Attributes:
        leaf: the leaf.
        first: first column of each adapter [A]; 0 if it does not have the leaf.
        width: number of columns of each adapter [A]; 0 if it does not have the leaf.
    """

    leaf: Leaf
    first: tuple[int, ...]
    width: tuple[int, ...]

    @property
    def axis(self) -> int:
        """Axis of the columns in the array of one layer."""
        return next((axis for axis, letter in enumerate(self.leaf.axes) if letter in COUNTED), 0)

    @property
    def padded(self) -> tuple[int, ...]:
        """Further axes of a rank in the array of one layer; all adapters have the largest one there."""
        counted = [axis for axis, letter in enumerate(self.leaf.axes) if letter in COUNTED]
        return tuple(counted[1:])

    @property
    def is_counted(self) -> bool:
        """Whether an adapter's number of columns is its rank or the number of its tokens, and not one."""
        return any(letter in COUNTED for letter in self.leaf.axes)

    @property
    def widest(self) -> int:
        return max(self.width)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one layer's array; `sizes` has the letters of the leaf's axes but R and M."""
        columns, shape = sum(self.width), self.leaf.shape_in({**sizes, **dict.fromkeys(COUNTED, self.widest)})
        if not self.is_counted:
            return (columns, *shape)
        return tuple(columns if axis == self.axis else size for axis, size in enumerate(shape))

    def width_of(self, index: int, spec: AdapterSpec) -> int:
        """Number of columns of an adapter in a place, of at most the rank that the place was made for."""
        return spec.rank if "R" in self.leaf.axes else self.width[index]


class Place(NamedTuple):
    """Position of an adapter; int32 on the host, on devices or traced."""

    index: Any  # place among the adapters
    first: Any  # its first column in each of its leaves, in order of `own_columns`


class Part(NamedTuple):
    """What a device of tensor parallelism has of one axis of a leaf."""

    axis: int  # in the array of one layer
    start: Array
    size: int


def all_columns(specs: Sequence[AdapterSpec], linears: Sequence[Linear], *, tied: bool = False) -> dict[str, Columns]:
    """Returns the leaves of these adapters by name.

    Args:
        linears: the model's projections.
        tied: whether the model's head is its embedding.
    """
    columns = {}
    for linear in linears:
        kinds = [adapter_kind(spec.kind) if linear.name in spec.targets else None for spec in specs]
        kind_leaves = [() if kind is None else (*kind.leaves_at(linear.name), *kind.prepared) for kind in kinds]
        columns |= _columns(f"{LAYERS}{linear.path}.", specs, kind_leaves)
    columns |= _columns(SHARED, specs, [adapter_kind(spec.kind).shared for spec in specs])
    return columns | _head_columns(specs) | _token_columns(specs, tied)


def path_of(leaf: str) -> str:
    """The projection of a leaf.

    >>> path_of("layers.self_attn.q_proj.lora_a")
    'self_attn.q_proj'
    """
    return leaf.removeprefix(LAYERS).rpartition(".")[0]


def on_stage(
    columns: Mapping[str, Columns], rows: Mapping[str, range], *, first: bool, last: bool
) -> dict[str, Columns]:
    """Returns the leaves that a stage has.

    Args:
        rows: of each leaf of layers, the part of its first axis that the stage has.
    """

    def has(name: str) -> bool:
        at_end = first if name == EMBED_ROWS else last or not name.startswith((HEAD, HEAD_ROWS))
        return at_end and bool(rows.get(name, True))

    return {name: at for name, at in columns.items() if has(name)}


def own_columns(columns: Mapping[str, Columns], index: int, spec: AdapterSpec) -> Own:
    """Returns the names of an adapter's leaves in order, and its columns in each.

    Args:
        index: its place.
        spec: the adapter, of at most the rank and targets that the place was made for.
    """
    kind = adapter_kind(spec.kind).names
    heads = set() if spec.head is None else {f"{HEAD}{key}" for key in spec.head.by_key}

    def has(name: str, at: Columns) -> bool:
        targets = not name.startswith(LAYERS) or name.rsplit(".", 2)[-2] in spec.targets
        if name.startswith(HEAD):
            return bool(at.width[index]) and name in heads
        return bool(at.width[index]) and targets and (name.startswith(TOKENS) or at.leaf.name in kind)

    return tuple(sorted((name, at.width_of(index, spec)) for name, at in columns.items() if has(name, at)))


def own_windows(columns: Mapping[str, Columns], index: int, spec: AdapterSpec) -> np.ndarray:
    """Returns the first column and the width of an adapter in each leaf, int32 [leaves, 2]; 0, 0 where it has none."""
    widths = dict(own_columns(columns, index, spec))
    windows = [(at.first[index], widths[name]) if name in widths else (0, 0) for name, at in columns.items()]
    return np.array(windows, np.int32).reshape(-1, 2)


def own_shape(stacked: Sequence[int], at: Columns, width: int) -> tuple[int, ...]:
    """Returns the shape of one adapter's part of a leaf of all adapters, [L, ...], see `take`."""
    axes = {WEIGHTS + axis for axis in (at.axis, *at.padded)}
    shape = tuple(width if axis in axes else size for axis, size in enumerate(stacked))
    return shape if at.is_counted else (*shape[:WEIGHTS], *shape[WEIGHTS + 1 :])


def place_of(columns: Mapping[str, Columns], index: int, spec: AdapterSpec) -> Place:
    first = [columns[name].first[index] for name, _ in own_columns(columns, index, spec)]
    return Place(np.int32(index), np.array(first, np.int32))


def take(
    leaves: Leaves, columns: Mapping[str, Columns], own_columns: Own, first: Array, *, lead: int = WEIGHTS
) -> Leaves:
    """Slices one adapter out of the arrays of all: [L, K, r] and so on.

    A barrier keeps XLA from fusing the slice into the optimizer's arithmetic. Rounding would then depend on the
    adapter's position, because XLA contracts products and sums of strided arrays differently.
    """
    return lax.optimization_barrier(windows_of(leaves, columns, own_columns, first, lead=lead))


def windows_of(
    leaves: Leaves, columns: Mapping[str, Columns], own_columns: Own, first: Array, *, lead: int = WEIGHTS
) -> Leaves:
    """`take` without its barrier."""
    adapter_leaves = {}
    for start, (name, width) in zip(first, own_columns, strict=True):
        at = columns[name]
        axis = lead + at.axis
        leaf = lax.dynamic_slice_in_dim(leaves[name], start, width, axis, allow_negative_indices=False)
        for axis in at.padded:
            leaf = lax.slice_in_dim(leaf, 0, width, axis=lead + axis)
        adapter_leaves[name] = leaf if at.is_counted else jnp.squeeze(leaf, lead)
    return adapter_leaves


def put(
    leaves: Leaves, columns: Mapping[str, Columns], first: Array, adapter_leaves: Leaves, *, lead: int = WEIGHTS
) -> Leaves:
    """Writes one adapter's arrays back. All other bytes stay the same."""
    changed = dict(leaves)
    for start, name in zip(first, sorted(adapter_leaves), strict=True):
        at = columns[name]
        array = adapter_leaves[name] if at.is_counted else jnp.expand_dims(adapter_leaves[name], lead)
        axis = lead + at.axis
        changed[name] = lax.dynamic_update_slice_in_dim(leaves[name], array, start, axis, allow_negative_indices=False)
    return changed


def windows(columns: Mapping[str, Columns], adapters: Array) -> Array:
    """Returns the columns of a microbatch's adapters in every leaf.

    Args:
        adapters: int32 [P], -1 in unused places.

    Returns:
        First column and width, int32 [leaves, 2, P]. The width is 0 if an adapter does not have the leaf.
    """
    if not columns:  # no adapter has a trainable leaf
        return jnp.zeros((0, 2, len(adapters)), jnp.int32)
    table = np.array([[leaf_columns.first, leaf_columns.width] for leaf_columns in columns.values()], np.int32)
    return jnp.where(adapters >= 0, jnp.asarray(table)[:, :, jnp.maximum(adapters, 0)], 0)


def view(leaf: Array, at: Columns, layer: Array, window: Array, part: Part | None = None) -> Array:
    """Returns the adapters of a microbatch in one layer, padded with zeros to the widest: [P, K, R] and so on.

    Args:
        leaf: [L, ...], of all adapters.
        window: the leaf's part of `windows`, [2, P].
        part: takes only this part of the leaf (None: all).
    """
    first, width = window
    size = [1, *(at.widest if axis == at.axis else n for axis, n in enumerate(leaf.shape[1:]))]
    if part is not None:
        size[WEIGHTS + part.axis] = part.size
    # A batch of slices with all indices given: XLA then reads only the windows and does not transpose the leaf.
    slices_P1 = jax.vmap(lambda start: lax.dynamic_slice(leaf, start, size))(
        _starts(leaf.ndim, WEIGHTS, at, layer, first, part)
    )
    values = jnp.where(_inside(at, width, leaf.ndim - WEIGHTS), slices_P1[:, 0], 0.0)
    return values if at.is_counted else values[:, 0]


def add(sums: Array, at: Columns, layer: Array, window: Array, gradient: Array, part: Part | None = None) -> Array:
    """Adds an array in the form of `view` to the sums [1, L, ...] of all adapters.

    Windows of narrow adapters overlap columns of others. `gradient` is masked, so that they add zeros there.
    """
    first, width = window
    gradient = (gradient if at.is_counted else gradient[:, None])[:, None, None]
    starts, inside = (
        _starts(sums.ndim, SUMS, at, layer, first, part),
        _inside(at, width, sums.ndim - SUMS)[:, None, None],
    )
    if gradient[0].nbytes >= LARGE_WINDOW and len(gradient) <= ONE_BY_ONE:
        # Masked one by one, or XLA masks in a pass.
        for start, mask, added in zip(starts, inside, gradient, strict=True):
            before = lax.dynamic_slice(sums, start, added.shape)
            sums = lax.dynamic_update_slice(sums, before + jnp.where(mask, added, 0.0), start)
        return sums
    axes = tuple(range(sums.ndim))
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(axis + 1 for axis in axes), inserted_window_dims=(), scatter_dims_to_operand_dims=axes
    )
    gradient = jnp.where(inside, gradient, 0.0)
    return lax.scatter_add(sums, starts, gradient, numbers, mode="promise_in_bounds")


def stack_adapters(
    columns: Mapping[str, Columns],
    by_adapter: Sequence[Mapping[str, np.ndarray]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    lead: int = WEIGHTS,
) -> dict[str, np.ndarray]:
    """Joins the arrays of each adapter, [L, K, r] and so on, to arrays of all adapters, on the host.

    Args:
        shapes: of the results. What no adapter fills is zero: an adapter may be narrower than its place, or missing.
    """
    arrays = {}
    for name, at in columns.items():
        arrays[name] = np.zeros(shapes[name], np.float32)
        for index, leaves in enumerate(by_adapter):
            if name in leaves:
                leaf = np.asarray(leaves[name])
                width = leaf.shape[lead + at.axis] if at.is_counted else 1
                arrays[name][_part(at, index, width, lead)] = leaf
    return arrays


def take_adapter(
    columns: Mapping[str, Columns],
    arrays: Mapping[str, np.ndarray],
    index: int,
    own_columns: Own,
    *,
    lead: int = WEIGHTS,
) -> dict[str, np.ndarray]:
    """Returns one adapter's arrays: the inverse of `stack_adapters`."""
    return {name: arrays[name][_part(columns[name], index, width, lead)] for name, width in own_columns}


def _part(at: Columns, index: int, width: int, lead: int) -> tuple[slice | int, ...]:
    """Returns where an adapter is in the array of a leaf."""
    first = at.first[index]
    columns = slice(first, first + width) if at.is_counted else first
    slice_by_axis = {lead + axis: slice(width) for axis in at.padded}
    last = max(slice_by_axis, default=lead + at.axis)
    return tuple(
        columns if axis == lead + at.axis else slice_by_axis.get(axis, slice(None)) for axis in range(last + 1)
    )


def by_path(state: Any) -> dict[str, Any]:
    """Returns the arrays of an optimizer state by path, such as "0/mu/layers.self_attn.q_proj.lora_a"."""
    return {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def path_text(path: tuple) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path)


def leaf_of(path: str) -> str | None:
    """Returns the leaf that an array of an optimizer's state belongs to; None for a step count."""
    return next((part for part in path.split("/") if part.startswith((LAYERS, SHARED, HEAD, TOKENS))), None)


def _columns(prefix: str, specs: Sequence[AdapterSpec], leaves: Sequence[Sequence[Leaf]]) -> dict[str, Columns]:
    """Returns the columns of the leaves of each adapter, by name."""
    columns = {}
    for leaf in {leaf.name: leaf for adapter_leaves in leaves for leaf in adapter_leaves}.values():
        has = [any(other.name == leaf.name for other in adapter_leaves) for adapter_leaves in leaves]
        width = [
            (spec.rank if "R" in leaf.axes else 1) if present else 0 for spec, present in zip(specs, has, strict=True)
        ]
        columns[f"{prefix}{leaf.name}"] = _narrow_first(leaf, width)
    return columns


def _head_columns(specs: Sequence[AdapterSpec]) -> dict[str, Columns]:
    heads_of = [(*spec.spare_heads, *([] if spec.head is None else [spec.head])) for spec in specs]
    leaves_of = [{key: leaf for head in heads for key, leaf in head.by_key.items()} for heads in heads_of]
    leaves = {key: leaf for by_key in leaves_of for key, leaf in by_key.items()}
    return {
        f"{HEAD}{key}": _narrow_first(leaf, [int(key in by_key) for by_key in leaves_of])
        for key, leaf in leaves.items()
    }


def _token_columns(specs: Sequence[AdapterSpec], tied: bool) -> dict[str, Columns]:
    widths: dict[Table, list[int]] = {
        table: [0 if spec.tokens is None else len(spec.tokens.of(table, tied=tied)) for spec in specs]
        for table in TABLES
    }
    return {
        f"{TOKENS}{table}": _narrow_first(TOKEN_LEAVES[table], width) for table, width in widths.items() if any(width)
    }


def _narrow_first(leaf: Leaf, width: Sequence[int]) -> Columns:
    first, end = [0] * len(width), 0
    for index in sorted(range(len(width)), key=lambda index: (width[index], index)):
        if width[index]:
            first[index], end = end, end + width[index]
    return Columns(leaf=leaf, first=tuple(first), width=tuple(width))


def _starts(ndim: int, lead: int, at: Columns, layer: Array, first: Array, part: Part | None) -> Array:
    """Returns the start indices of a layer's windows, [P, ndim]."""
    index = {lead - 1: layer, lead + at.axis: first}
    if part is not None:
        index[lead + part.axis] = part.start
    return jnp.stack([jnp.broadcast_to(index.get(axis, 0), first.shape).astype(jnp.int32) for axis in range(ndim)], 1)


def _inside(at: Columns, width: Array, ndim: int) -> Array:
    """Returns which columns of the windows belong to their adapters; broadcasts to [P, *layer]."""

    def below(counted: int) -> Array:
        column = jnp.arange(at.widest).reshape([-1 if axis == counted else 1 for axis in range(ndim)])
        return column < width.reshape(-1, *(1,) * ndim)

    return reduce(jnp.logical_and, map(below, (at.axis, *at.padded)))


def spread_rows(rows: Any, devices: int) -> np.ndarray:
    """Returns sums [devices, ...] of so many devices. From another number, they are added up on the first device."""
    rows = np.asarray(rows)
    if rows.shape[0] == devices:
        return rows
    spread = np.zeros((devices, *rows.shape[1:]), rows.dtype)
    spread[0] = rows.sum(0)
    return spread
