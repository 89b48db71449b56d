"""Evaluates one adapter: the mean loss and metrics of its objective over its held-out set, without dropout."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax import Array

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.stack import stack_of
from lorafusion_jax.data.assemble import (
    EACH_ONE,
    Microbatch,
    Weights,
    assemble,
    pieces_of_evaluation,
    segment_weights,
    stacked,
)
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.objective.batch import finished_metrics, metric_names
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.planning.training_plan import plan_of_set
from lorafusion_jax.session.batches import places, reserved_segments, teacher_state
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.move import to_local
from scheduling import Plan, SampleRef, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        loss: mean loss of the objective; for supervised fine-tuning, of the token losses, in nats.
        tokens: number of loss tokens of the set.
        metrics: metrics of the objective.
    """

    loss: float
    tokens: int
    metrics: Mapping[str, float]


def finish_evaluation(chosen: Chosen, samples: TokenizedSet, sums: Mapping[str, float]) -> Evaluation:
    """Returns the evaluation of a set from the sums "loss" and those of the metrics over all of it."""
    tokens = int(samples.loss_mask.sum())
    count = len(samples) if chosen.of_samples else max(tokens, 1)
    means = {key: total / count for key, total in sums.items()}
    return Evaluation(loss=means.pop("loss"), tokens=tokens, metrics=finished_metrics(chosen, means))


class Evaluator:
    """Evaluates the current weights of adapters on the run's stages."""

    def __init__(self, config: JobConfig, prepared: Prepared, executor: Executor):
        self._config, self._executor = config, executor
        held_out = {adapter.name: prepared.adapters[adapter.name].eval for adapter in config.adapters}
        self._sets = {name: samples for name, samples in held_out.items() if samples is not None}
        self._index = stack_of(config).index
        self._plans = {name: plan_of_set(config, name, samples.lengths) for name, samples in self._sets.items()}
        self._chosen = {adapter.name: adapter.objective.chosen for adapter in config.adapters}
        self._weights = {
            name: Weights(1.0, 1.0, segment_weights(samples)) if self._chosen[name].of_samples else EACH_ONE
            for name, samples in self._sets.items()
        }
        parts = [
            [ref.adapter for ref in part]
            for plan in self._plans.values()
            for slot in plan.slots
            for part in slot.replicas
        ]
        self._state = teacher_state(config)
        # One shape, so one compilation, for all adapters. The program computes the losses of all of them.
        data = {adapter.name: prepared.adapters[adapter.name].train for adapter in config.adapters} | self._sets
        segments, self._table = places(config, data, parts)
        self._segments = max(segments, reserved_segments(config, config.batch.largest))

    def __call__(self, name: str) -> Evaluation:
        plan, index, chosen = self._plans[name], self._index[name], self._chosen[name]
        in_flight = deque()
        sums = dict.fromkeys(("loss", *metric_names([chosen])), 0.0)

        def add(totals: Mapping[str, Array]) -> None:
            for key in sums:
                sums[key] += float(to_local(totals[key])[index])

        with self._executor.blaming(None, None, [name]):
            for slot in plan.slots:
                # Enough in flight to keep every stage busy, but activations do not pile up between stages.
                if len(in_flight) > len(self._executor.stages):
                    add(in_flight.popleft().result())
                in_flight.append(self._executor.evaluate(self._rows(plan, slot), [name]))
            for pending in in_flight:
                add(pending.result())
        return finish_evaluation(chosen, self._sets[name], sums)

    def empty(self) -> Microbatch | None:
        """Returns a microbatch of padding, for compilation; None if no adapter is evaluated."""
        return self._assemble([() for _ in self._executor.local_replicas]) if self._sets else None

    def _rows(self, plan: Plan, slot: Slot) -> Microbatch:
        return self._assemble([slot.replicas[replica] for replica in self._executor.local_replicas])

    def _assemble(self, replicas: Sequence[Sequence[SampleRef]]) -> Microbatch:
        batch = self._config.batch
        rows = [
            assemble(
                pieces_of_evaluation(samples, self._sets, self._index, self._weights),
                capacity_tokens=batch.largest,
                tile_tokens=batch.tile_tokens,
                max_segments=self._segments,
                max_adapters=1,
                table=self._table,
                state=self._state,
            )
            for samples in replicas
        ]
        return stacked(rows)
