"""An adapter's leaves, joined to a few vectors: a program then has one kernel for the work on all of them.

A kernel takes about 7 ms to compile, and a step has a dozen for each array that it changes. Vectors depend on the
adapter alone, so its sums are added up in one order in any company.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from lorafusion_jax.optim.step import Group
from lorafusion_jax.session.leaves import Columns, Own, own_shape, path_text

PREFIX = "joined "


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedLeaves:
    """Which leaves a vector joins: those that the optimizer treats alike. A key of programs, by identity.

    Attributes:
        names: leaves of each vector.
        groups: how the optimizer treats each vector.
        shapes: of the leaves, [L, K, r] and so on.
    """

    names: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, Group]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(
        cls,
        columns: Mapping[str, Columns],
        own_columns: Own,
        stacked: Mapping[str, tuple[int, ...]],
        *,
        lr_groups: Collection[str] = (),
        apart: Collection[str] = (),
    ) -> JoinedLeaves:
        """Returns the vectors of an adapter.

        Args:
            stacked: shapes of the arrays of all adapters, [L, ...].
            lr_groups: those that have a learning rate of their own.
            apart: leaves with a vector each.
        """
        names: dict[str, tuple[str, ...]] = {}
        groups, shapes = {}, {}
        for name, width in own_columns:
            leaf = columns[name].leaf
            group = Group(leaf.lr_group if leaf.lr_group in lr_groups else None, leaf.decay)
            vector = name if name in apart else f"{PREFIX}{group.label}"
            names[vector] = (*names.get(vector, ()), name)
            groups[vector], shapes[name] = group, own_shape(stacked[name], columns[name], width)
        return cls(names=names, groups=groups, shapes=shapes)

    def join(self, leaves: Mapping[str, Any], *, lead: int = 0) -> dict[str, Any]:
        """Joins leaves to vectors, on the host or on devices. The first `lead` axes stay."""

        def joined(names: tuple[str, ...]) -> Any:
            flat = [leaves[name].reshape(*leaves[name].shape[:lead], -1) for name in names]
            library = np if isinstance(flat[0], np.ndarray) else jnp
            return library.concatenate(flat, axis=lead) if len(flat) > 1 else flat[0]

        return {vector: joined(names) for vector, names in self.names.items()}

    def split(self, vectors: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `join`, without leading axes. Other arrays stay."""
        leaves = {name: array for name, array in vectors.items() if name not in self.names}
        for vector in vectors.keys() & self.names.keys():
            start = 0
            for name in self.names[vector]:
                stop = start + prod(self.shapes[name])
                leaves[name] = vectors[vector][start:stop].reshape(self.shapes[name])
                start = stop
        return leaves

    def paths(self, path: str) -> list[str]:
        """Returns the paths that an array of an optimizer's state has leaf by leaf, "0/mu/NAME OF A LEAF"."""
        vector = self._vector_in(path)
        return [path] if vector is None else [path.replace(vector, name) for name in self.names[vector]]

    def split_state(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arrays of an optimizer's state by `paths`."""
        state: dict[str, Any] = {}
        for path, array in arrays.items():
            vector = self._vector_in(path)
            leaves = {"": array} if vector is None else {vector: array}
            if vector is not None and array.shape == (sum(prod(self.shapes[name]) for name in self.names[vector]),):
                leaves = self.split(leaves)
            state |= dict(zip(self.paths(path), leaves.values(), strict=True))
        return state

    def _vector_in(self, path: str) -> str | None:
        return next((key for key in path.split("/") if key in self.names), None)

    def first_not_finite(self, vectors: Mapping[str, Array], state: Any = ()) -> Array:
        """Returns the number of the first leaf, in order of names, that is not finite.

        Args:
            state: of the optimizer. Its number is that of the leaves, and one more stands for all finite.
        """
        numbers = {name: number for number, name in enumerate(sorted(self.shapes))}
        finite: dict[str, list[Array]] = {vector: [] for vector in self.names}
        firsts = [jnp.int32(len(numbers) + 1)]
        for path, array in jax.tree_util.tree_leaves_with_path(state):
            if not jnp.issubdtype(array.dtype, jnp.inexact):
                continue
            vector = self._vector_in(path_text(path))
            if vector is not None and array.shape == vectors[vector].shape:
                finite[vector].append(jnp.isfinite(array))
            else:
                firsts.append(len(numbers) + jnp.all(jnp.isfinite(array)).astype(jnp.int32))
        for vector, names in self.names.items():
            # One pass over a vector and its moments.
            position = lax.iota(jnp.uint32, size := vectors[vector].size)
            of_state = jnp.where(reduce(jnp.logical_and, finite[vector], jnp.bool_(True)), size + 1, size)
            first = jnp.min(jnp.where(jnp.isfinite(vectors[vector]), of_state, position).astype(jnp.uint32))
            ends = np.cumsum([*(prod(self.shapes[name]) for name in names), 1]).astype(np.uint32)
            of_ends = np.array([*(numbers[name] for name in names), len(numbers), len(numbers) + 1], np.int32)
            firsts.append(jnp.asarray(of_ends)[jnp.sum(first >= ends)])
        return jnp.min(jnp.stack(firsts))
