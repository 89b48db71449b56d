"""Event-driven simulation of a cluster: arrivals, faults, and the decisions of a policy."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from scheduling.errors import PlanError
from scheduling.online.check import check_decisions
from scheduling.online.ledger import Ledger
from scheduling.online.rates import Rates
from scheduling.online.result import ClusterResult, Span
from scheduling.online.sharing import GroupRate
from scheduling.online.state import ClusterState, Decision, GroupState, JobState, Policy, Traits
from scheduling.online.types import Fault, Job, User, Worker, check_input

TICK_S = 600.0  # interval at which the policy decides while jobs wait, even without events


class _Event(NamedTuple):
    time_s: float
    order: int  # at equal times: repairs, faults, arrivals, finishes
    name: str
    version: int = 0


REPAIR, FAULT, ARRIVAL, FINISH, TICK = range(5)


@dataclass(slots=True)
class _Live:
    """A group and its simulated progress."""

    state: GroupState
    rate: GroupRate | None
    since_s: float
    version: int = 0


class Simulator:
    """Simulates a cluster; `run` returns the result.

    Args:
        jobs, workers, users, faults: as in `simulate_cluster`.
        policy: makes the decisions.
        rates: predicts the rates of groups.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        workers: Sequence[Worker],
        policy: Policy,
        rates: Rates,
        *,
        users: Sequence[User] = (),
        faults: Sequence[Fault] = (),
    ):
        check_input(jobs, workers, faults)
        self.rates, self.policy, self.traits = rates, policy, Traits.of(policy)
        self.jobs = {job.name: job for job in sorted(jobs, key=lambda job: (job.arrival_s, job.name))}
        self.workers = {worker.name: worker for worker in workers}
        self.now = 0.0
        self.waiting: dict[str, JobState] = {}  # all jobs that have arrived and are unfinished, running ones included
        self.groups: dict[str, _Live] = {}
        self.down: dict[str, int] = {}
        named = {user.name: user for user in users}
        names = sorted({job.user for job in jobs} | named.keys())
        accounts = {name: named.get(name, User(name)) for name in names}
        self.ledger = Ledger(workers, rates, accounts, self.jobs)
        self.spans: list[Span] = []
        self.finish_s: dict[str, float] = {}
        self.start_s: dict[str, float] = {}
        self.slowdown: dict[str, float] = {}
        self.preemptions = 0
        self.decisions: list[tuple[float, str]] = []
        self.events: list[_Event] = [_Event(job.arrival_s, ARRIVAL, job.name) for job in self.jobs.values()]
        for fault in faults:
            self.events.append(_Event(fault.start_s, FAULT, fault.worker))
            self.events.append(_Event(fault.start_s + fault.duration_s, REPAIR, fault.worker))
        heapq.heapify(self.events)
        self._refuse_misfits()

    def run(self) -> ClusterResult:
        """Simulates until every job has finished.

        Raises:
            PlanError: `online.decision`, `online.stuck`.
        """
        next_tick = inf
        while self.events:
            now = self.events[0].time_s
            if now - self.now < 0:
                raise PlanError("online.clock", f"an event of {now} s comes after {self.now} s")
            self._advance(now)
            asked = False
            while self.events and self.events[0].time_s <= now:
                asked |= self._happen(heapq.heappop(self.events))
            if asked or now >= next_tick:
                self._decide()
            if len(self.finish_s) == len(self.jobs):
                break
            if any(state.group is None for state in self.waiting.values()):
                if next_tick <= now or next_tick == inf:
                    next_tick = now + TICK_S
                    heapq.heappush(self.events, _Event(next_tick, TICK, ""))
            else:
                next_tick = inf
            self._refuse_standstill()
        return self._result()

    def state(self) -> ClusterState:
        """The state that the policy sees now."""
        return ClusterState(
            time_s=self.now,
            workers={name: worker for name, worker in self.workers.items() if not self.down.get(name)},
            jobs=dict(self.waiting),
            groups={name: live.state for name, live in self.groups.items()},
            users=self.ledger.user_states(),
        )

    def _advance(self, now: float) -> None:
        self.ledger.advance(self.now, now)
        self.now = now

    def _happen(self, event: _Event) -> bool:
        """Applies an event; returns whether the policy should decide."""
        if event.order == ARRIVAL:
            job = self.jobs[event.name]
            self.waiting[job.name] = JobState(job, at_s=self.now)
            self.ledger.arrive(job)
            return True
        if event.order == FINISH:
            live = self.groups.get(event.name)
            if live is None or live.version != event.version:
                return False
            return self._finish(live)
        if event.order == FAULT:
            self.down[event.name] = self.down.get(event.name, 0) + 1
            self._fail(event.name)
            return True
        if event.order == REPAIR:
            self.down[event.name] -= 1
            self.ledger.up(self.workers[event.name], not self.down[event.name])
            return True
        return True

    def _finish(self, live: _Live) -> bool:
        self._settle(live)
        done = [
            name
            for name in live.state.members
            if self.waiting[name].left_steps(self.now) <= 1e-6 * self.jobs[name].steps
        ]
        for name in done:
            state = self.waiting.pop(name)
            self.finish_s[name] = self.now
            self.slowdown[name] = state.in_groups_s / state.alone_s if state.alone_s else 1.0
            self.ledger.leave(self.jobs[name])
        rest = tuple(name for name in live.state.members if name not in done)
        self._set(live, replace(live.state, members=rest), live.state.ready_s)
        return bool(done)

    def _fail(self, worker: str) -> None:
        self.ledger.up(self.workers[worker], False)
        for name in [name for name, live in self.groups.items() if live.state.worker == worker]:
            live = self.groups[name]
            self._settle(live)
            trained = max(0.0, self.now - max(live.since_s, live.state.ready_s))
            lost_s = trained % self.rates.changes.checkpoint_s
            for member in live.state.members:
                state = self.waiting[member]
                lost = min(state.done_steps, lost_s * state.steps_per_s)
                self.ledger.lose(self.jobs[member], lost)
                self.waiting[member] = replace(state, done_steps=state.done_steps - lost)
            self._dissolve(name)
            self.decisions.append((self.now, f"{worker} failed: {name} ends"))

    def _decide(self) -> None:
        state = self.state()
        decisions = self.policy.decide(state, self.now)
        if not decisions:
            return
        check_decisions(state, decisions, self.rates, self.policy, self.now)
        self._apply(decisions)
        self.decisions += [(self.now, str(decision)) for decision in decisions]

    def _apply(self, decisions: Sequence[Decision]) -> None:
        before = {decision.group: self.groups.get(decision.group) for decision in decisions}
        was_in: dict[str, str] = {}
        for live in before.values():
            if live is not None:
                self._settle(live)
                was_in |= dict.fromkeys(live.state.members, live.state.name)
        for decision in decisions:
            if decision.kind == "close":
                self._dissolve(decision.group)
        for decision in decisions:
            if decision.kind == "change":  # leave before any join
                live = self.groups[decision.group]
                for name in set(live.state.members) - set(decision.members):
                    self._detach(name)
        for decision in decisions:
            if decision.kind != "close":
                self._start(decision, was_in)
        for name in was_in:
            if name in self.waiting and self.waiting[name].group is None:
                self.preemptions += 1

    def _start(self, decision: Decision, was_in: Mapping[str, str]) -> None:
        assert decision.mesh is not None
        state = GroupState(
            decision.group, decision.base, decision.worker, decision.gpus, decision.mesh, decision.members
        )
        live, changes = self.groups.get(decision.group), self.rates.changes
        any_job = self.jobs[decision.members[0]] if decision.members else None
        same_gpus = live is not None and live.state.gpus == decision.gpus
        trained_until = self.now
        if same_gpus:
            assert live is not None
            trained_until = max(self.now, live.state.ready_s)
            ready = max(live.state.ready_s, self.now + (changes.change_s if decision.members else 0.0))
        else:
            ready = self.now + (changes.open_s(any_job.shape) if any_job else 0.0)
        if live is None:
            live = self.groups[decision.group] = _Live(state, None, self.now)
        for name in decision.members:
            mine = self.waiting[name]
            if mine.group is None:
                mine = replace(mine, waited_s=mine.waited_s + self.now - mine.at_s, at_s=ready)
            stalled = ready - trained_until if name in was_in else 0.0  # isolated training pays for its start as well
            self.waiting[name] = replace(
                mine, group=decision.group, at_s=max(ready, self.now), in_groups_s=mine.in_groups_s + max(0.0, stalled)
            )
            self.start_s.setdefault(name, ready)
        self._set(live, state, ready)

    def _set(self, live: _Live, state: GroupState, ready_s: float) -> None:
        """Sets the members and rates of a group, and schedules its next finish."""
        live.state = replace(state, ready_s=ready_s)
        live.version += 1
        live.since_s = self.now
        live.rate = None
        first = inf
        if state.members:
            jobs = [self.jobs[name] for name in state.members]
            kind = self.workers[state.worker].kind
            how = self.rates.on_mesh if self.traits.mixes else self.rates.alternating_on_mesh
            live.rate = how(jobs, kind, state.mesh)
            assert live.rate is not None
            for name, steps_per_s in zip(state.members, live.rate.steps_per_s, strict=True):
                mine = replace(self.waiting[name], steps_per_s=steps_per_s)
                self.waiting[name] = mine
                first = min(first, mine.at_s + mine.left_steps(mine.at_s) / steps_per_s)
        self.ledger.set_group(live.state, live.rate, self.now)
        if first < inf:
            heapq.heappush(self.events, _Event(max(first, self.now), FINISH, state.name, live.version))

    def _settle(self, live: _Live) -> None:
        """Updates the progress of a group's members."""
        if live.rate is None:
            return
        for name, slowdown in zip(live.state.members, live.rate.slowdowns, strict=True):
            mine = self.waiting[name]
            seconds = max(0.0, self.now - mine.at_s)
            if seconds:
                steps = min(seconds * mine.steps_per_s, self.jobs[name].steps - mine.done_steps)
                self.waiting[name] = replace(
                    mine,
                    done_steps=mine.done_steps + steps,
                    at_s=self.now,
                    in_groups_s=mine.in_groups_s + seconds,
                    alone_s=mine.alone_s + seconds / slowdown,
                )
                self.spans.append(Span(name, live.state.name, mine.at_s, self.now, steps))

    def _detach(self, name: str) -> None:
        self.waiting[name] = replace(self.waiting[name], group=None, steps_per_s=0.0, at_s=self.now)

    def _dissolve(self, group: str) -> None:
        live = self.groups.pop(group)
        for name in live.state.members:
            self._detach(name)
        self.ledger.drop_group(group, self.now)

    def _refuse_misfits(self) -> None:
        for job in self.jobs.values():
            if not any(
                self.rates.best_isolated_rate(job, worker.kind, worker.gpus) for worker in self.workers.values()
            ):
                worker = max(self.workers.values(), key=lambda worker: worker.gpus * worker.memory_gib)
                raise PlanError(
                    "online.job-too-large",
                    f"{job.name} fits nowhere: {job.base_name} with samples of {max(job.lengths)} tokens",
                    where=f"largest worker: {worker.name}, {worker.gpus} GPUs of {worker.memory_gib:g} GiB",
                    fix="cut its samples, lower its rank, or add a worker with more GPUs or memory",
                )

    def _refuse_standstill(self) -> None:
        moving = any(live.rate for live in self.groups.values()) or any(event.order < FINISH for event in self.events)
        if self.waiting and not moving:
            raise PlanError(
                "online.stuck",
                f"{self.traits.name} lets {len(self.waiting)} jobs wait while no job runs and none comes",
            )

    def _result(self) -> ClusterResult:
        return ClusterResult(
            policy=self.traits.name,
            jobs=tuple(self.jobs.values()),
            gpus=sum(worker.gpus for worker in self.workers.values()),
            finish_s=self.finish_s,
            start_s=self.start_s,
            slowdown=self.slowdown,
            isolated={name: self.ledger.isolated_rate(job) for name, job in self.jobs.items()},
            preemptions=self.preemptions,
            decisions=tuple(self.decisions),
            spans=tuple(self.spans),
            accounts=self.ledger.close(self.now),
        )
