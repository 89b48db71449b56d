"""The search of one decision: a draft of the cluster, and the jobs that wait in it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from math import inf
from operator import truediv
from typing import NamedTuple

from scheduling.online.costs import rank_class
from scheduling.online.patience import worker_sizes
from scheduling.online.policies.draft import Draft, DraftGroup
from scheduling.online.policies.ours.claims import Claims
from scheduling.online.policies.ours.settings import Settings
from scheduling.online.policies.ours.worth import Appraiser
from scheduling.online.rates import Kind, Rates
from scheduling.online.sharing import GroupRate
from scheduling.online.state import ClusterState
from scheduling.online.types import Job

LEAST_S = 1.0  # that a group is predicted to last; gains per second are divided by it
MOST_GROUPS = 40  # groups that one decision considers for joins and splits
Block = tuple[str, int]  # worker and first GPU


class Pack(NamedTuple):
    """Members of a possible new group, and the seconds until the last of them ends."""

    members: list[str]
    rate: GroupRate
    worth: float
    lasts_s: float


class Option(NamedTuple):
    """A change of a group's members, its gain, and the seconds for which the group stops."""

    gain: float
    members: list[str]
    rate: GroupRate
    stop_s: float


class Search:
    """What the moves share. Each move changes the draft through these methods, which keep the backlog up to date.

    Attributes:
        priority: of the jobs that are placed now; those of a higher one that still wait have found no place.
        backlog: waiting jobs of every base, most valuable first, up to this priority.
        overdue: waiting jobs that no later job of their weight may overtake.
        trained: jobs that have a group in the state, whether or not the draft has taken them out of it.
        protected: jobs that this decision placed and that have waited long; no other of its moves removes them, for
            later jobs may have started since.
        packs: cache of `packs.first_pack`.
        options: cache of `members.join_or_swap`: per group, the options of each waiting job, best first.
    """

    def __init__(self, rates: Rates, settings: Settings, state: ClusterState, now: float, claims: Claims):
        self.rates, self.settings, self.state, self.now, self.claims = rates, settings, state, now, claims
        self.priority, self._claims = 0, claims
        self.draft = Draft(state)
        self.appraiser = Appraiser(rates, settings, state, now, claims, self.draft)
        self.sizes = worker_sizes(state)
        self.kinds = tuple(dict.fromkeys(kind for kind, _ in self.sizes))
        self.backlog: dict[str, list[str]] = {}
        self.overdue = list(claims.overdue)
        self._first_overdue: dict[float, float] | None = None  # weight → earliest arrival
        self.protected: set[str] = set()
        self.trained = {name for name, job_state in state.jobs.items() if job_state.group is not None}
        self.packs: dict[tuple[str, Kind, int], Pack | None] = {}
        self.options: dict[str, dict[str, list[Option]]] = {}
        self._open_s: dict[str, float] = {}  # per base
        first = claims.priority
        self._claimed = {
            name: (-first.get(name, 0) if first else 0, -order, name) for name, order in claims.order.items()
        }

    def next_priority(self, below: float) -> int | None:
        """The highest priority of the jobs that wait in the draft, if it is less than `below`."""
        priorities = {state.job.priority for state in self.draft.waiting()}
        return max((priority for priority in priorities if priority < below), default=None)

    def begin(self, priority: int) -> None:
        """Places jobs of a priority from now on: claims are those at this priority, and so is the backlog."""
        self.priority, self.claims = priority, self._claims.at(priority)
        self.appraiser.use(self.claims)
        self.packs.clear()
        self.options.clear()
        self.backlog = {}
        for state in self.draft.waiting():
            if state.job.priority <= priority:
                self.backlog.setdefault(state.job.base_name, []).append(state.job.name)
        for names in self.backlog.values():
            names.sort(key=self._claimed.__getitem__)

    def job(self, name: str) -> Job:
        return self.state.jobs[name].job

    def open_s(self, name: str) -> float:
        """Seconds until a new session of a job's base trains."""
        job = self.job(name)
        if job.base_name not in self._open_s:
            self._open_s[job.base_name] = self.rates.changes.open_s(job.shape)
        return self._open_s[job.base_name]

    def move_s(self, name: str, workers: Iterable[str]) -> float:
        """Seconds for which running jobs stop for a new session on one of these workers, beside all that open there."""
        loading = max(map(self._loading, workers))
        return self.rates.changes.open_s(self.job(name).shape, loading) + self.rates.changes.move_s

    def _loading(self, worker: str) -> int:
        """Sessions of a worker that open, or will by this decision."""
        groups = self.draft.by_worker[worker].values()
        before = self.state.groups
        return sum([g.is_new or g.ready_s > self.now or g.gpus != before[g.name].gpus for g in groups])

    def change_s(self, group: DraftGroup, members: Sequence[str], rate: GroupRate) -> float:
        """Seconds for which a group stops to take these members."""
        if group.is_new:
            return self.move_s(members[0], [group.worker])
        same = group.mesh == rate.mesh and self._rank_class(members) <= self._rank_class(group.members)
        moves = not self.trained.isdisjoint(set(members).difference(self.state.groups[group.name].members))
        return self.rates.changes.stop_s(same) + (self.rates.changes.move_s if moves else 0.0)

    def stop_s(self, group: DraftGroup, members: Sequence[str], rate: GroupRate) -> float:
        """Seconds for which those that run stop by all that this decision changes in their group."""
        if group.is_new or (before := self.state.groups[group.name]).gpus != group.gpus:
            return self.move_s(members[0], [group.worker])
        same = before.mesh == rate.mesh and self._rank_class(members) <= self._rank_class(before.members or members)
        moves = not self.trained.isdisjoint(set(members).difference(before.members))
        return self.rates.changes.stop_s(same) + (self.rates.changes.move_s if moves else 0.0)

    def _rank_class(self, names: Sequence[str]) -> int:
        return rank_class([self.state.jobs[name].job.rank for name in names])

    def lasts_s(self, members: Sequence[str], rate: GroupRate) -> float:
        """Seconds until the last of these members ends, at least `LEAST_S`."""
        left_steps = (self.state.jobs[name].left_steps(self.now) for name in members)
        return max(LEAST_S, *map(truediv, left_steps, rate.steps_per_s))

    def start_s(self, base: str, block: Block, gpus: int, name: str) -> float:
        """Seconds until a group trains on a free block: fewer if an idle session of its base and size is there."""
        warm = self.draft.idle_session(base, block, gpus)
        return self.rates.changes.change_s if warm else self.open_s(name)

    def may_start(self, name: str) -> bool:
        """Whether starting a job overtakes no job whose patience is over."""
        if not self.overdue:
            return True
        if self._first_overdue is None:
            self._first_overdue = {}
            for other in self.overdue:
                earliest = self._first_overdue.get(other.job.weight, inf)
                self._first_overdue[other.job.weight] = min(earliest, other.job.arrival_s)
        job_state = self.state.jobs[name]
        return job_state.group is not None or not any(
            arrival_s < job_state.job.arrival_s and weight >= job_state.job.weight
            for weight, arrival_s in self._first_overdue.items()
        )

    def highest(self, names: Iterable[str]) -> int:
        """The highest priority of some jobs."""
        return max(self.claims.priority.get(name, 0) for name in names)

    def first_waiting(self, base: str) -> list[str]:
        """The most valuable waiting jobs of a base, without those that may not start."""
        names = self.backlog[base][: self.settings.candidates]
        return [name for name in names if self.may_start(name)] if self.overdue else names

    def best_sizes(self, waiting: Sequence[str]) -> list[int]:
        """The GPUs of the best mesh of the first waiting job, on the first kind of worker that it fits on."""
        if not waiting:
            return []
        rates = (self.rates.best_isolated_rate(self.job(waiting[0]), kind, most) for kind, most in self.sizes)
        return [rate.mesh.gpus for rate in rates if rate][:1]

    def poorest(self, groups: Sequence[DraftGroup]) -> list[DraftGroup]:
        """The groups with the least worth per GPU, if there are many: they have the most to gain."""
        with_members = [group for group in groups if group.members]
        return with_members if len(with_members) <= MOST_GROUPS else self.by_worth(with_members)[:MOST_GROUPS]

    def by_worth(self, groups: Sequence[DraftGroup]) -> list[DraftGroup]:
        """Groups sorted by worth per GPU, least first."""
        return sorted(groups, key=self.appraiser.worth_per_gpu)

    def change(self, group: DraftGroup, members: Sequence[str], rate: GroupRate, why: str) -> None:
        """Gives a group other members. Those that leave wait again."""
        for name in set(members) - set(group.members):
            self.backlog[group.base].remove(name)
            self._forget_packs(group.base)
        overdue_members = {job_state.job.name for job_state in self.overdue} & set(members)
        if overdue_members:
            self.protected |= overdue_members
            self.overdue = [job_state for job_state in self.overdue if job_state.job.name not in overdue_members]
            self._first_overdue = None
        for name in set(group.members) - set(members):
            self.release(name)
        group.members, group.mesh = list(members), rate.mesh
        group.why.append(why)
        self.changed(group)

    def open(self, base: str, block: Block, members: Sequence[str], rate: GroupRate, why: str) -> None:
        """Opens a group of waiting jobs."""
        group = self.draft.open(base, block, rate.mesh, [], "")
        group.why.pop()
        reason = self.appraiser.reason(members, rate, self.draft.kind(group))
        self.change(group, members, rate, f"{why}: {reason}")

    def close(self, group: DraftGroup) -> None:
        """Ends a group. Its members wait again."""
        for name in group.members:
            self.release(name)
        self.draft.close(group)
        self.appraiser.changed(group)

    def changed(self, group: DraftGroup) -> None:
        """Forgets what was known of a group."""
        self.appraiser.changed(group)
        self.options.pop(group.name, None)

    def release(self, name: str) -> None:
        """Puts a job back among those that wait."""
        base = self.job(name).base_name
        self._forget_packs(base)
        insort(self.backlog.setdefault(base, []), name, key=self._claimed.__getitem__)

    def _forget_packs(self, base: str) -> None:
        """Forgets packs of a base whose waiting jobs have changed. A quota ties the groups of all bases together."""
        if self.appraiser.quotas:
            self.packs.clear()
            self.options.clear()
        for key in [key for key in self.packs if key[0] == base]:
            del self.packs[key]
