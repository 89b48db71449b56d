"""Trains one adapter of a run for a few steps, jointly and alone, and compares loss and gradient of every step.

All trainings start from the run's settings and data. The joint one follows the run's plan. The others follow its steps,
so every gradient is computed at the same weights. Nothing is written.

Packing may change a gradient by rounding only: sums have another order, and in bfloat16 activations are rounded at
other rows. How much that is depends on dtype, depth, widths and kernels, so it is measured: the adapter trains alone
twice, by its plan and by one that packs the same samples otherwise. The joint gradient g and the gradients h and h' of
the two must satisfy, in every tensor,

    ‖g - h‖ <= FACTOR · max(‖h' - h‖, typical · ‖h‖)    typical: the median of ‖h' - h‖ / ‖h‖

A median below one ROUNDING says nothing: packing otherwise left most values as they were, as it does with a batch of
one sample. Then typical is ROUNDING · sqrt(8 L) of L layers: each has eight products whose inputs are rounded
independently.

An optimizer step is elementwise arithmetic. From equal gradients it must move the weights equally, up to MOVED.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.warm_start import read_warm_starts, reread_warm_starts
from lorafusion_jax.config.references import adapters_with_references
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.stack import without_places
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.errors import ConfigError, quoted
from lorafusion_jax.planning.training_plan import plan_training
from lorafusion_jax.report.events import RunEvent, StepTaken
from lorafusion_jax.report.record import check_record
from lorafusion_jax.session.base import check_mesh
from lorafusion_jax.session.batch_end import ClosedBatch
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.state import adapter_arrays
from lorafusion_jax.training.hooks import Hooks
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.loop import PlanRun
from lorafusion_jax.training.references import read_references
from lorafusion_jax.training.resume_run import checked_base
from lorafusion_jax.training.state import AdapterProgress, Progress
from scheduling import Plan
from scheduling.types import Slot

FACTOR = 4.0  # between two differences of one kind
ROUNDING = {"float32": 2.0**-21, "bfloat16": 2.0**-9}
PRODUCTS = 8  # of a layer
MOVED = 1e-5  # of what the steps moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Relative difference of joint and separate training in one quantity, and its bound."""

    step: int
    tensor: str
    value: float
    bound: float

    @property
    def excess(self) -> float:
        """Above 1 if the difference is too large; infinite for NaN."""
        return self.value / self.bound if self.value == self.value else np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of an adapter trained jointly and alone.

    Attributes:
        others: number of other adapters with rows in the joint slots.
        differences: loss and gradients of every step, and what all steps moved; the worst first.
    """

    adapter: str
    steps: int
    others: int
    differences: tuple[Difference, ...]

    @property
    def good(self) -> bool:
        return all(difference.excess <= 1 for difference in self.differences)


def compare_alone(run: Path, name: str, steps: int) -> Comparison:
    """Trains an adapter of a run for a few steps, jointly and alone, and compares every step.

    Raises:
        ConfigError: `verify.adapter`, the run has no such adapter; `verify.rollout`, an adapter sampled its rows.
        LoraFusionError: there is no run, or its plan, data or base model changed since.
    """
    folder = RunFolder(run)
    plan, record, config = folder.read_plan(), folder.read_record(), folder.read_config()
    names = [adapter.name for adapter in config.adapters]
    if name not in names:
        raise ConfigError(
            "verify.adapter", f"{run} has no adapter '{name}'.", fix=f"lorafusion verify {quoted(run)} {names[0]}"
        )
    if sampling := [adapter.name for adapter in config.adapters if adapter.rollout.is_on]:
        raise ConfigError(
            "verify.rollout",
            f"{', '.join(sampling)} of {run} trained on answers that are not kept.",
            fix="train the adapter alone from a job file of its own, and compare its rewards",
        )
    prepared = prepare(config)
    check_record(record, prepared, plan)
    prepared = read_references(run, record, config, prepared, adapters_with_references(config))
    checked_base(record, config, False)
    reread_warm_starts(record.get("warm_starts", {}), config)
    return compare_job(_on_layout_of(config, plan), prepared, plan, name, steps)


def compare_job(config: JobConfig, prepared: Prepared, plan: Plan, name: str, steps: int) -> Comparison:
    """Compares the first steps of an adapter by a plan of its job with those of the adapter alone."""
    config = without_places(config)
    steps = min(steps, plan.job_of[name].num_batches)
    joint = first_steps(plan, name, steps)
    with closing(WatchedSession(Job(config=config, prepared=prepared, plan=joint), name)) as session:
        watched = session.run()
    only = config.model_copy(update={"adapters": (config.adapter(name),)})
    only_data = Prepared(tokenizer=prepared.tokenizer, adapters={name: prepared.adapters[name]})
    alone = first_steps(plan_training(only, only_data), name, steps)
    plain, repacked = (
        _follow(watched, Job(config=only, prepared=only_data, plan=packed), name)
        for packed in (alone, packed_otherwise(alone))
    )
    return Comparison(
        adapter=name,
        steps=steps,
        others=len({ref.adapter for slot in joint.slots for ref in slot.samples}) - 1,
        differences=compare(watched, plain, repacked, ROUNDING[config.base.dtype]),
    )


def first_steps(plan: Plan, name: str, steps: int) -> Plan:
    """Returns the plan cut after the slot in which an adapter takes its last of `steps`, on its first layout."""
    last = next(slot for slot, adapter, batch in plan.batches_ending() if (adapter, batch) == (name, steps - 1))
    first = plan.layouts[0]
    end = min(last + 1, first.end)
    return replace(
        plan,
        slots=plan.slots[:end],
        num_stages=first.num_stages,
        data_parallel=first.data_parallel,
        earlier=(),
        stopped=tuple((job.name, end) for job in plan.jobs),  # incomplete batches take no step
    )


def packed_otherwise(plan: Plan) -> Plan:
    """Returns a plan of the same samples with other microbatches: every slot becomes two, in reverse order."""
    slots = [half for slot in plan.slots for half in _halves(slot)]
    stopped = tuple((name, 2 * slot) for name, slot in plan.stopped)
    return replace(plan, slots=tuple(slots), stopped=stopped)


def _halves(slot: Slot) -> list[Slot]:
    later = tuple(part[len(part) // 2 :][::-1] for part in slot.replicas)
    earlier = tuple(part[: len(part) // 2][::-1] for part in slot.replicas)
    return [replace(slot, replicas=replicas) for replicas in (later, earlier)]


def compare(joint: Watched, alone: Watched, otherwise: Watched, rounding: float) -> tuple[Difference, ...]:
    """Compares joint training with separate training.

    Args:
        alone, otherwise: both follow the steps of `joint`.
        rounding: relative difference by one rounding.

    Returns:
        All differences, the worst first.
    """
    differences: list[Difference] = []
    for step, gradients in enumerate(zip(joint.gradients, alone.gradients, otherwise.gradients, strict=True), 1):
        together, by_itself, repacked = (_by_layer(gradient) for gradient in gradients)
        noise = {name: _relative(repacked[name], by_itself[name]) for name in by_itself}
        typical = float(np.median(list(noise.values())))
        if typical < rounding:
            layers = max(len(leaf) for leaf in alone.gradients[step - 1].values())
            typical = rounding * (PRODUCTS * layers) ** 0.5
        losses = joint.losses[step - 1], alone.losses[step - 1]
        differences.append(_difference(step, "loss", np.asarray(losses[0]), np.asarray(losses[1]), FACTOR * typical))
        differences += [
            _difference(step, name, together[name], by_itself[name], FACTOR * max(noise[name], typical))
            for name in by_itself
        ]
    first, together, by_itself = (_by_layer(tensors) for tensors in (joint.first, joint.last, alone.last))
    start = _by_layer(alone.first)
    for name in by_itself:
        differences.append(_difference(0, f"first {name}", first[name], start[name], rounding))
        moved, expected = together[name] - first[name], by_itself[name] - start[name]
        differences.append(_difference(len(joint.losses), f"steps of {name}", moved, expected, MOVED))
    return tuple(sorted(differences, key=lambda difference: (-difference.excess, difference.step, difference.tensor)))


def _difference(step: int, tensor: str, x: np.ndarray, y: np.ndarray, bound: float) -> Difference:
    return Difference(step=step, tensor=tensor, value=_relative(x, y), bound=bound)


def _by_layer(tensors: Tensors) -> dict[str, np.ndarray]:
    """Splits arrays of all layers: layers.self_attn.q_proj.lora_a → layers.0.self_attn.q_proj.lora_a, …"""
    return {
        name.replace("layers.", f"layers.{layer}.", 1): array
        for name, leaf in tensors.items()
        for layer, array in enumerate(leaf)  # of another leaf than a layer's: one
    }


def _relative(x: np.ndarray, y: np.ndarray) -> float:
    difference, size = float(np.linalg.norm(x - y)), float(np.linalg.norm(y))
    return difference / size if size else (np.inf if difference else difference)


def _on_layout_of(config: JobConfig, plan: Plan) -> JobConfig:
    """Returns the job with the mesh on which its run began."""
    first = plan.layouts[0]
    if not plan.earlier:
        return config
    mesh = {"stages": first.num_stages, "data": first.data_parallel, "fsdp": 1, "layers": None}
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=mesh)})


def _follow(joint: Watched, job: Job, name: str) -> Watched:
    with closing(WatchedSession(job, name)) as session:
        return session.run(follow=joint)


type Tensors = Mapping[str, np.ndarray]  # leaf -> array of all layers
type Closed = list[Future[ClosedBatch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The steps of one adapter.

    Attributes:
        losses, gradients, closed: of each step.
        first, last: weights before the first and after the last step.
    """

    losses: Sequence[float]
    gradients: Sequence[Tensors]
    closed: Sequence[Closed]
    first: Tensors
    last: Tensors


