"""What a run does besides training, while training waits: evaluations, and the copies of saves. Starts no backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lorafusion_jax.config.schema import HalvingSettings, JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.planning.held_out import first_loss_key, size_of_set
from lorafusion_jax.planning.memory import DEVICE_BYTES, USABLE, memory_problem, stage_memory
from scheduling import CostModel, Plan

# Bytes of state per second that a device copies in its own memory, of every device that plans are for: half of
# the data sheet's bandwidth, for it reads and writes. Where the copy does not fit, the state goes to the host; PCIe 5
# without pinned memory.
COPY_BYTES_S: Mapping[str, float] = {
    "h200": 2.4e12, "h100": 1.7e12, "a100-40gb": 0.78e12, "a100": 1.02e12, "l40s": 0.43e12, "a6000": 0.38e12,
    "rtx6000-ada": 0.48e12, "cpu": 5e9,
}  # fmt: skip
FIRST_SAVE_MINUTES = 2.0  # at most, so that little is lost while a user still tries things
TO_HOST_BYTES_S = 15e9
NO_HALVING = HalvingSettings()
LEFT_OUT = ("start-up and compiling", "writing the last checkpoint", "a disk slower than the time between two saves")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """How often a run pauses, and for how long in all.

    Attributes:
        evaluations: before the first step, and after steps.
        saves: checkpoints.
    """

    evaluations: int
    evaluation_s: float
    saves: int
    saving_s: float


def evaluations(step: int, num_steps: int, every: int | None, halving: HalvingSettings = NO_HALVING) -> int:
    """Counts an adapter's evaluations after `step`: each `every` steps, where adapters are compared, and at the end.

    >>> evaluations(0, 10, 4), evaluations(4, 8, 4), evaluations(0, 10, None), evaluations(10, 10, 4)
    (3, 1, 1, 0)
    >>> evaluations(0, 10, 4, HalvingSettings(first_step=2))  # at 2, 4 and 8
    4
    """
    if step >= num_steps:
        return 0
    between = 0 if every is None else num_steps // every - step // every
    at_halvings = sum(step < at and not (every and at % every == 0) for at in halving.steps(num_steps))
    return between + at_halvings + (every is None or num_steps % every != 0)


def saves(plan: Plan, every_steps: int | None, every_minutes: float | None, duration_s: float) -> int:
    """Counts a run's checkpoints, the one at its end with them.

    >>> from scheduling import AdapterJob, make_plan
    >>> job = AdapterJob(name="law", sample_tokens=[64] * 8, global_batch=2)
    >>> plan = make_plan([job], capacity_tokens=128, num_stages=1)
    >>> saves(plan, 2, None, 60.0), saves(plan, None, 15, 3600.0), saves(plan, None, None, 60.0)
    (2, 5, 1)
    """
    at, since, last = {plan.num_slots}, 0, -1
    for slot, _, _ in sorted(plan.batches_ending()):
        if every_steps is not None and since >= every_steps and slot > last:  # looked at before a slot is let in
            at.add(last + 1)
            since = 0
        since, last = since + 1, slot
    if every_steps is not None and since >= every_steps:
        at.add(last + 1)
    if every_minutes is None:
        return len(at)
    first = 60 * min(every_minutes, FIRST_SAVE_MINUTES)
    return len(at) + max(math.ceil((duration_s - first) / (60 * every_minutes)), 0)


def predicted_pauses(
    config: JobConfig,
    model: ModelConfig,
    prepared: Prepared,
    plan: Plan,
    costs: CostModel,
    *,
    duration_s: float,
    device: str,
) -> Pauses:
    """Predicts what a whole run waits for, at the rates that its microbatches are predicted with.

    Args:
        duration_s: of its slots.
    """
    every, count, seconds, first_losses = config.train.eval_every_steps, 0, 0.0, set()
    adapters = {adapter.name: adapter for adapter in config.adapters}
    for name, data in prepared.adapters.items():
        if data.eval is not None:
            times = 1 + evaluations(0, plan.job_of[name].num_batches, every, config.halving)
            count += times
            key = first_loss_key(adapters[name], data.eval)
            is_known = key is not None and key in first_losses
            first_losses.add(key)
            seconds += (times - is_known) * _evaluation_s(config, data.eval.lengths, plan, costs)
    times = saves(plan, config.save.every_steps, config.save.every_minutes, duration_s + seconds)
    return Pauses(
        evaluations=count,
        evaluation_s=seconds,
        saves=times,
        saving_s=times * (_copy_s(config, model, device) + _refill_s(plan, costs)),
    )


def _evaluation_s(config: JobConfig, lengths: np.ndarray, plan: Plan, costs: CostModel) -> float:
    """Forward passes of the held-out samples through the stages."""
    size, count = size_of_set(lengths, config.batch, config.mesh)
    squares = float(np.square(lengths.astype(np.float64)).sum()) / (count * plan.data_parallel)
    forward = [costs.stage(s).forward.seconds(size, squares) for s in range(plan.num_stages)]
    return sum(forward) + (count - 1) * max(forward)


def _refill_s(plan: Plan, costs: CostModel) -> float:
    """Idle time of a stage while the pipeline drains and fills again."""
    stages = [costs.stage(stage) for stage in range(plan.num_stages)]
    passes = [
        stage.forward.seconds(plan.capacity_tokens, 0) + stage.backward.seconds(plan.capacity_tokens, 0)
        for stage in stages
    ]
    return (plan.num_stages - 1) * sum(passes) / plan.num_stages


def _copy_s(config: JobConfig, model: ModelConfig, device: str) -> float:
    """The fullest stage's copy of its state, on its device if there is room."""
    memory = stage_memory(memory_problem(config, model))
    sizes = [stage.adapters + stage.sums + stage.optimizers for stage in memory]
    room = USABLE * DEVICE_BYTES.get(device, float("inf"))
    fits = all(stage.total + size <= room for stage, size in zip(memory, sizes, strict=True))
    return max(sizes) / (COPY_BYTES_S[device] if fits else TO_HOST_BYTES_S)
