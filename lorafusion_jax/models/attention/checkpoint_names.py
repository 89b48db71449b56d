"""Names for what attention's backward pass needs, so that a rematerialisation policy can keep exactly that."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

ATTENTION = "attention"


def checkpointed[Tree](tree: Tree) -> Tree:
    """Names every array of a tree "attention"; one that is there twice is named, and so saved, once.

    With `jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("attention"))` the gradient of a
    layer runs no forward attention again.
    """
    named: dict[int, jax.Array] = {}

    def name(leaf: jax.Array) -> jax.Array:
        if id(leaf) not in named:
            named[id(leaf)] = checkpoint_name(leaf, ATTENTION)
        return named[id(leaf)]

    return jax.tree.map(name, tree)
