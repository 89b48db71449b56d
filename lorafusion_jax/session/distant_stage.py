"""What a process knows of a stage that another process holds: its layers and leaves. It has no arrays."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import AdapterConfig
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.layout.layer import RematPolicy
from lorafusion_jax.objective.batch import metric_names
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.session import leaves as lv
from lorafusion_jax.session.adapter_step import BatchSummary
from lorafusion_jax.session.links import Link
from lorafusion_jax.session.mesh import StageMesh
from lorafusion_jax.session.parts import Carried, Parts
from lorafusion_jax.session.stage import Stage, Stepped
from lorafusion_jax.session.stage_columns import StageColumns

NUMBER: Any = jax.ShapeDtypeStruct((), jnp.float32)
LEAF: Any = jax.ShapeDtypeStruct((), jnp.int32)


class DistantStage:
    """A stage of this run on devices of another process. It describes what that process sends.

    Args:
        parts: pieces of the model.
        extent: its layers.
        mesh: its devices.
        remat: rematerialisation policy.

    Attributes:
        vacant: see `Stage.vacant`.
    """

    def __init__(self, parts: Parts, extent: Extent, mesh: StageMesh, remat: RematPolicy):
        self.parts, self.extent, self.mesh = parts, extent, mesh
        self.remat: RematPolicy = remat
        self.vacant: frozenset[int] = frozenset()
        self._specs, self._chosen = list(parts.specs), parts.chosen
        self._is_last = extent.stop == 2 * parts.model.num_layers
        self._columns = StageColumns(parts.leaves, extent)

    @property
    def occupied(self) -> list[tuple[int, AdapterSpec]]:
        """The adapters with their positions."""
        return [(index, spec) for index, spec in enumerate(self._specs) if index not in self.vacant]

    @property
    def names(self) -> list[str]:
        """Names of the adapters, in stacking order."""
        return [spec.name for _, spec in self.occupied]

    @property
    def with_twins(self) -> set[int]:
        """As `Stage.with_twins`."""
        if not self._columns.twins:
            return set()
        return {index for index, spec in enumerate(self._specs) if spec.tokens is not None}

    def assign(self, index: int, adapter: AdapterConfig, spec: AdapterSpec) -> None:
        """Gives a place to another adapter."""
        self._specs = [*self._specs[:index], spec, *self._specs[index + 1 :]]
        self.vacant -= {index}

    def replace_objectives(self, chosen: Sequence[Chosen]) -> None:
        """See `Stage.replace_objectives`."""
        self._chosen = tuple(chosen)

    def layer_numbers(self, leaf: str) -> list[int]:
        """As `Stage.layer_numbers`."""
        numbers = self.parts.model.layers_with(lv.path_of(leaf))
        return [numbers[row] for row in self.parts.leaves.rows_of(leaf, self.extent)]

    def leaf_names(self, index: int) -> list[str]:
        """As `Stage.leaf_names`."""
        return [name for name, _ in lv.own_columns(self._columns.trained, index, self._specs[index])]

    def totals_like(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the sums of an evaluation, if this is the last stage."""
        shape = jax.ShapeDtypeStruct((len(self._specs),), jnp.float32)
        return dict.fromkeys(("loss", *metric_names(self._chosen)), shape)

    def closed_like(self, index: int) -> tuple[BatchSummary, Any]:
        """Shapes of what `Stage.close_batch` returns."""
        metrics: Any = dict.fromkeys(metric_names(self._chosen) if self._is_last else (), NUMBER)
        return BatchSummary(NUMBER, NUMBER, NUMBER, metrics), LEAF

    def stepped_like(self, index: int) -> Stepped:
        """Shapes of what `Stage.step` returns, without the state before it."""
        del index  # all adapters alike
        alive: Any = jax.ShapeDtypeStruct((len(self._specs),), jnp.bool_)
        return Stepped(alive, LEAF, None)


type AnyStage = Stage | DistantStage


def lanes_of(stages: Sequence[AnyStage], *, ordered: bool) -> list[ThreadPoolExecutor]:
    """Returns for each stage the thread that dispatches its work, or receives that of other processes.

    Args:
        ordered: whether stages of this process share a thread.
    """
    together, receiving = (
        ThreadPoolExecutor(1, "stages"),
        ThreadPoolExecutor(1, "receive"),
    )  # start with their first work
    return [
        receiving
        if isinstance(stage, DistantStage)
        else together
        if ordered
        else ThreadPoolExecutor(1, f"stage-{index}")
        for index, stage in enumerate(stages)
    ]


def local_stages(stages: Sequence[AnyStage]) -> dict[int, Stage]:
    """Returns the stages that this process holds, by number."""
    return {index: stage for index, stage in enumerate(stages) if not isinstance(stage, DistantStage)}


class RowsShape(NamedTuple):
    """What decides the shape of what stages pass on.

    Attributes:
        tokens: T.
        sequences: M, if the choices of routers are counted.
    """

    tokens: int
    sequences: int | None

    @classmethod
    def of(cls, rows: Microbatch) -> RowsShape:
        return cls(np.shape(rows.tokens)[1], None if rows.balance is None else np.shape(rows.balance.length)[1])


def receive_activations(stage: AnyStage, rows: RowsShape, link: Link) -> Carried:
    """Receives what layers pass on or its gradient, which another process sends to a stage of this one."""
    model, mesh = stage.parts.model, stage.mesh
    like: Any = jax.ShapeDtypeStruct((mesh.replicas, rows.tokens, model.hidden_size), stage.parts.dtype)
    if rows.sequences is not None and model.experts is not None:
        choices = (mesh.replicas, 2, rows.sequences, model.experts.count)
        like = like, jax.ShapeDtypeStruct(choices, jnp.float32)
    return link.receive(like, mesh.by_replica)
