"""What attention does with a score, besides softmax, which keys a query sees, and the name of what it keeps."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.ad_checkpoint import checkpoint_name

ATTENTION = "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """Scores cap(scale · q·k) of the keys t - window < s ≤ t,  cap(z) = soft_cap · tanh(z / soft_cap).

    Args:
        channels: width of a head.
        window: None: all earlier rows of the segment.
        soft_cap: None: no cap.
        sinks: whether the sum of a softmax has one more term, e^sink of the head.
    """

    channels: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a window nor a cap, and no sink."""
        return self.window is None and self.soft_cap is None and not self.sinks


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
