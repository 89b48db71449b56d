"""Figures of a session for records and events: parameters, bytes, layers and devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.config.stack import residents
from lorafusion_jax.layout.layer import RematPolicy
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.session.base import memory_warning
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.leaves import HEAD_ROWS
from lorafusion_jax.session.stage import Stage
from pallas_kernels import config_store


@dataclass(frozen=True, slots=True)
class Facts:
    """Figures of the adapters on the stages of an executor, and of their base."""

    config: JobConfig
    executor: Executor

    @property
    def state_bytes(self) -> int:
        """Size of the state of a snapshot, with the copies of all replicas. Collective over processes."""
        return sum(self._by_stage(lambda stage: sum(leaf.nbytes for leaf in jax.tree.leaves(stage.trainable_arrays()))))

    def _by_stage[T](self, read: Callable[[Stage], T]) -> list[T]:
        local = self.executor.local_stages
        return self.executor.links.by_stage({index: read(stage) for index, stage in local.items()})

    @property
    def num_trainable(self) -> int:
        """Number of parameters of the adapters."""
        first = self.executor.stages[0]
        leaves, tied = first.parts.leaves, first.parts.model.tie_embeddings
        adapters = first.occupied
        if residents(self.config) is not None:  # the last place is the largest
            adapters = [(len(first.parts.specs) - 1, spec) for spec in adapter_specs(self.config)]
        return sum(
            math.prod(shape)
            for shapes in leaves.own_shapes(adapters).values()
            for name, shape in shapes.items()
            if leaves.columns[name].leaf.trainable and not (name == HEAD_ROWS and tied)
        )

    @property
    def stored(self) -> dict[str, int]:
        """Elements stored on the devices of one replica: weights, gradients, moments. Collective over processes."""
        counts = self._by_stage(lambda stage: stage.count_elements())
        return {kind: sum(of_stage[kind] for of_stage in counts) for kind in counts[0]}

    @property
    def num_frozen(self) -> int:
        return self._model.num_parameters  # not a sum over stages: a tied table is on two of them

    @property
    def layers(self) -> list[float]:
        """Number of layers of each stage."""
        return [stage.extent.count for stage in self.executor.stages]

    @property
    def remat(self) -> RematPolicy:
        return self.executor.stages[0].remat

    @property
    def memory_warning(self) -> str | None:
        return memory_warning(self.config, self._model, self.remat)

    @property
    def device(self) -> dict[str, str]:
        """Kind, platform and tuning table for run.json."""
        device = jax.devices()[0]
        table = config_store.used_digest(device.device_kind)
        return {"device": device.device_kind, "platform": device.platform, "tuning_table": table}

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory in use on a device; None if the backend does not report it (CPU)."""
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    @property
    def _model(self) -> ModelConfig:
        return ModelConfig.from_hf(base_directory(self.config))
