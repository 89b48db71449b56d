"""Baseline policies that let jobs of one base share a mesh; interface and rates are those of ours."""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.online.policies.draft import Draft, DraftGroup
from scheduling.online.policies.single import Baseline
from scheduling.online.rates import MESHES, Kind, Rates
from scheduling.online.sharing import GroupRate
from scheduling.online.state import ClusterState, Decision, JobState
from scheduling.online.types import Job


class Mlora(Baseline):
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
        return draft.decisions()

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


class Tlora(Baseline):
    """tLoRA, as its abstract describes it.

    In order of arrival, a job joins the group of its base whose total throughput it raises most, if every member stays
    within its slowdown. Otherwise it takes free GPUs.
    """

    name = "tlora"

    def decide(self, state: ClusterState, now: float) -> list[Decision]:
        state.check_clock(now)
        draft = Draft(state)
        for job in draft.waiting():
            best = self._best_group(draft, job)
            if best is not None:
                group, rate, gain = best
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
