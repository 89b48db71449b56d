"""Baseline policies; interface and rates are those of ours.

Some give every job its own mesh, others let jobs of one base share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduling.online.policies.draft import Draft, DraftGroup
from scheduling.online.rates import MESHES, Kind, Rates
from scheduling.online.sharing import GroupRate, IsolatedRate
from scheduling.online.state import ClusterState, Decision, JobState
from scheduling.online.types import Job


class Baseline:
    """What the baselines share."""

    mixes = True
    promises: frozenset[str] = frozenset()

    def __init__(self, rates: Rates):
        self.rates = rates

    def decide(self, state: ClusterState, now: float) -> list[Decision]:
        state.check_clock(now)
        draft = Draft(state)
        self._fill(draft, now)
        return draft.decisions()

    def _fill(self, draft: Draft, now: float) -> None:
        """Places jobs in a draft of the next decisions."""
        raise NotImplementedError

    def _sizes(self, draft: Draft) -> list[tuple[Kind, int]]:
        """(kind, GPUs of the largest worker) of the workers that are up."""
        largest: dict[Kind, int] = {}
        for worker in draft.state.workers.values():
            largest[worker.kind] = max(largest.get(worker.kind, 0), worker.gpus)
        return list(largest.items())

    def _isolated_rates(self, draft: Draft, job: Job) -> list[tuple[IsolatedRate, Kind]]:
        """The job's best mesh on every kind of worker that it fits on, fewest GPU-seconds first."""
        options = [
            (rate, kind)
            for kind, most in self._sizes(draft)
            if (rate := self.rates.best_isolated_rate(job, kind, most))
        ]
        return sorted(options, key=lambda option: option[0].gpu_s(1))

    def _left_s(self, draft: Draft, state: JobState, now: float) -> float:
        options = self._isolated_rates(draft, state.job)
        return state.left_steps(now) * options[0][0].step_s if options else float("inf")

    def _open_single(self, draft: Draft, state: JobState, why: str) -> DraftGroup | None:
        """Opens the mesh with the fewest GPU-seconds for a job; None if no block of that size is free."""
        for rate, kind in self._isolated_rates(draft, state.job):
            if block := draft.block(state.job.base_name, rate.mesh.gpus, kind):
                return draft.open(state.job.base_name, block, rate.mesh, [state.job.name], why)
        return None


class Fifo(Baseline):
    """First come, first served; every job has its own mesh until it ends."""

    name = "fifo"

    def _fill(self, draft: Draft, now: float) -> None:
        for job in draft.waiting():
            if self._open_single(draft, job, "it has waited longest") is None:
                break


class Backfill(Baseline):
    """First come, first served, with backfill (EASY): a later job may start if it does not delay the first that waits.

    The first job keeps the block of GPUs that is free soonest. A later job takes other GPUs, or ends before.
    """

    name = "backfill"

    def _fill(self, draft: Draft, now: float) -> None:
        reserved: _Block | None = None
        for job in draft.waiting():
            if reserved is None and self._open_single(draft, job, "it has waited longest") is None:
                reserved = self._first_free(draft, job, now)
            elif reserved is not None:
                self._backfill(draft, job, reserved, now)

    def _first_free(self, draft: Draft, job: JobState, now: float) -> _Block | None:
        """The block that a job gets first, if nothing else starts; None if it fits on no worker that is up."""
        blocks: list[_Block] = []
        for rate, kind in self._isolated_rates(draft, job.job)[:1]:
            for worker in (candidate for candidate in draft.state.workers.values() if candidate.kind == kind):
                for first in range(0, worker.gpus - rate.mesh.gpus + 1, rate.mesh.gpus):
                    gpus = range(first, first + rate.mesh.gpus)
                    members = [name for group in draft.groups_on(worker.name, gpus) for name in group.members]
                    free_s = max((self._left_s(draft, draft.state.jobs[name], now) for name in members), default=0.0)
                    blocks.append(_Block(free_s, worker.name, gpus))
        return min(blocks, key=lambda block: (block.free_s, block.worker, block.gpus.start), default=None)

    def _backfill(self, draft: Draft, job: JobState, reserved: _Block, now: float) -> None:
        for rate, kind in self._isolated_rates(draft, job.job):
            lasts_s = self.rates.changes.open_s(job.job.shape) + rate.step_s * job.left_steps(now)
            for worker, first in draft.blocks(rate.mesh.gpus, kind):
                apart = first >= reserved.gpus.stop or first + rate.mesh.gpus <= reserved.gpus.start
                if lasts_s <= reserved.free_s or worker != reserved.worker or apart:
                    why = "it delays no earlier job"
                    draft.open(job.job.base_name, (worker, first), rate.mesh, [job.job.name], why)
                    return


class _Block(NamedTuple):
    """Adjacent GPUs of a worker that are free in some seconds."""

    free_s: float
    worker: str
    gpus: range


