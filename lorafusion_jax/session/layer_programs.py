"""The compiled programs of layers. Shapes are the same in every slot of a capacity: each compiles once for it.

A program runs one block: one or a few layers, or half a layer. Large models use one layer per program: the host can
dispatch 32 calls without delaying the device, while an unrolled 8B model compiles for minutes and a scanned one copies
every layer's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from lorafusion_jax.adapters.table import KINDS as ADAPTER_KINDS
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.layout.layer import RematPolicy
from lorafusion_jax.models.stream import added, joined
from lorafusion_jax.session import leaves as lv
from lorafusion_jax.session.inputs import Inputs
from lorafusion_jax.session.layer_operands import LayerOperands, scaled
from lorafusion_jax.session.leaves import LAYERS, Leaves
from lorafusion_jax.session.parts import Carried
from lorafusion_jax.session.stage_columns import Position
from lorafusion_jax.session.stage_jit import DEVICES, REPLICATED, ROWS, hidden_sums, jit_on_stage, row_of_device
from lorafusion_jax.session.stage_weights import StoredWeights, Weights, layer_kind
from lorafusion_jax.weights.table import KINDS as STORED_KINDS
from lorafusion_jax.weights.table import NONE

# Rematerialisation: splits a layer into forward and backward programs and chooses the residuals between them.
#
# `jax.vjp` inside a jitted forward would return the frozen weights among its residuals, and jit would copy them for
# every microbatch in flight. Here forward drops residuals that are inputs of the layer, and backward inserts them
# again.


class Split:
    """Splits a differentiable function into a forward and a backward pass that run in different programs.

    Args:
        function: (given, lora, x) → y; differentiated with respect to lora and x.
        remat: "everything": save all residuals; "gemm_inputs": save the named tensors and recompute elementwise work;
            "nothing": recompute forward.
        names: checkpoint names of the tensors to save.

    `forward(given, lora, x)` → (y, kept) and `backward(given, lora, x, kept, dy)` → (dlora, dx) are called inside
    traced functions.
    """

    def __init__(self, function: Callable[[Any, Any, Any], Any], remat: RematPolicy, names: Sequence[str]):
        self._remat = remat
        self._function = function
        if remat == "gemm_inputs":
            self._function = jax.checkpoint(function, policy=jax.checkpoint_policies.save_only_these_names(*names))
        self._structure: Any = None
        self._sources: list[Any] = []  # per residual: n for input n, ~n for kept array n, or the constant

    def forward(self, constants: Any, lora: Any, x: Any) -> tuple[Any, tuple[Array, ...]]:
        if self._remat == "nothing":
            return self._function(constants, lora, x), ()
        y, pullback = jax.vjp(lambda lora, x: self._function(constants, lora, x), lora, x)
        residuals, self._structure = jax.tree.flatten(pullback)
        inputs = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves((constants, lora, x)))}
        self._sources, computed, places = [], [], {}
        for leaf in residuals:
            if not isinstance(leaf, Tracer):
                self._sources.append(leaf)
            elif id(leaf) in inputs:
                self._sources.append(inputs[id(leaf)])
            else:
                if id(leaf) not in places:
                    places[id(leaf)] = len(computed)
                    computed.append(leaf)
                self._sources.append(~places[id(leaf)])
        return y, tuple(computed)

    def backward(self, constants: Any, lora: Any, x: Any, computed: tuple[Array, ...], dy: Any) -> tuple[Any, Any]:
        if self._remat == "nothing":
            return jax.vjp(lambda lora, x: self._function(constants, lora, x), lora, x)[1](dy)
        if self._structure is None:  # forward was not traced in this process: its lowered form was kept
            jax.eval_shape(self.forward, constants, lora, x)
        inputs = jax.tree.leaves((constants, lora, x))
        residuals = [
            (inputs[source] if source >= 0 else computed[~source]) if isinstance(source, int) else source
            for source in self._sources
        ]
        return jax.tree.unflatten(self._structure, residuals)(dy)


class LayerPrograms:
    """Passes through blocks of layers.

    Args:
        operands: reads layers inside programs.
        remat: rematerialisation policy.

    Attributes:
        inputs, inputs_without_dropout: microbatch → what its layers share.
        forward: (weights of a block, leaves, position of its first layer, x, inputs) → (y, residuals); of keys that
            later layers read, y has those that the block adds, see `stream.added`.
        backward: the same, residuals, the gradient of y and the sums → (gradient of x, sums).
        backward_giving: of a block that adds keys for later ones: it donates no gradient of y, as x has none of it.
        evaluate: as forward → y.
        shares_keys: whether layers read keys of earlier ones; without, what blocks pass on needs no `joined`.
    """

    def __init__(self, operands: LayerOperands, remat: RematPolicy):
        self._operands, self._parts = operands, operands.parts
        self._remat: RematPolicy = remat
        self.shares_keys = any(kind.gives_keys for kind in self._parts.model.kinds)
        self._splits: dict[tuple, Split] = {}  # by kind, half, and shapes of the microbatch
        self._forward_layer = jax.jit(self._run_forward_layer)
        self._backward_layer = jax.jit(self._run_backward_layer)
        self._evaluate_layer = jax.jit(self._run_evaluate_layer)
        jit = partial(jit_on_stage, operands.stage)
        self.inputs = jit(partial(self._inputs, dropout=True), (ROWS,), ROWS)
        self.inputs_without_dropout = jit(partial(self._inputs, dropout=False), (ROWS,), ROWS)
        block = (operands.specs_of_block, REPLICATED, REPLICATED, ROWS, ROWS)
        options = hidden_sums(self._parts.settings.parts if operands.stage.tensor > 1 else 1)
        layers = partial(jit, options=self._parts.compiler_options | options, identity=self._identity())
        self.forward = layers(self._forward, block, (ROWS, DEVICES))
        backward = partial(layers, self._backward, (*block, DEVICES, ROWS, DEVICES), (ROWS, DEVICES))
        self.backward, self.backward_giving = backward(donate=(6, 7)), backward(donate=(7,))
        self.evaluate = layers(self._evaluate, block, ROWS)

    def _identity(self) -> str | None:
        """Everything but the operands that decides what the programs of layers compute.

        None where code of other packages takes part: a change there would not be seen.
        """
        parts, settings = self._parts, self._parts.settings
        if parts.quantize not in (NONE, *STORED_KINDS) or any(spec.kind not in ADAPTER_KINDS for spec in parts.specs):
            return None
        specs = [replace(spec, name="", seed=0, head=None, spare_heads=(), tokens=None) for spec in parts.specs]
        columns = [(name, at.first, at.width) for name, at in parts.leaves.columns.items()]
        sizes = (parts.model, specs, columns, str(parts.dtype), parts.quantize)
        return repr((*sizes, settings.implementation, settings.attention, self._remat))

    def backward_of(self, x: Carried, dy: Carried) -> Any:
        """Returns the backward pass of a block that makes y of x."""
        return self.backward if jax.tree.structure(x) == jax.tree.structure(dy) else self.backward_giving

    def residuals(self, *operands: Any) -> Any:
        """Returns the shapes of what `forward` keeps for `backward`; lowers nothing."""
        return jax.eval_shape(self._forward, *operands)[1]

    def _inputs(self, batch: Microbatch, *, dropout: bool) -> Any:
        return _row(self._parts.inputs.of_batch(row_of_device(batch), dropout=dropout))

    def _forward(self, frozen: Sequence[StoredWeights], lora: Leaves, position: Position, x: Carried, inputs: Any):
        x, inputs = row_of_device(x), row_of_device(inputs)
        residuals, first = [], x
        for offset, weights in enumerate(frozen):
            before = x
            x, layer_residuals = self._forward_layer(weights, lora, position.plus(offset), x, inputs)
            residuals.append(((added(before, first),) if offset else (), layer_residuals))
        return _row(added(x, first)), _row(residuals)

    def _backward(
        self, frozen: Sequence[StoredWeights], lora: Leaves, position: Position, x: Carried, inputs: Any,
        residuals: Any, dy: Carried, sums: Leaves,
    ):  # fmt: skip
        x, inputs, residuals, dy = map(row_of_device, (x, inputs, residuals, dy))
        for offset in reversed(range(len(frozen))):
            before, layer_residuals = residuals[offset]
            entered = joined(before[0], x) if offset else x
            dy, sums = self._backward_layer(
                frozen[offset], lora, position.plus(offset), entered, inputs, layer_residuals, dy, sums
            )
        return _row(dy), sums

    def _evaluate(self, frozen: Sequence[StoredWeights], lora: Leaves, position: Position, x: Carried, inputs: Any):
        x, inputs = row_of_device(x), row_of_device(inputs)
        first = x
        for offset, weights in enumerate(frozen):
            x = self._evaluate_layer(weights, lora, position.plus(offset), x, inputs)
        return _row(added(x, first))

    # The next three are jitted: like layers of a program are traced and lowered once, and XLA inlines the calls.

    def _run_forward_layer(self, weights: StoredWeights, lora: Leaves, position: Position, x: Carried, inputs: Inputs):
        frozen, views, x = self._operands.of_layer(weights, lora, position, inputs, x)
        return self._split(weights, inputs).forward(frozen, views, x)

    def _run_backward_layer(
        self, weights: StoredWeights, lora: Leaves, position: Position, x: Carried, inputs: Inputs, residuals: Any,
        dy: Carried, sums: Leaves,
    ):  # fmt: skip
        frozen, views, dy = self._operands.of_layer(weights, lora, position, inputs, dy)
        gradient, dy = self._split(weights, inputs).backward(frozen, views, x, residuals, dy)
        added = {f"{LAYERS}{short}": leaf for short, leaf in gradient.items()}
        return dy, sums | {
            name: lv.add(
                sums[name],
                *self._operands.columns.windows_of(name, position, inputs),
                scaled(name, leaf, position.layer, inputs),
                self._operands.part_of(name),
            )
            for name, leaf in added.items()
        }

    def _run_evaluate_layer(self, weights: StoredWeights, lora: Leaves, position: Position, x: Carried, inputs: Inputs):
        frozen, views, x = self._operands.of_layer(weights, lora, position, inputs, x)
        return self._layer(frozen, views, x)

    def _split(self, weights: StoredWeights, inputs: Inputs) -> Split:
        """What forward leaves is shaped like the microbatch: a backward finds the forward of its own capacity."""
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(inputs))
        layer = layer_kind(weights)
        kind = (layer, self._parts.half(weights), shapes)
        names = self._parts.model.kinds[layer].checkpoints
        return self._splits.setdefault(kind, Split(self._layer, self._remat, names))

    def _layer(self, constants: tuple, lora: Weights, x: Carried) -> Carried:
        frozen, inputs, number, constant = constants
        return self._parts.layer(frozen, lora | constant, x, inputs, number)


def _row(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)
