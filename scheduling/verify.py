"""Verification of plans, independent of the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from scheduling.columns import SampleColumns
from scheduling.errors import PlanError
from scheduling.plan import Plan
from scheduling.types import AdapterJob

MOST_NAMED = 100_000  # missing samples that are violations of their own; more are one


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule."""

    code: str
    what: str


def verify_plan(plan: Plan, jobs: Sequence[AdapterJob] | None = None) -> None:
    """Checks that the plan trains exactly these jobs and follows every rule.

    * Each sample runs exactly once.
    * Batches run in order: first slot of batch j+1 ≥ last slot of batch j + S, unless the run moved to another layout
      between them, which empties the pipeline.
    * Σ over adapters of ⌈tokens / tile⌉ · tile ≤ the slot's capacity in every microbatch.
    * Every slot has a capacity of the plan.
    * The samples of an adapter are contiguous in a microbatch.

    Raises:
        PlanError: `plan.invalid`, with every violation in `problems`.

    >>> from scheduling import make_plan
    >>> job = AdapterJob("law", [700, 300, 512], global_batch=2)
    >>> verify_plan(make_plan([job], capacity_tokens=1024, num_stages=2), [job])
    """
    violations = find_violations(plan, jobs)
    if violations:
        raise PlanError(
            "plan.invalid",
            f"the plan breaks {len(violations)} rules",
            problems=tuple(f"[{violation.code}] {violation.what}" for violation in violations),
        )


def find_violations(plan: Plan, jobs: Sequence[AdapterJob] | None = None) -> list[Violation]:
    """Lists every violation; empty for a valid plan."""
    violations: list[Violation] = []
    expected_jobs = plan.jobs if jobs is None else tuple(jobs)
    if expected_jobs != plan.jobs:
        violations.append(Violation(code="plan.other-jobs", what="the plan was made for other jobs than these"))
    names = [job.name for job in expected_jobs]
    index_of = {name: index for index, name in enumerate(names)}
    if len(index_of) < len(names):
        violations.append(Violation(code="plan.duplicate-name", what="two jobs have the same name"))
    violations += _layouts(plan)
    columns = plan.columns if expected_jobs == plan.jobs else SampleColumns.of(plan.slots, index_of)
    violations += [
        Violation(code="plan.unknown-adapter", what=f"slot {slot} names {ref.adapter!r}")
        for slot in np.unique(columns.slot[columns.job < 0])
        for ref in plan.slots[int(slot)].samples
        if ref.adapter not in index_of
    ]
    table = columns.at(columns.job >= 0)
    violations += _sizes(plan)
    violations += _capacity(plan, expected_jobs, table)
    for job, rows in zip(expected_jobs, _by_job(table, len(expected_jobs)), strict=True):
        violations += _one_job(plan, job, rows)
    return violations


def _by_job(table: SampleColumns, count: int) -> Iterator[SampleColumns]:
    """Yields the rows of each job."""
    order = np.argsort(table.job, kind="stable")
    ends = np.searchsorted(table.job[order], np.arange(count + 1))
    for start, end in pairwise(ends.tolist()):
        yield table.at(order[start:end])


def _layouts(plan: Plan) -> list[Violation]:
    """Layouts that are out of order, and slots without one microbatch per replica."""
    violations: list[Violation] = []
    start = 0
    for end, _, replicas in plan.layouts:
        if end < start or (end == start and end < plan.num_slots):
            violations.append(
                Violation(code="plan.layouts", what=f"a layout ends at slot {end}, the previous one at {start}")
            )
        violations += [
            Violation(code="plan.replicas", what=f"slot {at} has {len(slot.replicas)} microbatches, not {replicas}")
            for at, slot in enumerate(plan.slots[start:end], start)
            if len(slot.replicas) != replicas
        ]
        start = end
    return violations


def _sizes(plan: Plan) -> list[Violation]:
    """Slots of a capacity that the plan does not have."""
    return [
        Violation(code="plan.capacity", what=f"slot {at} has a capacity of {capacity}, the plan has {list(plan.sizes)}")
        for at, capacity in enumerate(plan.slot_capacities)
        if capacity not in plan.sizes
    ]


