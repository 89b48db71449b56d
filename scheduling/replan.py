"""Replanning: the slots that have run stay, the rest is planned again for other adapters or devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from scheduling.checks import check_jobs
from scheduling.cost_model import CostModel
from scheduling.errors import PlanError
from scheduling.packing.problem import make_problem, to_slots
from scheduling.plan import Plan
from scheduling.planner import effort_of, fill
from scheduling.types import AdapterJob, Limits, as_whole
from scheduling.verify import verify_plan


def replan(
    plan: Plan,
    *,
    at_slot: int,
    add: Sequence[AdapterJob] = (),
    extend: Sequence[AdapterJob] = (),
    cancel: Sequence[str] = (),
    finish: Sequence[str] = (),
    pause: Sequence[str] = (),
    resume: Sequence[str] = (),
    weights: Mapping[str, float] | None = None,
    num_stages: int | None = None,
    data_parallel: int | None = None,
    time_limit_s: float = 0.5,
    seed: int = 0,
    search_evaluations: int | None = None,
    cost_model: CostModel | None = None,
    most_open: int | None = None,
    rests: Mapping[str, Sequence[int]] | None = None,
) -> Plan:
    """Keeps slots [0, at_slot), plans the rest again at the required distance to them, and verifies the new plan.

    Args:
        at_slot: first slot that has not started.
        add: new adapters.
        extend: adapters with a longer stream, cut where it ended before.
        cancel: adapters that stop at once; a begun batch is left without its step.
        finish: adapters that complete the batch they have begun, and end there.
        pause: adapters that stop at once and can be resumed, in the middle of a batch if need be.
        resume: adapters that continue where they were paused.
        weights: new weights of adapters.
        num_stages, data_parallel: of the rest, if the run moves to another mesh. The pipeline drains for a move, so
            no distance to slots [0, at_slot) is needed.
        time_limit_s, seed, search_evaluations, cost_model, most_open, rests: as in `make_plan`.

    Raises:
        PlanError: an unknown adapter, a slot outside the plan, or jobs that cannot be planned.

    >>> from scheduling import make_plan
    >>> plan = make_plan([AdapterJob(name, [600] * 8, 2) for name in "ab"], capacity_tokens=1280, num_stages=2)
    >>> shorter = replan(plan, at_slot=4, cancel=["b"])
    >>> shorter.slots[:4] == plan.slots[:4], shorter.num_slots < plan.num_slots
    (True, True)
    >>> wider = replan(plan, at_slot=4, data_parallel=2)
    >>> [len(slot.replicas) for slot in wider.slots]
    [1, 1, 1, 1, 2, 2, 2]
    """
    effort = effort_of(time_limit_s, search_evaluations)
    longer = {job.name: job for job in extend}
    _check_request(plan, at_slot, [*longer, *cancel, *finish, *pause, *resume, *(weights or {})], resume)
    _check_longer(plan, longer)
    progress = {job.name: _Progress(plan, job, at_slot) for job in plan.jobs}
    jobs = [*_changed_jobs(plan, progress, longer, weights or {}, finish), *add]
    not_begun = [name for name in finish if progress[name].batches == 0]
    stopped = {name: slot for name, slot in plan.stopped if name not in resume}
    stopped |= dict.fromkeys([*cancel, *pause, *not_begun], at_slot)
    limits = _check_jobs(plan, jobs, num_stages, data_parallel)
    moves = (limits.num_stages, limits.data_parallel) != (plan.num_stages, plan.data_parallel)
    moves |= any(layout.end > at_slot for layout in plan.earlier)  # the kept slots end before a move
    positions = [_remaining(job, progress.get(job.name), job.name in stopped) for job in jobs]
    ready = [progress[job.name].ready if job.name in progress and not moves else 0 for job in jobs]
    bound, slots = 0, ()
    if any(len(left) for left in positions):
        left = [some.tolist() for some in positions]
        problem = make_problem(jobs, limits, left=left, ready=ready, most_open=most_open, rests=rests)
        bound, filling = fill(problem, positions, effort, seed, cost_model=cost_model)
        slots = to_slots(problem, filling)
    replanned = replace(
        plan,
        jobs=tuple(jobs),
        slots=plan.slots[:at_slot] + slots,
        num_stages=limits.num_stages,
        data_parallel=limits.data_parallel,
        seed=seed,
        lower_bound=at_slot + bound,
        stopped=tuple(stopped.items()),
        earlier=plan.layouts_before(at_slot) if moves else plan.earlier,
    )
    verify_plan(replanned)
    return replanned


class _Progress:
    """Progress of a job before a slot.

    Attributes:
        done: per position of the stream, whether it has run.
        batches: number of batches that have begun.
        ready: first slot, counted from `at_slot`, in which the next sample may run.
    """

    def __init__(self, plan: Plan, job: AdapterJob, at_slot: int):
        self.done = np.zeros(job.num_samples, bool)
        last: dict[int, int] = {}
        for index, slot in enumerate(plan.slots[:at_slot]):
            for ref in slot.samples:
                if ref.adapter == job.name:
                    self.done[ref.epoch * len(job.sample_tokens) + ref.sample] = True
                    last[ref.batch] = index
        self.batches = max(last) + 1 if last else 0
        first_batch = job.batch_of(int(np.argmin(self.done))) if not self.done.all() else job.num_batches
        before = last.get(first_batch - 1)  # a begun batch may continue at once: its predecessor is far enough away
        self.ready = 0 if before is None else max(0, before + plan.num_stages - at_slot)


def _changed_jobs(
    plan: Plan,
    progress: Mapping[str, _Progress],
    longer: Mapping[str, AdapterJob],
    weights: Mapping[str, float],
    finish: Sequence[str],
) -> list[AdapterJob]:
    """The jobs of the plan: extended, with new weights, and cut after the batch that they have begun."""
    jobs = [longer.get(job.name, job) for job in plan.jobs]
    jobs = [replace(job, weight=weights.get(job.name, job.weight)) for job in jobs]
    return [_cut_after_begun(job, progress[job.name]) if job.name in finish else job for job in jobs]


def _check_jobs(plan: Plan, jobs: Sequence[AdapterJob], num_stages: int | None, data_parallel: int | None) -> Limits:
    """Checks the jobs and returns the limits of the new plan."""
    return check_jobs(
        jobs,
        capacity_tokens=plan.sizes,
        num_stages=plan.num_stages if num_stages is None else num_stages,
        data_parallel=plan.data_parallel if data_parallel is None else data_parallel,
        tile_tokens=plan.tile_tokens,
    )


def _remaining(job: AdapterJob, progress: _Progress | None, stopped: bool) -> np.ndarray:
    if stopped:
        return np.zeros(0, np.int64)
    if progress is None:
        return np.arange(job.num_samples)
    return np.setdiff1d(np.arange(job.num_samples), np.flatnonzero(progress.done))


def _cut_after_begun(job: AdapterJob, progress: _Progress) -> AdapterJob:
    return replace(job, max_batches=progress.batches) if progress.batches else job


def _check_longer(plan: Plan, longer: Mapping[str, AdapterJob]) -> None:
    """Checks that extended adapters keep their planned samples and batches."""
    for name, job in longer.items():
        before = plan.job_of[name]
        end = before.num_samples
        same = job.stream[:end].tolist() == before.stream.tolist() and job.global_batch == before.global_batch
        if not same or job.num_samples <= end or job.cuts != (*(cut for cut in before.cuts if cut < end), end):
            raise PlanError(
                "plan.extend",
                f"{name} does not continue its planned stream",
                why=f"its stream must be equal up to sample {end}, be cut there, and be longer",
            )


def _check_request(plan: Plan, at_slot: object, names: Sequence[str], resume: Sequence[str]) -> None:
    slot = as_whole(at_slot)
    if slot is None or not 0 <= slot <= plan.num_slots:
        raise PlanError("plan.slot", f"at_slot must be from 0 to {plan.num_slots}, not {at_slot!r}")
    adapters = ", ".join(plan.job_of)
    for name in names:
        if name not in plan.job_of:
            raise PlanError("plan.unknown-adapter", f"the plan has no adapter {name!r}", fix=f"one of: {adapters}")
    for name in resume:
        if name not in dict(plan.stopped):
            raise PlanError("plan.not-paused", f"{name} is not paused", fix="resume only paused adapters")
