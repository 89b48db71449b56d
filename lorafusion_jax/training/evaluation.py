"""Held-out loss of one adapter: Σ token losses / loss tokens of its evaluation set, dropout off."""

from __future__ import annotations

from collections import deque

import numpy as np

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import Microbatch, assemble, num_segments, pieces_of_evaluation
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.pipeline.executor import Executor
from lorafusion_jax.pipeline.move import to_local
from scheduling import AdapterJob, Plan, Slot, make_plan


class Evaluator:
    """Evaluates adapters as they are now on the run's own stages."""

    def __init__(self, config: JobConfig, prepared: Prepared, executor: Executor):
        self._config, self._executor = config, executor
        self._sets = {name: data.eval for name, data in prepared.adapters.items() if data.eval is not None}
        self._index = {adapter.name: index for index, adapter in enumerate(config.adapters)}
        self._plans = {name: self._plan(name) for name in self._sets}
        most = max(
            (len(part) for plan in self._plans.values() for slot in plan.slots for part in slot.replicas), default=1
        )
        self._segments = num_segments(most)  # one shape, so one compilation, for all adapters

    def __call__(self, name: str) -> tuple[float, int]:
        """Returns mean token loss in nats and the number of loss tokens."""
        plan, index = self._plans[name], self._index[name]
        tokens, under_way, total = int(self._sets[name].loss_mask.sum()), deque(), 0.0
        with self._executor.blaming(None, None, [name]):
            for slot in plan.slots:
                # Every stage has work, and no stage gathers what the next has not taken yet.
                if len(under_way) > len(self._executor.stages):
                    total += float(to_local(under_way.popleft().result())[index])
                under_way.append(self._executor.evaluate(self._rows(plan, slot), [name]))
            total += sum(float(to_local(each.result())[index]) for each in under_way)
        return total / max(tokens, 1), tokens

    def _rows(self, plan: Plan, slot: Slot) -> Microbatch:
        rows = [
            assemble(
                pieces_of_evaluation(slot.replicas[replica], self._sets, self._index),
                capacity_tokens=plan.capacity_tokens,
                tile_tokens=plan.tile_tokens,
                max_segments=self._segments,
            )
            for replica in self._executor.local_replicas
        ]
        return Microbatch(*(np.stack(leaves) for leaves in zip(*rows, strict=True)))

    def _plan(self, name: str) -> Plan:
        lengths = self._sets[name].lengths.tolist()
        job = AdapterJob(name=name, sample_tokens=lengths, global_batch=len(lengths))
        return make_plan(
            [job],
            capacity_tokens=self._config.batch.capacity_tokens,
            num_stages=1,
            data_parallel=self._config.mesh.replicas,
            tile_tokens=self._config.batch.tile_tokens,
            time_limit_s=0,  # one pass, no search: every process must find the same plan, however busy it is
            seed=0,
        )
