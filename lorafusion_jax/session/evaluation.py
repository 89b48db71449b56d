"""Evaluates one adapter: the mean loss and metrics of its objective over its held-out set, without dropout."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from jax import Array

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.data.references import EVAL, TRAIN
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.objective.batch import finished_metrics, metric_names
from lorafusion_jax.objective.protocol import Chosen
from lorafusion_jax.planning.held_out import size_of_set
from lorafusion_jax.session.assembler import Replicas, Shape, places, refs_of_set, reserved_segments, teacher_state
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.move import to_local
from lorafusion_jax.session.task import Task


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


def evaluate(
    executor: Executor, place: int, task: Task, samples: TokenizedSet, slots: Iterable[Microbatch]
) -> Evaluation:
    """Evaluates an adapter on a set. Waits.

    Args:
        place: its place among the stacked adapters.
        slots: the set, in microbatches.
    """
    name, objective = task.name, task.chosen
    in_flight: deque[Future[dict[str, Array]]] = deque()
    sums = dict.fromkeys(("loss", *metric_names([objective])), 0.0)

    def add(totals: Mapping[str, Array]) -> None:
        for key in sums:
            sums[key] += float(to_local(totals[key])[place])

    with executor.blaming(None, None, [name]):
        for rows in slots:
            # Enough in flight to keep every stage busy, but activations do not pile up between stages.
            if len(in_flight) > len(executor.stages):
                add(in_flight.popleft().result())
            in_flight.append(executor.evaluate(rows, [name]))
        for pending in in_flight:
            add(pending.result())
    return finish_evaluation(objective, samples, sums)


class HeldOut:
    """The held-out sets of a job's adapters, packed alone, each in microbatches of the size that suits it.

    A program for each size evaluates all sets that have it.

    Attributes:
        shapes: of the microbatches, by their tokens.
    """

    def __init__(self, config: JobConfig, tasks: Mapping[str, Task]):
        held_out = {name: task.source.sets.get(EVAL) for name, task in tasks.items()}
        sets = {name: samples for name, samples in held_out.items() if samples is not None}
        data = {name: task.source.sets[TRAIN] for name, task in tasks.items()} | sets
        parts: dict[int, list[list[str]]] = {}
        self._slots: dict[str, tuple[int, list[Replicas]]] = {}
        for name, samples in sets.items():
            size = size_of_set(samples.lengths, config.batch, config.mesh).tokens
            slots = refs_of_set(config, name, samples, size)
            self._slots[name] = size, slots
            parts.setdefault(size, []).extend([name] * len(part) for replicas in slots for part in replicas)
        self.shapes = {size: _shape(config, data, size, of_size) for size, of_size in sorted(parts.items())}

    @property
    def set_shapes(self) -> list[Shape]:
        """Of what compiles at the start."""
        return list(self.shapes.values())

    def pack_held_out(self, task: Task, samples: TokenizedSet) -> tuple[Shape, list[Replicas]]:
        """Returns the set of a task, packed."""
        del samples  # unused
        size, slots = self._slots[task.name]
        return self.shapes[size], slots


def _shape(config: JobConfig, data: Mapping[str, TokenizedSet], tokens: int, parts: Sequence[Sequence[str]]) -> Shape:
    segments, table = places(config, data, parts)
    return Shape(
        capacity_tokens=tokens,
        segments=max(segments, reserved_segments(config, tokens)),
        adapters=1,
        table=table,
        state=teacher_state(config),
    )
