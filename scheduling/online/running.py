"""Jobs and groups of a simulated cluster: their progress, and what decisions and faults do to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from scheduling.online.costs import rank_class
from scheduling.online.ledger import Ledger
from scheduling.online.rates import Rates
from scheduling.online.result import Ended, Span
from scheduling.online.sharing import GroupRate, Mesh
from scheduling.online.state import Decision, GroupState, JobState
from scheduling.online.types import End, Job, Worker

SLOWEST, FASTEST = 0.25, 4.0  # bounds on the speed that a run reports


class Unsaved(NamedTuple):
    """What a job has trained since its last save."""

    seconds: float = 0.0
    steps: float = 0.0

    def trained(self, seconds: float, steps: float, interval_s: float) -> Unsaved:
        """The same after training on, with a save at the end of every interval."""
        total_s = self.seconds + seconds
        if total_s < interval_s:
            return Unsaved(total_s, self.steps + steps)
        rest_s = total_s % interval_s
        return Unsaved(rest_s, steps * rest_s / seconds)


@dataclass(slots=True)
class LiveGroup:
    """A group and its simulated progress."""

    state: GroupState
    rate: GroupRate | None
    version: int = 0
    ranks: int = 0  # largest class of ranks so far
    compiled: set[tuple[Mesh, int]] = field(default_factory=set[tuple[Mesh, int]])


class Running:
    """Unfinished jobs and their groups. `now` of a method is the time of its event.

    Args:
        mixes: whether a microbatch may hold samples of several jobs.
        ends: per job, an end that the policy does not foresee.
        late: share of its steps that every job takes in addition, or does not take, before it ends.
        predicted: the policy's own predictions, if they are others than `rates`.
        expect: called with (seconds, group, version) of the next finish of a group; it counts while the group has
            this version.

    Attributes:
        unfinished: jobs that have arrived, waiting or running.
        spans: periods of training of every job.
        start_s, finish_s, slowdown, ended: per job, as in `ClusterResult`.
    """

    def __init__(
        self,
        jobs: Mapping[str, Job],
        workers: Mapping[str, Worker],
        rates: Rates,
        ledger: Ledger,
        *,
        mixes: bool,
        ends: Mapping[str, End],
        late: float = 0.0,
        predicted: Rates | None = None,
        expect: Callable[[float, str, int], None],
    ):
        self.jobs, self.workers, self.rates, self.ledger = jobs, workers, rates, ledger
        self.mixes, self.predicted, self.expect, self.late = mixes, predicted, expect, late
        self.unfinished: dict[str, JobState] = {}
        self.groups: dict[str, LiveGroup] = {}
        self.spans: list[Span] = []
        self.start_s: dict[str, float] = {}
        self.finish_s: dict[str, float] = {}
        self.slowdown: dict[str, float] = {}
        self.ended: dict[str, Ended] = {}
        self._ends = {name: end for name, end in ends.items() if end.step is not None and end.step < jobs[name].steps}
        self._unsaved: dict[str, Unsaved] = {}
        self.preemptions = self.versions = 0
        self.loading: dict[str, list[float]] = {}  # per worker, when each session that opens is there

    def arrive(self, job: Job, ahead_s: float, now: float) -> None:
        self.unfinished[job.name] = JobState(job, at_s=now, ahead_s=ahead_s)
        self.ledger.arrive(job)

    def finish(self, group: str, version: int, now: float) -> bool:
        """Ends the jobs of a group that are done; returns whether there are any."""
        live = self.groups.get(group)
        if live is None or live.version != version:
            return False
        self._settle(live, now)
        finished_names = [
            name
            for name in live.state.members
            if self._last_step(name) - self.unfinished[name].done_steps <= 1e-6 * self.jobs[name].steps
        ]
        for name in finished_names:
            self._end(name, self._ends[name].how if name in self._ends else "", now)
        self._leave(live, finished_names, now)
        return bool(finished_names)

    def cancel(self, name: str, now: float) -> bool:
        """Removes a job, waiting or in a group whose others train on; returns whether it was there."""
        if name not in self.unfinished:
            return False
        live = self.groups.get(self.unfinished[name].group or "")
        if live is not None:
            self._settle(live, now)
        self._end(name, "cancelled", now)
        if live is not None:
            self._leave(live, [name], now)
        return True

    def _last_step(self, name: str) -> float:
        end = self._ends.get(name)
        return self.jobs[name].steps * (1.0 + self.late) if end is None or end.step is None else end.step

    def _end(self, name: str, how: str, now: float) -> None:
        state = self.unfinished.pop(name)
        self.finish_s[name] = now
        self.slowdown[name] = state.in_groups_s / state.alone_s if state.alone_s else 1.0
        if how:
            self.ended[name] = Ended(how, state.done_steps)
        self._unsaved.pop(name, None)
        self.ledger.leave(self.jobs[name])

    def _leave(self, live: LiveGroup, gone: Sequence[str], now: float) -> None:
        members = tuple(name for name in live.state.members if name not in gone)
        self._set(live, replace(live.state, members=members), live.state.ready_s, now)

    def fail(self, worker: str, now: float) -> list[str]:
        """Ends all groups of a worker; their members lose the progress since the last save. Returns their names."""
        names = [name for name, live in self.groups.items() if live.state.worker == worker]
        for name in names:
            live = self.groups[name]
            self._settle(live, now)
            for member in live.state.members:
                state = self.unfinished[member]
                lost = min(state.done_steps, self._unsaved.get(member, Unsaved()).steps)
                self.ledger.lose(self.jobs[member], lost)
                self.unfinished[member] = replace(state, done_steps=state.done_steps - lost)
            self._dissolve(name, now)
        return names

    def apply(self, decisions: Sequence[Decision], now: float) -> None:
        """Applies all decisions of one time. Jobs leave their groups before others join."""
        before = {decision.group: self.groups.get(decision.group) for decision in decisions}
        was_in: dict[str, str] = {}
        for live in before.values():
            if live is not None:
                self._settle(live, now)
                was_in |= dict.fromkeys(live.state.members, live.state.name)
        for decision in decisions:
            if decision.kind == "close":
                self._dissolve(decision.group, now)
        for decision in decisions:
            if decision.kind == "change":  # leave before any join
                live = self.groups[decision.group]
                for name in set(live.state.members) - set(decision.members):
                    self._detach(name, now)
        for decision in decisions:
            if decision.kind != "close":
                self._start(decision, was_in, now)
        for name in was_in:
            if name in self.unfinished and self.unfinished[name].group is None:
                self.preemptions += 1

    def _start(self, decision: Decision, was_in: Mapping[str, str], now: float) -> None:
        assert decision.mesh is not None
        state = GroupState(
            decision.group, decision.base, decision.worker, decision.gpus, decision.mesh, decision.members
        )
        live, changes = self.groups.get(decision.group), self.rates.changes
        jobs = [self.jobs[name] for name in decision.members]
        same_gpus = live is not None and live.state.gpus == decision.gpus
        trained_until = now
        if same_gpus:
            assert live is not None
            trained_until = max(now, live.state.ready_s)
            programs = decision.mesh, max(live.ranks, rank_class(job.rank for job in jobs)) if jobs else live.ranks
            stop_s = changes.stop_s(programs in live.compiled) if jobs else 0.0
            moves = any(was_in.get(name, decision.group) != decision.group for name in decision.members)
            ready = max(live.state.ready_s, now + stop_s + (changes.move_s if moves else 0.0))
        else:
            ready = now + self._open_s(decision, jobs, was_in, now)
        if live is None:
            live = self.groups[decision.group] = LiveGroup(state, None)
        if jobs:
            live.ranks = max(live.ranks, rank_class(job.rank for job in jobs))
            live.compiled.add((decision.mesh, live.ranks))
        for name in decision.members:
            entry = self.unfinished[name]
            if not same_gpus:
                self._unsaved.pop(name, None)  # its state was written, for the new session to read
            if entry.group is None:
                entry = replace(entry, waited_s=entry.waited_s + now - entry.at_s, at_s=ready)
            stall_s = ready - trained_until if name in was_in else 0.0  # isolated training pays for its start as well
            self.unfinished[name] = replace(
                entry, group=decision.group, at_s=max(ready, now), in_groups_s=entry.in_groups_s + max(0.0, stall_s)
            )
            self.start_s.setdefault(name, ready)
        self._set(live, state, ready, now)

    def _open_s(self, decision: Decision, jobs: Sequence[Job], was_in: Mapping[str, str], now: float) -> float:
        """Seconds until a new session trains. Sessions that open on one host share the rate of loading."""
        if not jobs:
            return 0.0
        loading = [until for until in self.loading.get(decision.worker, ()) if until > now]
        seconds = self.rates.changes.open_s(jobs[0].shape, len(loading))
        if any(name in was_in for name in decision.members):
            seconds += self.rates.changes.move_s
        self.loading[decision.worker] = [*loading, now + seconds]
        return seconds

    def _set(self, live: LiveGroup, state: GroupState, ready_s: float, now: float) -> None:
        """Sets the members and rates of a group, and schedules its next finish."""
        live.state = replace(state, ready_s=ready_s)
        self.versions += 1  # over all groups: a name is used again
        live.version = self.versions
        live.rate = None
        first = inf
        if state.members:
            jobs = [self.jobs[name] for name in state.members]
            kind = self.workers[state.worker].kind
            rate_of = self.rates.formed if self.mixes else self.rates.alternating_on_mesh
            live.rate = rate_of(jobs, kind, state.mesh)
            assert live.rate is not None
            speeds = self._speeds(live, jobs)
            for name, steps_per_s in zip(state.members, live.rate.steps_per_s, strict=True):
                job_state = replace(self.unfinished[name], steps_per_s=steps_per_s, speed=speeds.get(name, 1.0))
                self.unfinished[name] = job_state
                left_steps = max(0.0, self._last_step(name) - job_state.done_steps)
                first = min(first, job_state.at_s + left_steps / steps_per_s)
        self.ledger.set_group(live.state, live.rate, now)
        if first < inf:
            self.expect(max(first, now), state.name, live.version)

    def _speeds(self, live: LiveGroup, jobs: Sequence[Job]) -> dict[str, float]:
        """Measured over predicted steps per second of a group's members, as a live run reports them."""
        if self.predicted is None or live.rate is None:
            return {}
        rate = self.predicted.formed(jobs, self.workers[live.state.worker].kind, live.state.mesh)
        if rate is None:
            return {}
        pairs = zip(live.state.members, live.rate.steps_per_s, rate.steps_per_s, strict=True)
        return {name: min(FASTEST, max(SLOWEST, actual / predicted)) for name, actual, predicted in pairs}

    def _settle(self, live: LiveGroup, now: float) -> None:
        """Updates the progress of a group's members."""
        if live.rate is None:
            return
        for name, slowdown in zip(live.state.members, live.rate.slowdowns, strict=True):
            job_state = self.unfinished[name]
            seconds = max(0.0, now - job_state.at_s)
            if seconds:
                steps = min(seconds * job_state.steps_per_s, self._last_step(name) - job_state.done_steps)
                unsaved = self._unsaved.get(name, Unsaved())
                self._unsaved[name] = unsaved.trained(seconds, steps, self.rates.changes.checkpoint_s)
                self.unfinished[name] = replace(
                    job_state,
                    done_steps=job_state.done_steps + steps,
                    at_s=now,
                    in_groups_s=job_state.in_groups_s + seconds,
                    alone_s=job_state.alone_s + seconds / slowdown,
                )
                self.spans.append(Span(name, live.state.name, job_state.at_s, now, steps))

    def _detach(self, name: str, now: float) -> None:
        """Lets a job wait, with its progress saved."""
        self._unsaved.pop(name, None)
        self.unfinished[name] = replace(self.unfinished[name], group=None, steps_per_s=0.0, at_s=now)

    def _dissolve(self, group: str, now: float) -> None:
        live = self.groups.pop(group)
        for name in live.state.members:
            self._detach(name, now)
        self.ledger.drop_group(group, now)
