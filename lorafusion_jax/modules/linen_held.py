"""The adapters of a Linen model in the form of an NNX model, for all that saves, loads and converts adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from lorafusion_jax.modules.adapted import LoRAConstant
from lorafusion_jax.modules.plan import LoRAPlan


class HeldLayer(nnx.Module):
    """The adapters of one layer, without its weight."""

    def __init__(self, plan: LoRAPlan, path: Sequence[str], leaves: Mapping[str, Any]):
        self.lora_plan, self.path = plan, tuple(path)
        for leaf in plan.leaves:
            setattr(self, leaf.name, (nnx.LoRAParam if leaf.trainable else LoRAConstant)(leaves[leaf.name]))


class LinenAdapters(nnx.Module):
    """The adapters of a Linen model, from `LinenLoRA.hold`. `tree()` returns the collection "LoRAParam" again.

    Functions that take an adapted NNX model take it, too: `save_adapter`, `load_adapter`, `adapter_arrays`,
    `put_adapter_arrays`, `only_adapter`, `lf.save_peft`, `lf.load_peft`, `lf.save_checkpoint`, `lf.load_checkpoint`.
    They change it in place. It has no weights: `LinenLoRA.merge` merges.
    """

    def __init__(self, layers: Sequence[HeldLayer]):
        self.layers = nnx.List(layers)

    def tree(self) -> dict[str, Any]:
        """Returns the collection "LoRAParam"."""
        tree: dict[str, Any] = {}
        for layer in self.layers:
            plan = getattr(layer, "lora_plan", None)
            if plan is not None:
                node_at(tree, layer.path).update({name: getattr(layer, name)[...] for name in plan.leaf_names})
        return tree


def node_at(tree: Any, path: tuple[str, ...]) -> Any:
    """Returns the dictionary at a path, and makes it where there is none."""
    for part in path:
        tree = tree.setdefault(part, {})
    return tree


def copy_dicts(tree: Any) -> dict[str, Any]:
    """Copies the dictionaries of a tree, with the same leaves."""
    return {key: copy_dicts(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
