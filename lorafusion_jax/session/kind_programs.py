"""The compiled programs of adapter kinds, and what they have computed: see `AdapterKind.prepare`.

K, N features of a projection · r rank of an adapter
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from lorafusion_jax.adapters.bank import prepare_tensors, start_tensors
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.layout.layer import Linear
from lorafusion_jax.models.loading import Weight
from lorafusion_jax.session.inputs import layer_ratios
from lorafusion_jax.session.layer_operands import LayerOperands
from lorafusion_jax.session.leaves import LAYERS, SHARED, Leaves, Place
from lorafusion_jax.session.mesh import StageMesh
from lorafusion_jax.session.move import replicate
from lorafusion_jax.session.stage_columns import Position
from lorafusion_jax.session.stage_jit import REPLICATED, jit_on_stage
from lorafusion_jax.session.stage_weights import StoredWeights, layer_kind


class KindPrograms:
    """Jitted functions of the kinds of a stage's adapters.

    Args:
        operands: reads layers inside programs.
    """

    def __init__(self, operands: LayerOperands):
        self._operands, self._parts = operands, operands.parts
        self._compiled: dict[tuple, Any] = {}

    def start_from_base(self, spec: AdapterSpec, linear: Linear, kernel: Weight, tensors: Leaves) -> Leaves:
        """Returns the initial values of an adapter's leaves in one projection that depend on its kernel.

        Args:
            kernel: as it is stored.
            tensors: by name, [K, r] and so on.
        """
        shape = linear.shape
        key = ("start", spec.kind, spec.rank, shape)
        if key not in self._compiled:

            def start(kernel: Weight, tensors: Leaves, scale: Array) -> Leaves:
                usable = self._parts.usable({linear.name: kernel})[linear.name]
                return start_tensors(adapter_kind(spec.kind), usable, tensors, (*shape, spec.rank), scale)

            self._compiled[key] = jax.jit(start, out_shardings=self._operands.stage.everywhere)
        return self._compiled[key](kernel, tensors, np.float32(spec.scale))

    def prepare(
        self, spec: AdapterSpec, block: Sequence[StoredWeights], leaves: Leaves, position: Position, index: Array,
        prepared: Leaves,
    ) -> Leaves:  # fmt: skip
        """Computes what an adapter's kind prepares in the layers of a block. That of other adapters does not change.

        Args:
            leaves: of all adapters.
            position: of the first layer of the block.
            index: the adapter's place.
            prepared: leaves of all adapters that kinds prepare.
        """
        key = ("prepare", spec.kind, spec.targets, spec.rank)
        if key not in self._compiled:
            operands = (self._operands.specs_of_block, *(REPLICATED,) * 6)
            program = partial(self._prepare, spec.kind, spec.targets, spec.rank)
            self._compiled[key] = jit_on_stage(self._operands.stage, program, operands, REPLICATED)
        ratio = layer_ratios(self._parts.model, spec)
        return self._compiled[key](block, leaves, position, index, ratio, np.float32(spec.scale), prepared)

    def _prepare(
        self, kind_name: str, targets: Sequence[str], rank: int, block: Sequence[StoredWeights], leaves: Leaves,
        position: Position, index: Array, ratio: Array, scale: Array, prepared: Leaves,
    ) -> Leaves:  # fmt: skip
        kind, inputs, changed = adapter_kind(kind_name), self._parts.inputs.of_adapter(index, ratio), dict(prepared)
        for offset, stored in enumerate(block):
            weights, scale = self._operands.materialize(stored, scale)
            trained, constant = self._operands.views(leaves, stored, position.plus(offset), inputs)
            views: dict[str, Any] = {**trained, **constant}
            layer = self._parts.model.kinds[layer_kind(stored)]
            for linear in layer.linears_of(self._parts.half(stored)):
                if linear.name not in targets:
                    continue
                size = (*linear.shape, rank)
                paths = {leaf: SHARED if leaf.shared else f"{linear.path}." for leaf in kind.leaves}
                tensors = {
                    leaf.name: leaf.cut(views[f"{path}{leaf.name}"][0], dict(zip("KNR", size, strict=True)))
                    for leaf, path in paths.items()
                }
                kernel = weights[f"{linear.path}.kernel"]
                for leaf, value in prepare_tensors(kind, kernel, tensors, size, scale, self._parts.dtype).items():
                    name = f"{LAYERS}{linear.path}.{leaf}"
                    _, row, window = self._operands.columns.windows_of(name, position.plus(offset), inputs)
                    start = (row, window[0, 0], *(0 for _ in value.shape))
                    changed[name] = lax.dynamic_update_slice(changed[name], value[None, None], start)
        return changed


class PreparedLeaves:
    """Keeps what kinds compute, and computes it again for adapters that have changed.

    Args:
        programs: of the kinds of the stage.
        mesh: the devices of the stage.
    """

    def __init__(self, programs: KindPrograms, mesh: StageMesh):
        self._programs, self._mesh = programs, mesh
        self._leaves: Leaves = {}
        self._changed: set[int] = set()
        self._lock = threading.Lock()  # a stage compiles passes and evaluations in two threads

    def reset(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Makes arrays of these shapes for the leaves of all adapters."""
        self._leaves = {name: replicate(np.ones(shape, np.float32), self._mesh) for name, shape in shapes.items()}

    def mark(self, *places: int) -> None:
        """Marks adapters as changed."""
        self._changed.update(places)

    def read(
        self,
        specs: Sequence[AdapterSpec],
        leaves: Leaves,
        blocks: Sequence[Sequence[StoredWeights]],
        positions: Sequence[Position],
        places: Sequence[Place],
    ) -> Leaves:
        """Returns the prepared leaves of all adapters.

        Args:
            specs: the adapters, in stacking order.
            leaves: what their kinds prepare from.
            blocks: weights of the layers of each program.
            positions: of the first layer of each block.
            places: of the adapters.
        """
        with self._lock:
            for index in sorted(self._changed):
                if adapter_kind(specs[index].kind).prepare is None:
                    continue
                for block, position in zip(blocks, positions, strict=True):
                    self._leaves = self._programs.prepare(
                        specs[index], block, leaves, position, places[index].index, self._leaves
                    )
            self._changed.clear()
            return self._leaves
