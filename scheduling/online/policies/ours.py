"""Our policy: groups that fill their GPUs, short jobs first, and every slowdown within its bound.

The utility of a configuration is  U = Σ over running jobs of  claim_i · rate_i / (left_i + START)^α.  Rates and
remaining work are in GPU-seconds of isolated training. α = 1 would run the shortest job on all GPUs, and α = 0 would
only fill the GPUs. In between, jobs share GPUs as long as that raises the total. A move is made if its gain over
`HORIZON_S` exceeds the loss while groups stop for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from scheduling.online.check import PATIENCE
from scheduling.online.policies.draft import Draft, DraftGroup
from scheduling.online.rates import Kind, Rates
from scheduling.online.sharing import GroupRate
from scheduling.online.state import ClusterState, Decision, JobState, held_gpus
from scheduling.online.types import Job

REPAIR_GAIN = 1.05  # minimum gain in worth for which a group stops for another mesh
SPLIT_FROM = 8  # minimum GPUs of a group that may be split in two
MOST_GROUPS = 40  # groups that one decision considers for joins and splits
URGENT = 30.0  # factor on the claim of an urgent job
OWED_S = 1800.0  # difference between users, in GPU-seconds, below which they count as equal

Figures = Callable[[Job, tuple[tuple[Kind, int], ...]], tuple[float, float]]


class Pack(NamedTuple):
    """Members of a possible new group."""

    members: list[str]
    rate: GroupRate
    worth: float


class Option(NamedTuple):
    """A change of a group's members, and its gain."""

    gain: float
    members: list[str]
    rate: GroupRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Parameters of the policy. Each switch turns off one idea, for ablations.

    Args:
        sharpness: α, the preference for short jobs.
        frugality: discount of groups that train slowly for their GPUs, while jobs wait.
        thrift: a new group's worth is divided by (its GPUs)^thrift, while more jobs wait than fit.
        start_work_s: START, GPU-seconds of work below which jobs count as equally short.
        horizon_s: expected duration of a move's effect.
        margin: minimum relative gain for which a job is preempted or a group is split.
        urgent: share of the patience after which a waiting job goes first.
        fairness: priority of users that received less than their share.
        most_members: places of a session.
        candidates: number of waiting jobs to try in a row without a gain.
        moves: maximum number of moves in one decision, except those onto free GPUs.
        grouping, residual, urgency, elasticity, preemption: switches. Without `residual` a group has at most four jobs,
            whatever capacity is left.
    """

    sharpness: float = 0.5
    frugality: float = 3.0
    thrift: float = 0.5
    start_work_s: float = 120.0
    horizon_s: float = 900.0
    margin: float = 0.1
    urgent: float = 0.4
    fairness: float = 1.0
    most_members: int = 12
    candidates: int = 4
    moves: int = 12
    grouping: bool = True
    residual: bool = True
    urgency: bool = True
    elasticity: bool = True
    preemption: bool = True


class Ours:
    """Groups jobs by their joint gain; grows, shrinks, merges and preempts groups if that pays off.

    Args:
        rates: predicts the rates of groups.
        settings: parameters of the policy.
    """

    mixes = True
    promises = frozenset({"bounds", "no starvation", "quotas"})

    def __init__(self, rates: Rates, settings: Settings | None = None, name: str = "ours"):
        self.rates, self.settings, self.name = rates, settings or Settings(), name
        self._known: dict[
            str, tuple[Job, tuple[tuple[Kind, int], ...], tuple[float, float]]
        ] = {}  # cache across decisions

    def decide(self, state: ClusterState, now: float) -> list[Decision]:
        """Returns the changes to make now; empty if no change pays off."""
        state.check_clock(now)
        if not state.jobs or not state.workers:
            return []
        return _Search(self.rates, self.settings, self._figures, state, now).run()

    def _figures(self, job: Job, sizes: tuple[tuple[Kind, int], ...]) -> tuple[float, float]:
        known = self._known.get(job.name)
        if known is None or known[0] is not job or known[1] != sizes:
            rates = (self.rates.best_isolated_rate(job, kind, most) for kind, most in sizes)
            best = next((rate for rate in rates if rate), None)
            figures = (best.step_s * best.mesh.gpus, best.step_s) if best else (0.0, 0.0)
            known = self._known[job.name] = (job, sizes, figures)
        return known[2]


class _Search:
    """The search of one decision: improves a draft of the cluster move by move.

    Args:
        figures: (GPU-seconds, seconds) of an isolated step of a job on workers of some kinds.
    """

    def __init__(self, rates: Rates, settings: Settings, figures: Figures, state: ClusterState, now: float):
        self.figures = figures
        self.rates, self.settings, self.state, self.now = rates, settings, state, now
        self.draft = Draft(state)
        self.sizes = tuple(dict.fromkeys((worker.kind, worker.gpus) for worker in state.workers.values()))
        self.kinds = tuple(dict.fromkeys(kind for kind, _ in self.sizes))
        self.work: dict[str, float] = {}  # GPU-seconds of an isolated step
        self.claim: dict[str, float] = {}  # U of a step per second
        self.order: dict[str, float] = {}  # U of a GPU-second of work per second: the order of jobs
        self.urgent: list[JobState] = []
        self.protected: set[str] = set()  # placed because they have waited long
        self.values: dict[str, float] = {}  # U of each group of the draft
        self.options: dict[str, tuple[tuple[str, ...], Option | None]] = {}
        self.packs: dict[tuple[str, Kind, int], Pack | None] = {}
        waiting = sum(one.group is None for one in state.jobs.values())
        gpus = sum(worker.gpus for worker in state.workers.values())
        self.frugality = settings.frugality * min(1.0, waiting / gpus)
        self.user_claims = self._user_claims()
        self.quotas = {name: most for name, user in state.users.items() if (most := user.user.max_gpus) is not None}
        for name, job in state.jobs.items():
            self._weigh(name, job)
        self.urgent.sort(key=lambda one: (one.job.arrival_s, one.job.name))
        # Their patience is over: no later job of their weight may start before them.
        self.barred = [one for one in self.urgent if one.waited(now) > 0.98 * self._patience_s(one.job)]

    def run(self) -> list[Decision]:
        self._repair()
        self.backlog = self._backlog()
        self._place_urgent()
        for _ in range(self.settings.moves):
            while self._fill_free():
                pass
            if not (self._join_or_swap() or self._split() or self._evict()):
                break
        if self.settings.elasticity:
            for _ in range(self.settings.moves):
                if not self._grow():
                    break
        return self.draft.decisions()

    # --- values of jobs

    def _weigh(self, name: str, state: JobState) -> None:
        job, settings, now = state.job, self.settings, self.now
        work, alone_s = self.figures(job, self.sizes)
        self.work[name] = work
        if not work:  # it fits on no worker that is up
            self.claim[name] = self.order[name] = 0.0
            return
        left = state.left_steps(now)
        claim = self.user_claims.get(job.user, 1.0) / (left * work + settings.start_work_s) ** settings.sharpness
        if job.priority:
            claim *= 100.0**job.priority
        if settings.urgency:
            waited = state.waited_s + (now - state.at_s if state.group is None else 0.0)
            late = job.deadline_s is not None and now < job.deadline_s < now + 1.5 * left * alone_s + 120.0
            if late or waited > settings.urgent * PATIENCE * alone_s * job.steps:
                claim *= URGENT
                if state.group is None:
                    self.urgent.append(state)
        self.order[name] = claim
        self.claim[name] = claim * work

    def _user_claims(self) -> dict[str, float]:
        """Raises the claims of users that received less than their max–min fair share of the cluster."""
        found: dict[str, float] = {}
        for name, user in self.state.users.items():
            owed = (user.entitled + OWED_S) / (max(0.0, user.got) + OWED_S)
            found[name] = min(20.0, max(0.05, owed**self.settings.fairness))
        return found

    def _patience_s(self, job: Job) -> float:
        return PATIENCE * self.figures(job, self.sizes)[1] * job.steps

    def _may_start(self, name: str) -> bool:
        one = self.state.jobs[name]
        return one.group is not None or not any(
            other.job.arrival_s < one.job.arrival_s and other.job.weight >= one.job.weight for other in self.barred
        )

    def _backlog(self) -> dict[str, list[str]]:
        """Waiting jobs of every base, most valuable first."""
        found: dict[str, list[str]] = {}
        for state in self.draft.waiting():
            found.setdefault(state.job.base_name, []).append(state.job.name)
        for names in found.values():
            names.sort(key=lambda name: (-self.order[name], name))
        return found

    # --- groups

    def _rate(self, names: Sequence[str], kind: Kind, gpus: int) -> GroupRate | None:
        if len(names) > self.settings.most_members or (len(names) > 1 and not self.settings.grouping):
            return None
        rate = self.rates.group([self.state.jobs[name].job for name in names], kind, gpus)
        if rate is None or not (rate.within_bounds or len(names) == 1):
            return None
        return rate if not self.quotas or self._within_quotas(names, gpus) else None

    def _within_quotas(self, names: Sequence[str], gpus: int) -> bool:
        """Whether a group of these jobs keeps its users within their quotas, given the other groups."""
        here = set(names)
        rest = [(len(g.gpus), g.members) for g in self.draft.groups.values() if not here & set(g.members)]
        held = held_gpus([*rest, (gpus, names)], self.state.jobs)
        users = {self.state.jobs[name].job.user for name in names} & self.quotas.keys()
        return all(held[user] <= self.quotas[user] for user in users)

    def _worth(self, names: Sequence[str], rate: GroupRate) -> float:
        """U of a group, discounted if it trains slowly for its GPUs while jobs wait."""
        worth = sum(self.claim[name] * steps for name, steps in zip(names, rate.steps_per_s, strict=True))
        if not self.frugality:
            return worth
        work = sum(self.work[name] * steps for name, steps in zip(names, rate.steps_per_s, strict=True))
        return worth * (work / rate.mesh.gpus) ** self.frugality

    def _value(self, group: DraftGroup) -> float:
        """U of a group of the draft."""
        if group.name not in self.values:
            jobs = [self.state.jobs[name].job for name in group.members]
            rate = self.rates.on_mesh(jobs, self.draft.kind(group), group.mesh) if jobs else None
            self.values[group.name] = self._worth(group.members, rate) if rate else 0.0
        return self.values[group.name]

    def _tolerates(self, names: Iterable[str], rate: GroupRate, members: Sequence[str], stall_s: float) -> bool:
        """Whether every running member stays within its bound to its end, including this stop and all earlier ones."""
        slowdown = dict(zip(members, rate.slowdowns, strict=True))
        steps = dict(zip(members, rate.steps_per_s, strict=True))
        for name in names:
            if name not in steps:
                continue
            mine = self.state.jobs[name]
            ahead = mine.left_steps(self.now) / steps[name]
            since = max(0.0, self.now - mine.at_s)
            before, alone = mine.in_groups_s + since, mine.alone_s + since / max(1.0, slowdown[name])
            if before + stall_s + ahead > mine.job.max_slowdown * (alone + ahead / slowdown[name]) and stall_s > 0:
                return False
        return True

    def _pack(self, base: str, kind: Kind, gpus: int, start: Sequence[str], waiting: Sequence[str]) -> Pack | None:
        """Adds waiting jobs to a group, most valuable first, while that raises its worth: (members, rate, worth)."""
        members, rate = list(start), self._rate(start, kind, gpus) if start else None
        if start and rate is None:
            return None
        worth = self._worth(members, rate) if rate else 0.0
        misses = 0
        for name in waiting:
            if misses >= self.settings.candidates or (members and not self.settings.grouping):
                break
            if not self._may_start(name):
                continue
            tried = self._rate([*members, name], kind, gpus)
            value = self._worth([*members, name], tried) if tried else 0.0
            if tried is not None and value > worth * (1.0 if members else 0.0):
                members, rate, worth, misses = [*members, name], tried, value, 0
                if not self.settings.residual and len(members) >= 4:
                    break
            else:
                misses += 1
        return Pack(members, rate, worth) if rate else None

    def _take(self, group: DraftGroup, members: Sequence[str], rate: GroupRate, why: str) -> None:
        for name in set(members) - set(group.members):
            self.backlog[group.base].remove(name)
            self._changed(group.base)
        self.barred = [one for one in self.barred if one.job.name not in members]
        for name in set(group.members) - set(members):
            self._return(name)
        group.members, group.mesh = list(members), rate.mesh
        group.why.append(why)
        self.values[group.name] = self._worth(members, rate)
        self.options.pop(group.name, None)

    def _return(self, name: str) -> None:
        base = self.state.jobs[name].job.base_name
        self._changed(base)
        names = self.backlog.setdefault(base, [])
        names.append(name)
        names.sort(key=lambda one: (-self.order[one], one))

    def _changed(self, base: str) -> None:
        for key in [key for key in self.packs if key[0] == base]:
            del self.packs[key]

    def _reason(self, members: Sequence[str], rate: GroupRate, before: float) -> str:
        jobs = [self.state.jobs[name].job for name in members]
        gain = rate.tokens_per_s - before
        return (
            f"{len(jobs)} jobs at {rate.tokens_per_s:,.0f} tokens/s ({gain:+,.0f}), {rate.density:.0%} full, "
            f"slowdowns up to {max(rate.slowdowns):.2f}"
        )

    # --- moves

    def _repair(self) -> None:
        """Gives groups that lost members a mesh that suits the rest; members that are too slow on any mesh leave."""
        self.backlog: dict[str, list[str]] = {}
        for group in self.draft.groups.values():
            if not group.members:
                continue
            kind, members = self.draft.kind(group), list(group.members)
            best = self._rate(members, kind, len(group.gpus))
            while best is None and len(members) > 1:
                members.remove(min(members, key=lambda name: self.claim[name]))
                best = self._rate(members, kind, len(group.gpus))
            if best is None or (best.mesh == group.mesh and members == group.members):
                continue
            now = self.rates.on_mesh([self.state.jobs[name].job for name in group.members], kind, group.mesh)
            slow = now is None or not now.within_bounds
            pays = slow or self._worth(members, best) > REPAIR_GAIN * self._value(group)
            if pays and self._tolerates(members, best, members, self.rates.changes.change_s):
                leave = [name for name in group.members if name not in members]
                group.members, group.mesh = members, best.mesh
                said = (
                    f"{', '.join(leave)} leaves, too slow here" if leave else "another mesh suits the remaining members"
                )
                group.why.append(f"{said}: {self._reason(members, best, 0.0)}")
                self.values.pop(group.name, None)

    def _fill_free(self) -> bool:
        """Opens a group on free GPUs, with the base and the size whose waiting jobs are worth most.

        While more jobs wait than fit, groups are compared by worth per GPU.
        """
        if not any(self.backlog.values()) or not self.draft.free_gpus():
            return False
        power = self.settings.thrift if self._crowded() else 0.25
        best = None
        for base, waiting in self.backlog.items():
            sizes = (8, 4, 2, 1) if self.settings.elasticity else self._isolated_sizes(waiting)
            for size, kind in product(sizes if waiting else (), self.kinds):
                block = self.draft.block(base, size, kind)
                found = self._first_pack(base, kind, size) if block else None
                if block and found and (best is None or found[2] / size**power > best[0]):
                    best = found[2] / size**power, base, block, found
        if best is None:
            return False
        _, base, block, (members, rate, _) = best
        self._open(base, block, members, rate, "GPUs are free")
        return True

    def _open(self, base: str, block: tuple[str, int], members: Sequence[str], rate: GroupRate, why: str) -> None:
        group = self.draft.open(base, block, rate.mesh, [], "")
        group.why.pop()
        self._take(group, members, rate, f"{why}: {self._reason(members, rate, 0.0)}")

    def _crowded(self) -> bool:
        """Whether more jobs wait than fit on the free GPUs."""
        return sum(map(len, self.backlog.values())) > self.draft.free_gpus()

    def _isolated_sizes(self, waiting: Sequence[str]) -> list[int]:
        if not waiting:
            return []
        found = (
            self.rates.best_isolated_rate(self.state.jobs[waiting[0]].job, kind, most) for kind, most in self.sizes
        )
        return [rate.mesh.gpus for rate in found if rate][:1]

    def _join_or_swap(self) -> bool:
        """Adds waiting jobs to running groups, or swaps one for the member with the most work left."""
        best, best_group = None, None
        for group in self._poorest([group for group in self.draft.groups.values() if self.backlog.get(group.base)]):
            waiting = self.backlog[group.base]
            shown = tuple(waiting[: self.settings.candidates])
            known = self.options.get(group.name)
            if known is None or known[0] != shown:
                known = self.options[group.name] = (shown, self._best_option(group, shown))
            if known[1] is not None and (best is None or known[1][0] > best[0]):
                best, best_group = known[1], group
        if best is None or best_group is None:
            return False
        _, members, rate = best
        group = best_group
        jobs = [self.state.jobs[name].job for name in group.members]
        before = self.rates.on_mesh(jobs, self.draft.kind(group), group.mesh)
        joins = ", ".join(name for name in members if name not in group.members)
        leaves = ", ".join(name for name in group.members if name not in members)
        said = f"{joins} joins" + (f" instead of {leaves}" if leaves else "") + ": "
        self._take(group, members, rate, said + self._reason(members, rate, before.tokens_per_s if before else 0.0))
        return True

    def _poorest(self, groups: Sequence[DraftGroup]) -> list[DraftGroup]:
        """The groups with the least worth per GPU, if there are many: they have the most to gain."""
        found = [group for group in groups if group.members]
        if len(found) <= MOST_GROUPS:
            return found
        return sorted(found, key=lambda group: (self._value(group) / len(group.gpus), group.name))[:MOST_GROUPS]

    def _best_option(self, group: DraftGroup, waiting: Sequence[str]) -> Option | None:
        """(gain, members, rate) of the best join or swap; None if none pays off."""
        best, value, change_s = None, self._value(group), self.rates.changes.change_s
        for members, rate in self._with_one_more(group, waiting):
            gain = self._worth(members, rate) - value
            if gain * self.settings.horizon_s > change_s * value and (best is None or gain > best[0]):
                stays = [name for name in members if name in group.members]
                if self._tolerates(stays, rate, members, change_s):
                    best = Option(gain, members, rate)
        return best

    def _with_one_more(self, group: DraftGroup, waiting: Sequence[str]) -> Iterator[tuple[list[str], GroupRate]]:
        kind, size = self.draft.kind(group), len(group.gpus)
        last = min(group.members, key=lambda name: (name in self.protected, self.order[name]))
        for name in waiting:
            if not self._may_start(name):
                continue
            if self.settings.grouping and (self.settings.residual or len(group.members) < 4):
                members = [*group.members, name]
                if rate := self._rate(members, kind, size):
                    yield members, rate
            if (
                self.settings.preemption
                and last not in self.protected
                and self.order[name] > (1 + self.settings.margin) * self.order[last]
            ):
                members = [one for one in group.members if one != last] + [name]
                if rate := self._rate(members, kind, size):
                    yield members, rate

    def _evict(self) -> bool:
        """Gives the GPUs of the group with the least worth to a base whose waiting jobs are worth more there."""
        if not self.settings.preemption:
            return False
        best = None
        for base, waiting in self.backlog.items():
            if not waiting:
                continue
            victims = sorted(
                (
                    group
                    for group in self.draft.groups.values()
                    if group.members and group.base != base and not group.is_new
                ),
                key=lambda group: (self._value(group) / len(group.gpus), group.name),
            )
            for group in victims[:3]:
                found = self._first_pack(base, self.draft.kind(group), len(group.gpus))
                if found is None:
                    continue
                lost = self._value(group)
                open_s = self.rates.changes.open_s(self.state.jobs[found[0][0]].job.shape)
                gain = found[2] * (1 - open_s / self.settings.horizon_s) - lost * (1 + self.settings.margin)
                if gain > 0 and (best is None or gain > best[0]):
                    best = gain, group, base, found
        if best is None:
            return False
        _, group, base, (members, rate, _) = best
        self._replace(group, base, members, rate)
        return True

    def _split(self) -> bool:
        """Takes half of the GPUs of a group with low density and gives them to waiting jobs."""
        if not self.settings.elasticity or not any(self.backlog.values()):
            return False
        best = None
        for group in self._poorest([*self.draft.groups.values()]):
            size = len(group.gpus)
            if size < SPLIT_FROM or not group.members or group.is_new or group.ready_s > self.now:
                continue
            old = self._value(group)
            rate = self._rate(group.members, self.draft.kind(group), size // 2)
            if rate is None or self._worth(group.members, rate) < 0.5 * old:
                continue
            pack = self._best_pack(self.draft.kind(group), size // 2)
            if pack is None:
                continue
            base, found = pack
            half = self._worth(group.members, rate)
            open_s = self.rates.changes.open_s(self.state.jobs[group.members[0]].job.shape)
            gain = (half + found[2]) * (1 - open_s / self.settings.horizon_s) - old * (1 + self.settings.margin)
            if (
                gain > 0
                and (best is None or gain > best[0])
                and self._tolerates(group.members, rate, group.members, open_s)
            ):
                best = gain, group, rate, base, found
        if best is None:
            return False
        _, group, rate, base, (members, pack_rate, _) = best
        self.draft.halve(group)
        group.mesh = rate.mesh
        group.why.append("half of its GPUs do nearly as well: " + self._reason(group.members, rate, 0.0))
        self.values.pop(group.name, None)
        self.options.pop(group.name, None)
        block = group.worker, group.gpus[-1] + 1
        self._open(base, block, members, pack_rate, f"half of {group.name}'s GPUs are worth more here")
        return True

    def _best_pack(self, kind: Kind, size: int) -> tuple[str, Pack] | None:
        """(base, pack) of the waiting jobs that are worth most on this number of GPUs."""
        packs = ((base, self._first_pack(base, kind, size)) for base, names in self.backlog.items() if names)
        return max(((base, found) for base, found in packs if found), key=lambda one: one[1].worth, default=None)

    def _first_pack(self, base: str, kind: Kind, size: int) -> Pack | None:
        """`_pack` of a base's waiting jobs, cached until they change."""
        if (base, kind, size) not in self.packs:
            self.packs[base, kind, size] = self._pack(base, kind, size, [], self.backlog[base])
        return self.packs[base, kind, size]

    def _replace(self, group: DraftGroup, base: str, members: Sequence[str], rate: GroupRate) -> None:
        for name in group.members:
            self._return(name)
        self.draft.close(group)
        self.values.pop(group.name, None)
        self._open(base, (group.worker, group.gpus[0]), members, rate, f"worth more here than {group.base}")

    def _place_urgent(self) -> None:
        """Starts jobs near the end of their patience where that costs least."""
        misses: dict[str, int] = {}  # per base, in a row: if the first jobs find no place, the many after them do not
        for state in self.urgent:
            name, base = state.job.name, state.job.base_name
            if misses.get(base, 0) >= self.settings.candidates:
                continue
            if name not in self.backlog.get(base, ()) or not self._may_start(name):
                continue
            if self._urgent_open(state) or self._urgent_join(state) or self._urgent_open(state, clear=True):
                self.protected.add(name)
                misses[base] = 0
            else:
                misses[base] = misses.get(base, 0) + 1

    def _urgent_join(self, state: JobState) -> bool:
        name, base = state.job.name, state.job.base_name
        best = None
        for group in self.draft.groups.values():
            if group.base != base or not group.members:
                continue
            kind, size = self.draft.kind(group), len(group.gpus)
            others = [one for one in group.members if self.order[one] < self.order[name] and one not in self.protected]
            last = min(others, key=lambda one: self.order[one]) if others else None
            for left_out in (None, last):
                members = [one for one in group.members if one != left_out] + [name]
                rate, stays = self._rate(members, kind, size), members[:-1]
                if rate is not None and self._tolerates(stays, rate, members, self.rates.changes.change_s):
                    gain = self._worth(members, rate) - self._value(group)
                    if best is None or gain > best[0]:
                        best = gain, group, members, rate
                if last is None:
                    break
        if best is None:
            return False
        _, group, members, rate = best
        self._take(group, members, rate, f"{name} has waited long: " + self._reason(members, rate, 0.0))
        return True

    def _urgent_open(self, state: JobState, *, clear: bool = False) -> bool:
        name, base = state.job.name, state.job.base_name
        sizes = self._isolated_sizes([name])
        if not sizes:
            return False
        for kind in self.kinds:
            rate = self._rate([name], kind, sizes[0])
            if rate is None:
                continue
            block = self.draft.block(base, sizes[0], kind)
            if block is None and clear:
                block = self._clear(sizes[0], kind, self.order[name])
            if block is not None:
                self._open(base, block, [name], rate, f"{name} has waited long")
                return True
        return False

    def _clear(self, size: int, kind: Kind, order: float) -> tuple[str, int] | None:
        """Frees the block of this size whose groups are worth least, if all their members come after `order`."""
        best = None
        for worker in self.state.workers.values():
            for first in range(0, worker.gpus - size + 1, size) if worker.kind == kind else ():
                there = self._groups_in(worker.name, set(range(first, first + size)))
                inside = [name for group in there for name in group.members]
                if any(self.order[name] >= order or name in self.protected for name in inside):
                    continue
                worth = sum(map(self._value, there))
                if best is None or worth < best[0]:
                    best = worth, (worker.name, first), there
        if best is None:
            return None
        for group in best[2]:
            for name in group.members:
                self._return(name)
            self.draft.close(group)
            self.values.pop(group.name, None)
        return best[1]

    def _groups_in(self, worker: str, gpus: set[int]) -> list[DraftGroup]:
        """Groups with members on any of these GPUs."""
        there = (group for group in self.draft.groups.values() if group.worker == worker and group.members)
        return [group for group in there if gpus & set(group.gpus)]

    def _grow(self) -> bool:
        """Grows a group into the adjacent free block, or merges it with an adjacent group of the same base."""
        best = None
        for group in self.draft.groups.values():
            size = len(group.gpus)
            first = group.gpus[0] // (2 * size) * 2 * size
            worker = self.state.workers[group.worker]
            if not group.members or size >= 8 or first + 2 * size > worker.gpus:
                continue
            around = range(first, first + 2 * size)
            there = self._groups_in(group.worker, set(around))
            if any(g.base != group.base or not set(g.gpus) <= set(around) for g in there):
                continue
            if any(g is not group and g.name < group.name for g in there):
                continue
            members = [name for g in there for name in g.members]
            rate = self._rate(members, self.draft.kind(group), 2 * size)
            if rate is None:
                continue
            before, now = sum(map(self._value, there)), self._worth(members, rate)
            open_s = self.rates.changes.open_s(self.state.jobs[members[0]].job.shape)
            left_s = max(
                self.state.jobs[name].left_steps(self.now) / s
                for name, s in zip(members, rate.steps_per_s, strict=True)
            )
            lasts = min(self.settings.horizon_s * 2, left_s)
            if now * (lasts - open_s) > before * lasts * (1 + self.settings.margin) and self._tolerates(
                members, rate, members, open_s
            ):
                gain = now - before
                if best is None or gain > best[0]:
                    best = gain, group, there, members, rate, first
        if best is None:
            return False
        _, group, there, members, rate, first = best
        base, worker = group.base, group.worker
        for one in there:
            self.draft.close(one)
            self.values.pop(one.name, None)
        opened = self.draft.open(base, (worker, first), rate.mesh, list(members), "")
        opened.why[:] = [
            f"{len(rate.steps_per_s)} jobs take {len(opened.gpus)} GPUs: " + self._reason(members, rate, 0.0)
        ]
        return True
