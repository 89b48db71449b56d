"""Leaves that adapter kinds compute from others and from the frozen kernels, see `AdapterKind.prepare`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.session.kind_programs import KindPrograms
from lorafusion_jax.session.leaves import Leaves, Place
from lorafusion_jax.session.mesh import StageMesh
from lorafusion_jax.session.move import replicate
from lorafusion_jax.session.stage_columns import Position
from lorafusion_jax.session.stage_weights import StoredWeights


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
