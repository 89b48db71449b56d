"""Result of a simulated cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from scheduling.online.check import Refusal
from scheduling.online.ledger import Accounts
from scheduling.online.sharing import IsolatedRate, fair_shares
from scheduling.online.types import Job, User

# Fairness between users: Jain's index, and a fair cluster to compare completion times with.


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index: (Σ x)² / (n Σ x²); 1 if all are equal, 1/n if one has everything.

    >>> jain([1.0, 1.0]), jain([1.0, 0.0])
    (1.0, 0.5)
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


@dataclass(slots=True)
class _Left:
    """A job in the fair cluster, with the GPU-seconds that it still needs."""

    work_s: float
    job: Job
    gpus: int


def fair_finishes_s(
    jobs: Sequence[Job], isolated: Mapping[str, IsolatedRate], users: Mapping[str, User], gpus: int
) -> dict[str, float]:
    """When each job would end if every user had a fair share of its own at all times.

    The GPUs are shared max–min fairly by weight between the users with unfinished jobs. A user runs its shortest jobs
    first on its share, each on at most the GPUs of its best mesh. There are no groups, and nothing has to start.

    Args:
        jobs: in order of arrival.
        isolated: rate of every job on its best mesh.
    """
    coming, queues, finish_s, now = deque(jobs), dict[str, list[_Left]](), dict[str, float](), 0.0
    while coming or queues:
        served = _serve(queues, users, float(gpus))
        until = min([now + share.work_s / rate for share, rate in served] + [coming[0].arrival_s if coming else inf])
        for share, rate in served:
            share.work_s -= rate * (until - now)
            if share.work_s <= 1e-6 * rate:
                finish_s[share.job.name] = until
                queues[share.job.user].remove(share)
        now = until
        while coming and coming[0].arrival_s <= now:
            job = coming.popleft()
            rate = isolated[job.name]
            queue = queues.setdefault(job.user, [])
            queue.append(_Left(rate.gpu_s(job.steps), job, rate.mesh.gpus))
            queue.sort(key=lambda share: (share.work_s, share.job.name))
        queues = {user: queue for user, queue in queues.items() if queue}
    return finish_s


def _serve(queues: Mapping[str, Sequence[_Left]], users: Mapping[str, User], gpus: float) -> list[tuple[_Left, float]]:
    """The jobs that train now, with their GPUs."""
    demand = [min(sum(entry.gpus for entry in queue), users[user].max_gpus or inf) for user, queue in queues.items()]
    shares = fair_shares(demand, [users[user].weight for user in queues], gpus)
    served: list[tuple[_Left, float]] = []
    for share, queue in zip(shares, queues.values(), strict=True):
        for entry in queue:
            gpu_share = min(share, float(entry.gpus))
            if gpu_share <= 1e-9:
                break
            served.append((entry, gpu_share))
            share -= gpu_share
    return served


class Ended(NamedTuple):
    """How a job ended that did not take all of its steps: "early", "failed" or "cancelled"."""

    how: str
    steps: float


class Span(NamedTuple):
    """A period in which a job trained in a group."""

    job: str
    group: str
    start_s: float
    end_s: float
    steps: float


@dataclass(frozen=True, kw_only=True)
class ClusterResult:
    """A simulated run.

    Args:
        jobs: in order of arrival.
        finish_s, start_s: per job, seconds since 0. A job starts when it first trains. One that failed or was cancelled
            finishes then, and counts in no mean over jobs.
        ended: jobs that did not take all of their steps.
        slowdown: per job, its time in groups over its isolated time on its fair share of the same GPUs.
        isolated: rate of every job on its best mesh.
        preemptions: number of times that a running job went back to the queue.
        decisions: (seconds, text) of every change.
        refusals: decisions that the checker refused, which changed nothing.
        spans: periods of training of every job.
        accounts: totals of the cluster.
    """

    policy: str
    jobs: tuple[Job, ...]
    gpus: int
    finish_s: dict[str, float]
    ended: dict[str, Ended]
    start_s: dict[str, float]
    slowdown: dict[str, float]
    isolated: dict[str, IsolatedRate]
    preemptions: int
    decisions: tuple[tuple[float, str], ...]
    refusals: tuple[Refusal, ...]
    spans: tuple[Span, ...]
    accounts: Accounts

    @cached_property
    def completed(self) -> tuple[Job, ...]:
        """Jobs with a result, each with the steps that it took."""
        lost = {name for name, ending in self.ended.items() if ending.how != "early"}
        return tuple(
            replace(job, steps=max(1, round(self.ended[job.name].steps))) if job.name in self.ended else job
            for job in self.jobs
            if job.name not in lost
        )

    @cached_property
    def jct_s(self) -> dict[str, float]:
        """Job completion times: finish − arrival."""
        return {job.name: self.finish_s[job.name] - job.arrival_s for job in self.completed}

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first arrival to the last finish."""
        return max(self.finish_s.values(), default=0.0) - min((job.arrival_s for job in self.jobs), default=0.0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all jobs with a result / makespan."""
        return sum(job.tokens for job in self.completed) / self.makespan_s if self.makespan_s else 0.0

    @property
    def utilisation(self) -> float:
        """Share of GPU time in groups that train, while jobs wait; over the whole run if no job ever waits."""
        of = self.accounts
        if of.waiting_gpu_s:
            return of.waiting_busy_s / of.waiting_gpu_s
        return self.overall_utilisation

    @property
    def overall_utilisation(self) -> float:
        """Share of GPU time in groups that train, over the whole run, including times with too little work."""
        return self.accounts.busy_s / self.accounts.gpu_s if self.accounts.gpu_s else 0.0

    @property
    def fairness(self) -> float:
        """Jain's index over users of (work received / work under max–min fair shares).

        Work is tokens times their isolated cost. Shares follow the weights of the users with unfinished jobs.
        """
        gpu_s, entitled_gpu_s = self.accounts.user_got, self.accounts.user_entitled
        return jain([gpu_s[user] / entitled_gpu_s[user] for user in gpu_s if entitled_gpu_s[user] > 0])

    @cached_property
    def finish_time_fairness(self) -> dict[str, float]:
        """Per job, its completion time over that on an equal share of the GPUs. At most 1: sharing did not delay it.

        The equal share is that of the mean number of unfinished jobs in the job's time. The job takes its best mesh
        if the share is as large, otherwise longer in proportion.
        """
        jobs = self.jobs
        arrival = np.array([job.arrival_s for job in jobs])
        finish = np.array([self.finish_s[job.name] for job in jobs])
        times = np.concatenate([arrival, finish])
        order = np.argsort(times, kind="stable")
        times, present = times[order], np.cumsum(np.repeat([1.0, -1.0], len(jobs))[order])
        until = np.concatenate([[0.0], np.cumsum(present[:-1] * np.diff(times))])  # job-seconds until each time
        crowd = np.interp(finish, times, until) - np.interp(arrival, times, until)
        crowd /= np.where(finish > arrival, finish - arrival, 1.0)  # a job may be cancelled as it arrives
        fairness: dict[str, float] = {}
        around = {job.name: others for job, others in zip(jobs, crowd.tolist(), strict=True)}
        for job in self.completed:
            others = around[job.name]
            best = self.isolated[job.name]
            fair_s = best.step_s * job.steps * max(1.0, others * best.mesh.gpus / self.gpus)
            fairness[job.name] = self.jct_s[job.name] / fair_s
        return fairness

    @cached_property
    def user_ratio(self) -> dict[str, float]:
        """Per user, the mean completion time of its jobs over that on a fair share of its own.

        In the fair cluster every user with unfinished jobs has a max–min fair share of the GPUs at all times, and runs
        its shortest jobs first on them: no groups, no more GPUs than a job's best mesh, and nothing to start.
        """
        fair_s = fair_finishes_s(self.completed, self.isolated, self.accounts.users, self.gpus)
        of_user = dict[str, list[Job]]()
        for job in self.completed:
            of_user.setdefault(job.user, []).append(job)
        return {
            user: sum(self.jct_s[job.name] for job in jobs) / sum(fair_s[job.name] - job.arrival_s for job in jobs)
            for user, jobs in of_user.items()
        }

    def summary(self) -> dict[str, float]:
        """The figures of one table row."""
        jct = np.array(list(self.jct_s.values())) if self.completed else np.zeros(1)
        slow = np.array(list(self.slowdown.values())) if self.slowdown else np.ones(1)
        finish = np.array(list(self.finish_time_fairness.values())) if self.completed else np.ones(1)
        bounds = {job.name: job.max_slowdown for job in self.jobs if job.name in self.slowdown}
        deadlines = [self.finish_s[job.name] <= job.deadline_s for job in self.completed if job.deadline_s is not None]
        return {
            "jct_mean_s": float(jct.mean()),
            "jct_p50_s": float(np.percentile(jct, 50)),
            "jct_p95_s": float(np.percentile(jct, 95)),
            "jct_p99_s": float(np.percentile(jct, 99)),
            "makespan_s": self.makespan_s,
            "tokens_per_s": self.tokens_per_s,
            "utilisation": self.utilisation,
            "overall_utilisation": self.overall_utilisation,
            "slowdown_p99": float(np.percentile(slow, 99)),
            "slowdown_max": float(slow.max()),
            "bounds_broken": float(sum(self.slowdown[name] > bound + 1e-9 for name, bound in bounds.items())),
            "fairness": self.fairness,
            "worst_user": max(self.user_ratio.values(), default=1.0),
            "finish_fairness_mean": float(finish.mean()),
            "finish_fairness_p99": float(np.percentile(finish, 99)),
            "preemptions": float(self.preemptions),
            "refusals": float(len(self.refusals)),
            "deadlines_met": float(np.mean(deadlines)) if deadlines else 1.0,
        }
