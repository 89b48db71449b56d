"""Held-out loss of one adapter: Σ token losses / loss tokens of its evaluation set, dropout off."""

from __future__ import annotations

from typing import Any

import numpy as np

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import assemble, num_segments, pieces_of_evaluation
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.training.leaves import Leaves
from lorafusion_jax.training.programs import Programs
from scheduling import AdapterJob, Plan, make_plan


class Evaluator:
    """Evaluates adapters with the run's own packed forward program.

    Args:
        frozen: frozen leaves of the model.
    """

    def __init__(self, config: JobConfig, prepared: Prepared, programs: Programs, frozen: Any):
        self._config, self._programs, self._frozen = config, programs, frozen
        self._sets = {name: data.eval for name, data in prepared.adapters.items() if data.eval is not None}
        self._index = {adapter.name: index for index, adapter in enumerate(config.adapters)}
        self._plans = {name: self._plan(name) for name in self._sets}
        most = max((len(slot.samples) for plan in self._plans.values() for slot in plan.slots), default=1)
        self._segments = num_segments(most)  # one shape, so one compilation, for all adapters

    def __call__(self, name: str, lora: Leaves) -> tuple[float, int]:
        """Returns mean token loss in nats and the number of loss tokens."""
        plan, index = self._plans[name], self._index[name]
        total, tokens = 0.0, 0
        for slot in plan.slots:
            pieces = pieces_of_evaluation(slot.samples, self._sets, self._index)
            batch = assemble(
                pieces, capacity_tokens=plan.capacity_tokens, tile_tokens=plan.tile_tokens, max_segments=self._segments
            )
            total += float(self._programs.evaluate(lora, self._frozen, batch)[index])
            tokens += int(np.count_nonzero(batch.weights))
        return total / max(tokens, 1), tokens

    def _plan(self, name: str) -> Plan:
        lengths = self._sets[name].lengths.tolist()
        job = AdapterJob(name=name, sample_tokens=lengths, global_batch=len(lengths))
        return make_plan(
            [job],
            capacity_tokens=self._config.batch.capacity_tokens,
            num_stages=1,
            data_parallel=1,
            tile_tokens=self._config.batch.tile_tokens,
            time_limit_s=0.1,
            seed=0,
        )