class WatchedSession:
    """A session of a job that runs plans from the job's start and watches one adapter. Close it at the end."""

    def __init__(self, job: Job, name: str):
        check_mesh(job.config)
        self._job, self._name = job, name
        self._session = Session.open(job.config, job.prepared)

    def run(self, follow: Watched | None = None) -> Watched:
        """Trains by the plan of the job.

        Args:
            follow: takes the steps of this run instead of its own.
        """
        session, name, plan = self._session, self._name, self._job.plan
        session.start_all(read_warm_starts(self._job.config))
        session.finish_loading()
        progress = Progress(
            adapters={job.name: AdapterProgress(name=job.name, num_steps=job.num_batches) for job in plan.jobs}
        )
        losses: list[float] = []
        gradients: list[Tensors] = []
        batches: list[Closed] = []

        def emit(event: RunEvent) -> None:
            if isinstance(event, StepTaken) and event.adapter == name:
                losses.append(event.loss)

        def before_step(adapter: str, closed: Closed) -> Closed:
            if adapter != name:
                return closed
            step = len(gradients)
            gradients.append(self._gradient())
            batches.append(closed)
            if follow is None:
                return closed
            self._replace_gradient(follow.gradients[step])
            return follow.closed[step]

        session.take_data(self._job.config, self._job.prepared, progress.adapters)
        first = self._weights()
        session.batch_ends.before_step = before_step
        hooks = Hooks(save=lambda wait: None, evaluate=lambda *_: None, finish=lambda *_: None)
        PlanRun(self._job, session, progress, emit, hooks).run()
        losses += [np.nan] * (len(gradients) - len(losses))  # of a step that was refused
        return Watched(losses=losses, gradients=gradients, closed=batches, first=first, last=self._weights())

    def close(self) -> None:
        self._session.close()

    @property
    def _index(self) -> int:
        return self._session.index[self._name]

    def _weights(self) -> Tensors:
        return self._session.read(self._name, optimizer=False)().weights

    def _gradient(self) -> Tensors:
        index = self._index
        return adapter_arrays([part.result() for part in self._session.executor.read(lambda s: s.gradient(index))])

    def _replace_gradient(self, gradient: Tensors) -> None:
        replace = partial(_replace, index=self._index, gradient=gradient)
        for part in self._session.executor.read(replace):
            part.result()


def _replace(stage: Stage, *, index: int, gradient: Tensors) -> None:
    stage.replace_gradient(index, gradient)
