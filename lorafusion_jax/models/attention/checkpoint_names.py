"""Checkpoint names for the residuals of attention, for rematerialisation policies."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

ATTENTION = "attention"


def checkpointed[Tree](tree: Tree) -> Tree:
    """Gives every array of a tree the name "attention". An array that occurs twice is named, and so saved, once.

    With `jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("attention"))` the gradient of a
    layer does not run the forward of attention again.
    """
    leaf_by_id: dict[int, jax.Array] = {}

    def name(leaf: jax.Array) -> jax.Array:
        if id(leaf) not in leaf_by_id:
            leaf_by_id[id(leaf)] = checkpoint_name(leaf, ATTENTION)
        return leaf_by_id[id(leaf)]

    return jax.tree.map(name, tree)
