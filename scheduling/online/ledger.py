"""Accounts of a simulated cluster: GPU time, tokens, and the work of every user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduling.online.rates import Rates
from scheduling.online.sharing import GroupRate, IsolatedRate, Mesh, fair_shares
from scheduling.online.state import GroupState, UserState
from scheduling.online.types import Job, User, Worker


class GroupSpan(NamedTuple):
    """A period in which a group has the same members."""

    group: str
    worker: str
    base: str
    gpus: tuple[int, ...]
    members: tuple[str, ...]
    start_s: float
    ready_s: float
    end_s: float
    tokens_per_s: float
    density: float
    mesh: Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """Totals of a run.

    Args:
        gpu_s: GPU-seconds of all GPUs that were up, until the last job finished.
        busy_s: GPU-seconds in groups that trained.
        waiting_gpu_s, waiting_busy_s: the same, while at least one job waited.
        useful_s: busy time weighted by the density of slots.
        lost_tokens: tokens that were trained again after faults.
        users: who had jobs, by name.
        user_got: per user, GPU-seconds of work, counted as isolated time on the best mesh.
        user_entitled: the same in a cluster without groups that is max–min fair at all times.
        groups: every period of every group.
    """

    gpu_s: float
    busy_s: float
    waiting_gpu_s: float
    waiting_busy_s: float
    useful_s: float
    lost_tokens: float
    users: Mapping[str, User]
    user_got: dict[str, float]
    user_entitled: dict[str, float]
    groups: tuple[GroupSpan, ...]


class _Running(NamedTuple):
    state: GroupState
    rate: GroupRate | None
    since_s: float
    work: dict[str, float]  # per user, GPU-seconds of work a second


class Ledger:
    """Keeps the accounts as time advances."""

    def __init__(self, workers: Sequence[Worker], rates: Rates, users: Mapping[str, User], jobs: Mapping[str, Job]):
        self.rates, self.users, self.jobs = rates, dict(users), jobs
        self.kinds = list(dict.fromkeys((worker.kind, worker.gpus) for worker in workers))
        self.gpus_up = sum(worker.gpus for worker in workers)
        self.workers_up = {worker.name for worker in workers}
        self.running: dict[str, _Running] = {}
        self.members: dict[str, int] = {}  # per group
        self.demand: dict[str, float] = {}  # GPUs that a user's unfinished jobs would take without sharing
        self.present: dict[str, int] = {}
        self.placed: dict[str, int] = {}
        self.totals = dict.fromkeys(
            ("gpu_s", "busy_s", "waiting_gpu_s", "waiting_busy_s", "useful_s", "lost_tokens"), 0.0
        )
        self.got: dict[str, float] = dict.fromkeys(users, 0.0)
        self.entitled: dict[str, float] = dict.fromkeys(users, 0.0)
        self.shares: dict[str, float] | None = None
        self.spans: list[GroupSpan] = []

    def add_user(self, user: User) -> None:
        """Adds a user without work, unless it is known."""
        if user.name not in self.users:
            self.users[user.name] = user
            self.got[user.name] = self.entitled[user.name] = 0.0

    def set_user(self, user: User) -> None:
        """Sets weight and quota of a user; its account stays."""
        self.add_user(user)
        self.users[user.name], self.shares = user, None

    def arrive(self, job: Job) -> None:
        self._count(job, 1)

    def leave(self, job: Job) -> None:
        self._count(job, -1)

    def up(self, worker: Worker, is_up: bool) -> None:
        if is_up != (worker.name in self.workers_up):
            self.gpus_up += worker.gpus if is_up else -worker.gpus
            (self.workers_up.add if is_up else self.workers_up.discard)(worker.name)
            self.shares = None

    def lose(self, job: Job, steps: float) -> None:
        self.totals["lost_tokens"] += steps * job.tokens / job.steps
        self.got[job.user] -= steps * self._step_work(job)

    def set_group(self, state: GroupState, rate: GroupRate | None, now: float) -> None:
        self.drop_group(state.name, now)
        work: dict[str, float] = {}
        for name, steps in zip(state.members, rate.steps_per_s if rate else (), strict=True):
            job = self.jobs[name]
            work[job.user] = work.get(job.user, 0.0) + steps * self._step_work(job)
            self.placed[job.user] = self.placed.get(job.user, 0) + 1
        self.running[state.name] = _Running(state, rate, now, work)

    def drop_group(self, name: str, now: float) -> None:
        before = self.running.pop(name, None)
        if before is None:
            return
        for member in before.state.members:
            self.placed[self.jobs[member].user] -= 1
        if now > before.since_s:
            state, rate = before.state, before.rate
            self.spans.append(
                GroupSpan(
                    state.name,
                    state.worker,
                    state.base,
                    state.gpus,
                    state.members,
                    before.since_s,
                    min(max(state.ready_s, before.since_s), now),
                    now,
                    rate.tokens_per_s if rate else 0.0,
                    rate.density if rate else 0.0,
                    state.mesh,
                )
            )

    def close(self, now: float) -> Accounts:
        for name in list(self.running):
            self.drop_group(name, now)
        return Accounts(
            **self.totals,
            users=self.users,
            user_got=dict(self.got),
            user_entitled=dict(self.entitled),
            groups=tuple(self.spans),
        )

    def _count(self, job: Job, sign: int) -> None:
        self.demand[job.user] = self.demand.get(job.user, 0.0) + sign * self.isolated_rate(job).mesh.gpus
        self.present[job.user] = self.present.get(job.user, 0) + sign
        self.shares = None

    def isolated_rate(self, job: Job) -> IsolatedRate:
        """The rate of a job on its best mesh, on the first kind of worker that it fits on."""
        rates = (self.rates.best_isolated_rate(job, kind, gpus) for kind, gpus in self.kinds)
        return next(rate for rate in rates if rate)

    def _step_work(self, job: Job) -> float:
        return self.isolated_rate(job).gpu_s(1)

    def advance(self, start: float, end: float) -> None:
        """Adds the time between two events to the accounts."""
        seconds = end - start
        busy = useful = 0.0
        for group in self.running.values():
            training = end - max(start, group.state.ready_s)
            if group.rate is None or training <= 0:
                continue
            gpu_s = training * len(group.state.gpus)
            busy += gpu_s
            useful += gpu_s * group.rate.density
            for user, rate in group.work.items():
                self.got[user] += rate * training
        waits = any(present > self.placed.get(user, 0) for user, present in self.present.items())
        totals = self.totals
        totals["gpu_s"] += seconds * self.gpus_up
        totals["busy_s"] += busy
        totals["useful_s"] += useful
        if waits:
            totals["waiting_gpu_s"] += seconds * self.gpus_up
            totals["waiting_busy_s"] += busy
        if self.shares is None:
            self.shares = self._fair()
        for user, share in self.shares.items():
            self.entitled[user] += share * seconds

    def user_states(self) -> dict[str, UserState]:
        """The accounts of all users, up to the last `advance`."""
        return {name: UserState(user, self.got[name], self.entitled[name]) for name, user in self.users.items()}

    def _fair(self) -> dict[str, float]:
        names = [user for user, present in self.present.items() if present]
        weights = [self.users[user].weight for user in names]
        caps = [min(self.demand[user], self.users[user].max_gpus or float("inf")) for user in names]
        return dict(zip(names, fair_shares(caps, weights, float(self.gpus_up)), strict=True))