class Srtf(Baseline):
    """Shortest remaining time first; every job has its own mesh, and a shorter job preempts longer ones.

    A job of a higher priority comes before all of a lower one.

    Args:
        settle_s: seconds of training before which a group is neither preempted nor changed.
    """

    name = "srtf"

    def __init__(self, rates: Rates, settle_s: float = 0.0):
        super().__init__(rates)
        self.settle_s = settle_s

    def _fill(self, draft: Draft, now: float) -> None:
        """Starts waiting jobs, shortest first, until one finds no GPUs and cannot preempt a longer job."""
        seconds_of = {name: self._left_s(draft, job, now) for name, job in draft.state.jobs.items()}
        for job in sorted(draft.waiting(), key=lambda job: (-job.job.priority, seconds_of[job.job.name], job.job.name)):
            if not self._isolated_rates(draft, job.job):
                continue
            why = f"{seconds_of[job.job.name]:.0f} s left, the least of all waiting jobs"
            while not (opened := self._open_single(draft, job, why)) and self._shrink_another(draft, now):
                pass
            if not opened:
                if not self._make_room(draft, job, seconds_of, now):
                    break
                self._open_single(draft, job, why)

    def settled(self, group: DraftGroup, now: float) -> bool:
        """Whether a group has trained for so long that it may be preempted."""
        return group.is_new or group.ready_s + self.settle_s <= now or not self.settle_s

    def _shrink_another(self, draft: Draft, now: float) -> bool:
        """Takes GPUs from a job that runs on, for one that waits; meshes of this policy never shrink."""
        del draft, now  # unused
        return False

    def _make_room(self, draft: Draft, job: JobState, seconds_of: dict[str, float], now: float) -> bool:
        """Frees the block whose shortest job is longest, if each has more left than this job and its start."""
        job_left_s = seconds_of[job.job.name] + self.rates.changes.open_s(job.job.shape)
        best, last = None, (-job.job.priority, job_left_s)
        rank = {name: (-state.job.priority, seconds_of[name]) for name, state in draft.state.jobs.items()}
        rate, kind = self._isolated_rates(draft, job.job)[0]
        for worker in draft.state.workers.values():
            if worker.kind != kind:
                continue
            for first in range(0, worker.gpus - rate.mesh.gpus + 1, rate.mesh.gpus):
                inside = set(range(first, first + rate.mesh.gpus))
                groups = [
                    g for g in draft.groups.values() if g.members and g.worker == worker.name and inside & set(g.gpus)
                ]
                first = min((rank[name] for group in groups for name in group.members), default=last)
                if first > last and all(set(group.gpus) <= inside and self.settled(group, now) for group in groups):
                    best, last = groups, first
        for group in best or ():
            draft.empty(group, "a shorter job preempts it")
        return best is not None


class ElasticSrtf(Srtf):
    """Shortest remaining time first, on as many GPUs as there are: the simplest policy that scales out and in.

    While no job waits, the job that gains most takes twice its GPUs. A job that finds no GPUs halves the meshes of jobs
    that have more than their best one, before it preempts longer ones.
    """

    name = "elastic-srtf"

    def _fill(self, draft: Draft, now: float) -> None:
        super()._fill(draft, now)
        if not draft.waiting():
            while self._double(draft, now):
                pass

    def _shrink_another(self, draft: Draft, now: float) -> bool:
        """Halves the mesh of the job that has most GPUs beyond its best mesh."""
        spare: list[tuple[float, str, DraftGroup, IsolatedRate]] = []
        for group in draft.groups.values():
            if len(group.members) == 1 and len(group.gpus) > 1 and self.settled(group, now):
                job, kind, half = draft.state.jobs[group.members[0]].job, draft.kind(group), len(group.gpus) // 2
                best, rate = self.rates.best_isolated_rate(job, kind), self.rates.isolated_rate(job, kind, half)
                if best and rate and half >= best.mesh.gpus:
                    spare.append((-len(group.gpus) / best.mesh.gpus, group.name, group, rate))
        if not spare:
            return False
        _, _, group, rate = min(spare, key=lambda entry: entry[:2])
        draft.halve(group)
        group.mesh = rate.mesh
        group.why.append("another job waits for half of its GPUs")
        return True

    def _double(self, draft: Draft, now: float) -> bool:
        """Doubles the mesh of the job that ends sooner by most, including the stop."""
        best: tuple[float, DraftGroup, IsolatedRate, tuple[str, int]] | None = None
        for group in draft.groups.values():
            size = 2 * len(group.gpus)
            first = group.gpus[0] // size * size
            if len(group.members) != 1 or size > MESHES[-1] or first + size > len(draft.free[group.worker]):
                continue
            alone = draft.groups_on(group.worker, range(first, first + size)) == [group]
            if not alone or not self.settled(group, now):
                continue
            state, kind = draft.state.jobs[group.members[0]], draft.kind(group)
            rate, before = (self.rates.isolated_rate(state.job, kind, gpus) for gpus in (size, len(group.gpus)))
            if not rate or not before:
                continue
            stop_s = 0.0 if group.is_new else self.rates.changes.open_s(state.job.shape)
            gain = (before.step_s - rate.step_s) * state.left_steps(now) - stop_s
            if gain > 0 and (best is None or gain > best[0]):
                best = gain, group, rate, (group.worker, first)
        if best is None:
            return False
        gain, group, rate, block = best
        draft.close(group)
        draft.open(group.base, block, rate.mesh, group.members, f"GPUs are free: it ends {gain:.0f} s sooner")
        return True


