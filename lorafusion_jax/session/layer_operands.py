"""What a program reads of one layer: its frozen weights, usable and gathered, and the leaves of the adapters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
from jax import Array, lax

from lorafusion_jax.models.loading import Weight
from lorafusion_jax.modules.tensor_sums import on_first, part_start
from lorafusion_jax.session import leaves as lv
from lorafusion_jax.session.inputs import Inputs
from lorafusion_jax.session.leaves import LAYERS, SHARED, Leaves, path_of
from lorafusion_jax.session.mesh import StageMesh
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.stage_columns import Position, StageColumns
from lorafusion_jax.session.stage_jit import gather, split_axis
from lorafusion_jax.session.stage_weights import LayerWeights, StoredWeights, Weights, layer_kind


class LayerOperands:
    """Reads layers inside programs.

    Args:
        parts: pieces of the model.
        stage: devices of the stage.
        columns: leaves of the stage.
    """

    def __init__(self, parts: Parts, stage: StageMesh, columns: StageColumns):
        self.parts, self.stage, self.columns = parts, stage, columns
        self._frozen_specs = [
            {
                name: jax.tree.map(partial(stage.split, axis=layer.split_axes.get(name)), shape, is_leaf=_is_shape)
                for name, shape in parts.stored_shapes(layer_kind=kind).items()
            }
            for kind, layer in enumerate(parts.model.kinds)
        ]

    def of_layer[X](
        self, weights: StoredWeights, lora: Leaves, position: Position, inputs: Inputs, x: X
    ) -> tuple[tuple, Weights, X]:
        """Reads a layer that runs on x, see `materialize`.

        Returns:
            ((weights, inputs, number, constant leaves), trainable leaves, x)
        """
        usable, x = self.materialize(weights, x)
        views, constant = self.views(lora, weights, position, inputs)
        return (usable, inputs, position.layer, constant), views, x

    def views(
        self, lora: Leaves, weights: StoredWeights, position: Position, inputs: Inputs
    ) -> tuple[Weights, Weights]:
        """Returns the leaves of the microbatch's adapters in the layer or half layer of `weights`.

        Names are relative to the layer, but for those of shared leaves.

        Returns:
            (trainable, constant)
        """
        layer = self.parts.model.kinds[layer_kind(weights)]
        paths = {linear.path for linear in layer.linears_of(self.parts.half(weights))}
        views = {
            name: scaled(
                name,
                lv.view(leaf, *self.columns.windows_of(name, position, inputs), self.part_of(name)),
                position.layer,
                inputs,
            )
            for name, leaf in lora.items()
            if name.startswith(SHARED) or (name.startswith(LAYERS) and path_of(name) in paths)
        }
        return (
            {name.removeprefix(LAYERS): view for name, view in views.items() if name in self.columns.trained},
            {name.removeprefix(LAYERS): view for name, view in views.items() if name not in self.columns.trained},
        )

    def part_of(self, name: str) -> lv.Part | None:
        """Returns what this device computes of a leaf of a projection; None: all of it."""
        if self.stage.tensor == 1 or not name.startswith(LAYERS):
            return None
        linear = next(linear for linear in self.parts.model.linears if linear.path == path_of(name))
        letter, at = "KN"[linear.split_axis], self.columns.all[name]
        if letter not in at.leaf.axes:
            return None
        size = linear.shape[linear.split_axis] // self.stage.tensor
        return lv.Part(at.leaf.axes.index(letter), part_start(size), size)

    def specs_of_block(self, block: Sequence[StoredWeights]) -> tuple[StoredWeights, ...]:
        return tuple(map(self._specs_of, block))

    def _specs_of(self, weights: StoredWeights) -> StoredWeights:
        """Returns the sharding of each array of a layer or half layer, as a tree of the same structure."""
        kind = layer_kind(weights)
        specs = {name: self._frozen_specs[kind][name] for name in weights}
        return LayerWeights(specs, kind) if isinstance(weights, LayerWeights) else specs

    def materialize[X](self, stored: StoredWeights, x: X) -> tuple[Weights, X]:
        """Returns the weights of a layer or half layer in the form that its ops use.

        Devices gather the stored arrays. Dequantisation of a layer waits for its input x (in backward: for the gradient
        of its output). Otherwise XLA could dequantise all layers of a program at once.
        """
        specs = self._specs_of(stored)
        stored = jax.tree.map(lambda leaf, spec: gather(leaf, split_axis(spec)), stored, specs)
        if self.stage.tensor > 1:
            stored = self._with_biases_once(stored)
        if self.parts.dequantises:
            stored, x = lax.optimization_barrier((stored, x))
        return self.parts.usable(stored), x

    def _with_biases_once(self, stored: StoredWeights) -> StoredWeights:
        """Leaves biases that are added to a term of a sum over devices to the first device."""
        axes = self.parts.model.kinds[layer_kind(stored)].split_axes

        def once(name: str, leaf: Weight) -> Weight:
            if isinstance(leaf, dict) or not name.endswith(".bias") or name in axes:
                return leaf
            return on_first(leaf)

        return LayerWeights({name: once(name, leaf) for name, leaf in stored.items()}, layer_kind(stored))


def _is_shape(node: object) -> bool:
    return isinstance(node, tuple)


def scaled(name: str, view: Array, number: Array, inputs: Inputs) -> Array:
    """Multiplies the adapters' leaves in a layer, [P, ...], by their ratios."""
    if name not in inputs.ratios:
        return view
    return view * inputs.ratios[name][number].reshape(-1, *(1,) * (view.ndim - 1))
