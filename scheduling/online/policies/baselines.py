"""Baseline policies, with the same interface and the same rates as ours."""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.online.policies.draft import Draft, DraftGroup
from scheduling.online.rates import MESHES, Kind, Rates
from scheduling.online.sharing import GroupRate, IsolatedRate
from scheduling.online.state import ClusterState, Decision, JobState
from scheduling.online.types import Job


class _Baseline:
    mixes = True
    promises: frozenset[str] = frozenset()

    def __init__(self, rates: Rates):
        self.rates = rates

    def _sizes(self, draft: Draft) -> list[tuple[Kind, int]]:
        """(kind, GPUs of the largest worker) of the workers that are up."""
        largest: dict[Kind, int] = {}
        for worker in draft.state.workers.values():
            largest[worker.kind] = max(largest.get(worker.kind, 0), worker.gpus)
        return list(largest.items())

    def _isolated_rates(self, draft: Draft, job: Job) -> list[tuple[IsolatedRate, Kind]]:
        """The job's best mesh on every kind of worker that it fits on, fewest GPU-seconds first."""
        found = [
            (rate, kind)
            for kind, most in self._sizes(draft)
            if (rate := self.rates.best_isolated_rate(job, kind, most))
        ]
        return sorted(found, key=lambda one: one[0].gpu_s(1))

    def _left_s(self, draft: Draft, state: JobState, now: float) -> float:
        found = self._isolated_rates(draft, state.job)
        return state.left_steps(now) * found[0][0].step_s if found else float("inf")

    def _open_single(self, draft: Draft, state: JobState, why: str) -> DraftGroup | None:
        """Opens the mesh with the fewest GPU-seconds for a job; None if no block of that size is free."""
        for rate, kind in self._isolated_rates(draft, state.job):
            if block := draft.block(state.job.base_name, rate.mesh.gpus, kind):
                return draft.open(state.job.base_name, block, rate.mesh, [state.job.name], why)
        return None


class Fifo(_Baseline):
    """First come, first served; every job has its own mesh until it ends."""

    name = "fifo"

    def decide(self, state: ClusterState, now: float) -> list[Decision]:
        state.check_clock(now)
        draft = Draft(state)
        for job in draft.waiting():
            if self._open_single(draft, job, "it has waited longest") is None:
                break
        return draft.decisions()


class Srtf(_Baseline):
    """Shortest remaining time first; every job has its own mesh, and a shorter job preempts longer ones."""

    name = "srtf"

    def decide(self, state: ClusterState, now: float) -> list[Decision]:
        state.check_clock(now)
        draft = Draft(state)
        left = {name: self._left_s(draft, job, now) for name, job in state.jobs.items()}
        for job in sorted(draft.waiting(), key=lambda job: (left[job.job.name], job.job.name)):
            if not self._isolated_rates(draft, job.job):
                continue
            why = f"{left[job.job.name]:.0f} s left, the least of all waiting jobs"
            if self._open_single(draft, job, why) is None:
                if not self._make_room(draft, job, left):
                    break
                self._open_single(draft, job, why)
        return draft.decisions()

    def _make_room(self, draft: Draft, job: JobState, left: dict[str, float]) -> bool:
        """Frees the block whose shortest job is longest, if each has more left than this job and its start."""
        own = left[job.job.name] + self.rates.changes.open_s(job.job.shape)
        best, best_left = None, own
        rate, kind = self._isolated_rates(draft, job.job)[0]
        for worker in draft.state.workers.values():
            if worker.kind != kind:
                continue
            for first in range(0, worker.gpus - rate.mesh.gpus + 1, rate.mesh.gpus):
                inside = set(range(first, first + rate.mesh.gpus))
                there = [
                    g for g in draft.groups.values() if g.members and g.worker == worker.name and inside & set(g.gpus)
                ]
                shortest = min((left[name] for group in there for name in group.members), default=0.0)
                if shortest > best_left and all(set(group.gpus) <= inside for group in there):
                    best, best_left = there, shortest
        for group in best or ():
            draft.empty(group, "a shorter job preempts it")
        return best is not None


class Mlora(_Baseline):
    """First come, first served, in groups of up to four jobs of one base that alternate batch by batch (mLoRA)."""

    name = "mlora"
    mixes = False

    def __init__(self, rates: Rates, batch: int = 4):
        super().__init__(rates)
        self.batch = batch

    def decide(self, state: ClusterState, now: float) -> list[Decision]:
        state.check_clock(now)
        draft = Draft(state)
        waiting: list[JobState] = draft.waiting()
        while waiting:
            first = waiting[0].job
            jobs = [one.job for one in waiting if one.job.base_name == first.base_name][: self.batch]
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
            waiting = [one for one in waiting if one.job.name not in names]
        return draft.decisions()

    def _turns(self, draft: Draft, jobs: Sequence[Job]) -> list[tuple[GroupRate, Kind]]:
        """The best mesh of a group on every kind of worker that it fits on, most tokens per GPU first."""
        found: list[tuple[GroupRate, Kind]] = []
        for kind, most in self._sizes(draft):
            rates = [
                rate for gpus in MESHES if gpus <= most and (rate := self.rates.alternating_rate(jobs, kind, gpus))
            ]
            if rates:
                found.append((max(rates, key=lambda rate: rate.tokens_per_s / rate.mesh.gpus), kind))
        return sorted(found, key=lambda one: -one[0].tokens_per_s / one[0].mesh.gpus)


class Packing(_Baseline):
    """Every job starts at once where it fits: on free GPUs, else in the least loaded group of its base."""

    name = "packing"
    members = 16  # places of a session

    def decide(self, state: ClusterState, now: float) -> list[Decision]:
        state.check_clock(now)
        draft = Draft(state)
        for job in draft.waiting():
            if self._open_single(draft, job, "GPUs are free") is None:
                self._join_least_loaded(draft, job)
        return draft.decisions()

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


class Tlora(_Baseline):
    """tLoRA, as its abstract describes it.

    In order of arrival, a job joins the group of its base whose total throughput it raises most, if every member stays
    within its slowdown. Otherwise it takes free GPUs.
    """

    name = "tlora"

    def decide(self, state: ClusterState, now: float) -> list[Decision]:
        state.check_clock(now)
        draft = Draft(state)
        for job in draft.waiting():
            found = self._best_group(draft, job)
            if found is not None:
                group, rate, gain = found
                group.members.append(job.job.name)
                group.mesh = rate.mesh
                group.why.append(f"{job.job.name} adds {gain:,.0f} tokens/s, slowdowns up to {max(rate.slowdowns):.2f}")
            else:
                self._open_single(draft, job, "no group has capacity for it")
        return draft.decisions()

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