class Mlora(Baseline):
    """First come, first served, in groups of up to four jobs of one base that alternate batch by batch (mLoRA)."""

    name = "mlora"
    mixes = False

    def __init__(self, rates: Rates, batch: int = 4):
        super().__init__(rates)
        self.batch = batch

    def _fill(self, draft: Draft, now: float) -> None:
        waiting: list[JobState] = draft.waiting()
        while waiting:
            first = waiting[0].job
            jobs = [job_state.job for job_state in waiting if job_state.job.base_name == first.base_name][: self.batch]
            opened = False
            for rate, kind in self._turns(draft, jobs):
                if block := draft.block(first.base_name, rate.mesh.gpus, kind):
                    why = f"batch of {len(jobs)}, {first.name} has waited longest"
                    draft.open(first.base_name, block, rate.mesh, [job.name for job in jobs], why)
                    opened = True
                    break
            if not opened:
                break
            names = {job.name for job in jobs}
            waiting = [job_state for job_state in waiting if job_state.job.name not in names]

    def _turns(self, draft: Draft, jobs: Sequence[Job]) -> list[tuple[GroupRate, Kind]]:
        """The best mesh of a group on every kind of worker that it fits on, most tokens per GPU first."""
        meshes: list[tuple[GroupRate, Kind]] = []
        for kind, most in self._sizes(draft):
            rates = [
                rate for gpus in MESHES if gpus <= most and (rate := self.rates.alternating_rate(jobs, kind, gpus))
            ]
            if rates:
                meshes.append((max(rates, key=lambda rate: rate.tokens_per_s / rate.mesh.gpus), kind))
        return sorted(meshes, key=lambda pair: -pair[0].tokens_per_s / pair[0].mesh.gpus)


class Packing(Baseline):
    """Every job starts at once where it fits: on free GPUs, else in the least loaded group of its base."""

    name = "packing"
    members = 16  # places of a session

    def _fill(self, draft: Draft, now: float) -> None:
        for job in draft.waiting():
            if self._open_single(draft, job, "GPUs are free") is None:
                self._join_least_loaded(draft, job)

    def _join_least_loaded(self, draft: Draft, job: JobState) -> None:
        same = [group for group in draft.groups.values() if group.base == job.job.base_name and group.members]
        for group in sorted(same, key=lambda group: (len(group.members) / len(group.gpus), group.name)):
            jobs = [draft.state.jobs[name].job for name in group.members] + [job.job]
            rate = self.rates.group(jobs, draft.kind(group), len(group.gpus)) if len(jobs) <= self.members else None
            if rate:
                group.members.append(job.job.name)
                group.mesh = rate.mesh
                group.why.append(f"{job.job.name} joins, least loaded of {len(same)}")
                return


class Tlora(Baseline):
    """tLoRA, as its abstract describes it.

    In order of arrival, a job joins the group of its base whose total throughput it raises most, if every member stays
    within its slowdown. Otherwise it takes free GPUs.
    """

    name = "tlora"

    def _fill(self, draft: Draft, now: float) -> None:
        for job in draft.waiting():
            best = self._best_group(draft, job)
            if best is not None:
                group, rate, gain = best
                group.members.append(job.job.name)
                group.mesh = rate.mesh
                group.why.append(f"{job.job.name} adds {gain:,.0f} tokens/s, slowdowns up to {max(rate.slowdowns):.2f}")
            else:
                self._open_single(draft, job, "no group has capacity for it")

    def _best_group(self, draft: Draft, job: JobState) -> tuple[DraftGroup, GroupRate, float] | None:
        best = None
        for group in draft.groups.values():
            if group.base != job.job.base_name or not group.members:
                continue
            jobs, kind = [draft.state.jobs[name].job for name in group.members], draft.kind(group)
            before = self.rates.group(jobs, kind, len(group.gpus))
            rate = self.rates.group([*jobs, job.job], kind, len(group.gpus))
            if before is None or rate is None or not rate.within_bounds:
                continue
            gain = rate.tokens_per_s - before.tokens_per_s
            if gain > 0 and (best is None or gain > best[2]):
                best = group, rate, gain
        return best
