"""The state of a cluster that really runs: what happens goes in, decisions come out and are applied to it.

The caller says what happened and when, by a monotonic clock. It carries out the decisions, which takes it some time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from scheduling.errors import PlanError
from scheduling.online.check import WRONG, CheckedPolicy, Refusal
from scheduling.online.ledger import Ledger
from scheduling.online.patience import work_s, worker_sizes
from scheduling.online.policies.ours import Ours
from scheduling.online.rates import Rates
from scheduling.online.running import FASTEST, SLOWEST
from scheduling.online.sharing import GroupRate
from scheduling.online.state import ClusterState, Decision, GroupState, JobState, Policy
from scheduling.online.types import Job, User, Worker

MEASURED_STEPS = 20  # of a job in one group, before its speed is believed


class LiveCluster:
    """Jobs and groups of a running cluster. Times are seconds of one monotonic clock.

    Args:
        workers: hosts with their GPUs.
        rates: predictions, of the policy and of its checks.
        policy: decides (None: `Ours`). A refused decision changes nothing and is in `refusals`.

    Attributes:
        jobs: unfinished jobs that may run.
        groups: as decided; a group may still be opening.
        down: workers that are lost, until they are back.

    >>> cluster = LiveCluster([Worker("host0", 1)], Rates())
    >>> cluster.arrive(Job("law", "ann", "llama-3.1-8b", 0.0, [512], 8, 100), 0.0)
    >>> [decision.kind for decision in cluster.decide(0.0)], cluster.jobs["law"].group in cluster.groups
    (['open'], True)
    """

    def __init__(self, workers: Sequence[Worker], rates: Rates, *, policy: Policy | None = None):
        self.workers = {worker.name: worker for worker in workers}
        self.down: frozenset[str] = frozenset()
        self.jobs: dict[str, JobState] = {}
        self.groups: dict[str, GroupState] = {}
        self._rates, self._policy = rates, CheckedPolicy(policy or Ours(rates), rates, tolerance=WRONG)
        self._specs: dict[str, Job] = {}
        self._ledger = Ledger(workers, rates, {}, self._specs)
        self._at = 0.0
        self._counted: dict[str, tuple[float, float]] = {}  # job -> time and steps when its group last changed
        self._waiting_s: dict[str, float] = {}  # user -> work of its waiting jobs, until one of them changes

    @property
    def refusals(self) -> list[Refusal]:
        """Decisions that did not take effect."""
        return self._policy.refusals

    def arrive(self, job: Job, now: float, done_steps: float = 0.0, *, waited_s: float = 0.0) -> None:
        """Adds a job that may run from now on.

        Args:
            waited_s: how long it has waited before, for example for an earlier server.

        Raises:
            PlanError: `online.job-too-large`, it fits on no worker.
        """
        self._advance(now)
        if not any(self._rates.best_isolated_rate(job, w.kind, w.gpus) for w in self.workers.values()):
            raise PlanError(
                "online.job-too-large",
                f"{job.name} fits nowhere: {job.base_name} with samples of {max(job.lengths)} tokens",
                fix="cut its samples, lower its rank, or add a worker with more GPUs or memory",
            )
        self._ledger.add_user(User(job.user))
        state = JobState(job, done_steps=done_steps, at_s=now, waited_s=waited_s)
        self._specs[job.name] = job
        self.jobs[job.name] = replace(state, ahead_s=self._add_waiting(state, now))
        self._ledger.arrive(job)

    def revise(self, job: Job, now: float) -> None:
        """Replaces what is known of a job that is there, such as its weight, priority, deadline or bound.

        It keeps its arrival, its progress and its place.
        """
        self._advance(now)
        state = self.jobs[job.name]
        revised = replace(job, arrival_s=state.job.arrival_s)
        if revised == state.job:
            return
        self._ledger.leave(state.job)
        self._waiting_s.clear()
        self._specs[job.name] = revised
        self.jobs[job.name] = replace(state, job=revised)
        self._ledger.arrive(revised)
        if state.group is not None:
            self._set_group(self.groups[state.group], now)

    def set_user(self, user: User, now: float) -> None:
        """Sets a user's weight and quota from now on."""
        self._advance(now)
        self._ledger.set_user(user)

    def leave(self, name: str, now: float) -> None:
        """Removes a job: it has ended, or may not run for now. Others of its group train on."""
        self._advance(now)
        leaver = self.jobs.pop(name)
        self._counted.pop(name, None)
        self._ledger.leave(leaver.job)
        self._waiting_s.pop(leaver.job.user, None)
        if leaver.group is not None:
            group = self.groups[leaver.group]
            self._set_group(replace(group, members=tuple(m for m in group.members if m != name)), now)

    def progress(self, name: str, steps: float, now: float) -> None:
        """Says how many steps a job has taken; less than before after a loss."""
        self._advance(now)
        state = self.jobs[name]
        seconds = max(0.0, now - state.at_s)
        if state.group is None:
            self._waiting_s.pop(state.job.user, None)
            self.jobs[name] = replace(state, done_steps=steps)
            return
        group = self.groups[state.group]
        rate, index = self._rate(group), group.members.index(name)
        slowdown = rate.slowdowns[index] if rate else 1.0
        self.jobs[name] = replace(
            state,
            done_steps=steps,
            at_s=max(now, state.at_s),
            in_groups_s=state.in_groups_s + seconds,
            alone_s=state.alone_s + seconds / slowdown,
            speed=self._speed(name, steps, now, rate.steps_per_s[index]) if rate else state.speed,
        )

    def ready(self, name: str, now: float) -> None:
        """Says that a group trains from now on."""
        self._advance(now)
        if name in self.groups:
            for member in self.groups[name].members:
                self._counted.pop(member, None)
            self._set_group(replace(self.groups[name], ready_s=now), now)

    def set_down(self, names: Iterable[str], now: float) -> None:
        """Says which workers are lost, all others being up: their groups end, and nothing is placed on them."""
        self._advance(now)
        self.down = frozenset(names)
        self._waiting_s.clear()
        for worker in self.workers.values():
            self._ledger.up(worker, worker.name not in self.down)
        for name in [name for name, group in self.groups.items() if group.worker in self.down]:
            self.lose(name, now)

    def lose(self, name: str, now: float) -> None:
        """Removes a group that failed; its members wait."""
        self._advance(now)
        group = self.groups.pop(name, None)
        if group is not None:
            self._ledger.drop_group(name, now)
            for member in group.members:
                self._detach(member, now)

    def adopt(self, group: GroupState, now: float) -> None:
        """Adds a group that runs already, with members that have arrived."""
        self._advance(now)
        self._set_group(group, now)

    def decide(self, now: float) -> list[Decision]:
        """Asks the policy and applies what it decides; empty if nothing changes."""
        self._advance(now)
        decisions = self._policy.decide(self._state(now), now)
        stay = {name for decision in decisions for name in decision.members}
        for decision in decisions:
            group = self.groups.get(decision.group)
            if decision.kind == "close":
                self.lose(decision.group, now)
            elif group is not None:
                for name in set(group.members) - set(decision.members):
                    self._detach(name, now)
        for decision in decisions:
            if decision.kind != "close":
                assert decision.mesh is not None
                self._set_group(
                    GroupState(
                        decision.group,
                        decision.base,
                        decision.worker,
                        decision.gpus,
                        decision.mesh,
                        decision.members,
                        ready_s=now + self._ready_in_s(decision),
                    ),
                    now,
                )
        assert all(self.jobs[name].group for name in stay)
        return decisions

    def _ready_in_s(self, decision: Decision) -> float:
        changes, group = self._rates.changes, self.groups.get(decision.group)
        if group is not None and group.gpus == decision.gpus:
            return changes.stop_s(group.mesh == decision.mesh)
        return changes.open_s(self.jobs[decision.members[0]].job.shape) if decision.members else 0.0

    def _set_group(self, group: GroupState, now: float) -> None:
        self.groups[group.name] = group
        rate = self._rate(group)
        for index, name in enumerate(group.members):
            state = self.jobs[name]
            if state.group is None:
                self._waiting_s.pop(state.job.user, None)
            waited_s = now - state.at_s if state.group is None else 0.0
            if state.group != group.name or name not in self._counted:
                self._counted[name] = (max(now, group.ready_s), state.done_steps)
            self.jobs[name] = replace(
                state,
                group=group.name,
                at_s=max(now, group.ready_s),
                waited_s=state.waited_s + waited_s,
                steps_per_s=rate.steps_per_s[index] if rate else 0.0,
            )
        self._ledger.set_group(group, rate, now)

    def _detach(self, name: str, now: float) -> None:
        self._counted.pop(name, None)
        self._waiting_s.pop(self.jobs[name].job.user, None)
        self.jobs[name] = replace(self.jobs[name], group=None, steps_per_s=0.0, at_s=now)

    def _add_waiting(self, new: JobState, now: float) -> float:
        """Counts the work of a job that arrives; returns what its user's other jobs have left.

        A thousand arrivals in a row do not ask for a thousand jobs each.
        """
        sizes, user = worker_sizes(ClusterState(time_s=now, workers=self._workers_up(), jobs={})), new.job.user
        in_groups = [self.jobs[name] for group in self.groups.values() for name in group.members]
        if user not in self._waiting_s:
            waiting = (state for state in self.jobs.values() if state.group is None and state.job.user == user)
            self._waiting_s[user] = sum(work_s(state, now, self._rates, sizes) for state in waiting)
        before_s = self._waiting_s[user]
        self._waiting_s[user] += work_s(new, now, self._rates, sizes)
        return before_s + sum(work_s(state, now, self._rates, sizes) for state in in_groups if state.job.user == user)

    def _rate(self, group: GroupState) -> GroupRate | None:
        if not group.members:
            return None
        jobs = [self._specs[name] for name in group.members]
        return self._rates.formed(jobs, self.workers[group.worker].kind, group.mesh)

    def _speed(self, name: str, steps: float, now: float, predicted: float) -> float:
        """Measured over predicted steps per second since the job's group last changed."""
        since_s, before = self._counted.get(name, (now, steps))
        if steps - before < MEASURED_STEPS or now <= since_s:
            return self.jobs[name].speed
        return min(FASTEST, max(SLOWEST, (steps - before) / (now - since_s) / predicted))

    def _advance(self, now: float) -> None:
        if now < self._at:
            raise PlanError("online.clock", f"the clock stepped back from {self._at!r} s to {now!r} s")
        self._ledger.advance(self._at, now)
        self._at = now

    def _workers_up(self) -> dict[str, Worker]:
        return {name: worker for name, worker in self.workers.items() if name not in self.down}

    def _state(self, now: float) -> ClusterState:
        return ClusterState(
            time_s=now,
            workers=self._workers_up(),
            jobs=dict(self.jobs),
            groups=dict(self.groups),
            users=self._ledger.user_states(),
        )