def _capacity(plan: Plan, jobs: Sequence[AdapterJob], table: SampleColumns) -> list[Violation]:
    """Microbatches over capacity, and adapters whose samples are not contiguous."""
    violations: list[Violation] = []
    if table.job.size == 0:
        return violations
    starts = np.cumsum([0] + [len(job.sample_tokens) for job in jobs])
    lengths = np.concatenate([np.asarray(job.sample_tokens, np.int64) for job in jobs])
    within = (table.sample >= 0) & (table.sample < np.diff(starts)[table.job])
    tokens = np.where(within, lengths[np.where(within, starts[table.job] + table.sample, 0)], 0)
    width = int(table.replica.max()) + 1
    microbatch = table.slot * width + table.replica
    run_starts = np.r_[True, (np.diff(table.job) != 0) | (np.diff(microbatch) != 0)]
    run = np.cumsum(run_starts) - 1
    run_microbatch, run_job = microbatch[run_starts], table.job[run_starts]
    runs, counts = np.unique(np.stack([run_microbatch, run_job]), axis=1, return_counts=True)
    for at, job in runs[:, counts > 1].T:
        where = f"slot {at // width}"
        violations.append(
            Violation(code="plan.scattered", what=f"{where}: samples of {jobs[int(job)].name} are not contiguous")
        )
    run_tiles = -(-np.bincount(run, weights=tokens).astype(np.int64) // plan.tile_tokens)
    rows = np.bincount(run_microbatch, weights=run_tiles).astype(np.int64) * plan.tile_tokens
    room = np.repeat(np.array(plan.slot_capacities, np.int64), width)[: rows.size]
    for at in np.flatnonzero(rows > room):
        where = f"slot {at // width}, replica {at % width}"
        violations.append(Violation(code="plan.capacity", what=f"{where}: {rows[at]} rows in {room[at]}"))
    return violations


def _one_job(plan: Plan, job: AdapterJob, rows: SampleColumns) -> list[Violation]:
    position = rows.epoch * len(job.sample_tokens) + rows.sample
    real = (rows.sample >= 0) & (rows.sample < len(job.sample_tokens)) & (position >= 0) & (position < job.num_samples)
    real &= rows.batch == job.batch_of(position)
    violations = [
        Violation(
            code="plan.unknown-sample",
            what=f"slot {rows.slot[row]}: {job.name} has no sample {rows.sample[row]}"
            f" in epoch {rows.epoch[row]}, batch {rows.batch[row]}",
        )
        for row in np.flatnonzero(~real)
    ]
    position, batch, slot = position[real], rows.batch[real], rows.slot[real]
    lacking = job.num_samples - position.size
    if lacking > MOST_NAMED and job.name not in dict(plan.stopped):
        message = f"{job.name}: {lacking} of its {job.num_samples} samples are not planned"
        return [*violations, Violation(code="plan.missing", what=message)]
    return violations + _counts(plan, job, position) + _order(plan, job, batch, slot)


def _counts(plan: Plan, job: AdapterJob, position: np.ndarray) -> list[Violation]:
    count = np.bincount(position, minlength=job.num_samples)
    wrong = count > 1 if job.name in dict(plan.stopped) else count != 1
    violations: list[Violation] = []
    for at in np.flatnonzero(wrong):
        ref = job.ref(int(at))
        code = "plan.missing" if count[at] == 0 else "plan.duplicate"
        name = f"{job.name}: sample {ref.sample} of epoch {ref.epoch} (batch {ref.batch})"
        violations.append(Violation(code=code, what=f"{name} is planned {count[at]} times"))
    return violations


def _order(plan: Plan, job: AdapterJob, batch: np.ndarray, slot: np.ndarray) -> list[Violation]:
    """Checks that batches are in order and at least S slots apart, and that nothing runs after a stop."""
    violations: list[Violation] = []
    stop = dict(plan.stopped).get(job.name)
    if stop is not None and slot.size and slot.max() >= stop:
        violations.append(
            Violation(code="plan.stopped", what=f"{job.name} runs in slot {slot.max()}, but stopped before {stop}")
        )
    if slot.size == 0:
        return violations
    first = np.full(job.num_batches, np.iinfo(np.int64).max)
    last = np.full(job.num_batches, -1)
    np.minimum.at(first, batch, slot)
    np.maximum.at(last, batch, slot)
    present = np.flatnonzero(last >= 0)
    ends, stages = [layout.end for layout in plan.layouts], [layout.num_stages for layout in plan.layouts]
    last_layout, first_layout = (
        np.searchsorted(ends[:-1], slots, side="right") for slots in (last, first)
    )  # index of the layout
    for earlier, later in pairwise(present):
        distance = first[later] - last[earlier]
        least = stages[int(last_layout[earlier])] if last_layout[earlier] == first_layout[later] else 1
        if distance < least:
            message = (
                f"{job.name}: batch {later} starts in slot {first[later]}, batch {earlier} ends in slot {last[earlier]}"
            )
            code = "plan.order" if distance < 1 else "plan.distance"
            violations.append(Violation(code=code, what=f"{message}; {least} slots are needed between them"))
    return violations
