"""Mesh axes inside shard_map: which values vary over them, and marking others alike.

Outside shard_map, and under `check_vma=False`, nothing is known to vary and all of this does nothing.
"""

from __future__ import annotations

from typing import Any

import jax


def varying_axes(array: jax.Array) -> frozenset[str]:
    """Returns the mesh axes over which an array is known to vary."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def vary_like(tree: Any, x: jax.Array) -> Any:
    """Marks every array of a tree as varying like x; the gradient of one that did not is summed over the mesh."""
    axes = varying_axes(x)

    def vary(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, tree) if axes else tree
