"""Event-driven simulation of a cluster: arrivals, faults, and the decisions of a policy."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

from scheduling.errors import PlanError
from scheduling.online.check import WRONG, CheckedPolicy
from scheduling.online.ledger import Ledger
from scheduling.online.patience import work_ahead_s
from scheduling.online.policies.baselines import Backfill, ElasticSrtf, Fifo, Mlora, Packing, Srtf, Tlora
from scheduling.online.policies.ours import Ours
from scheduling.online.rates import Rates
from scheduling.online.result import ClusterResult
from scheduling.online.running import Running
from scheduling.online.state import ClusterState, Policy, Traits
from scheduling.online.types import End, Fault, Job, User, Worker, check_input

POLICIES = {
    "ours": Ours,
    "fifo": Fifo,
    "backfill": Backfill,
    "srtf": Srtf,
    "elastic-srtf": ElasticSrtf,
    "mlora": Mlora,
    "packing": Packing,
    "tlora": Tlora,
}
TICK_S = 180.0  # interval at which the policy decides while jobs wait, even without events


class _Event(NamedTuple):
    time_s: float
    order: int  # at equal times: repairs, faults, arrivals, cancels, finishes
    name: str
    version: int = 0


REPAIR, FAULT, ARRIVAL, CANCEL, FINISH, TICK = range(6)


class Simulator:
    """Simulates a cluster; `run` returns the result.

    Args:
        jobs, workers, users, faults, ends, late: as in `simulate_cluster`.
        policy: makes the decisions. A `CheckedPolicy` goes on after a refusal; any other policy's refusal is raised.
        rates: how fast groups train.
        predicted: the policy's own predictions, if they are others. The simulator then reports measured speeds.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        workers: Sequence[Worker],
        policy: Policy,
        rates: Rates,
        *,
        predicted: Rates | None = None,
        users: Sequence[User] = (),
        faults: Sequence[Fault] = (),
        ends: Sequence[End] = (),
        late: float = 0.0,
    ):
        check_input(jobs, workers, faults, ends)
        self.policy = policy if isinstance(policy, CheckedPolicy) else CheckedPolicy(policy, rates, strict=True)
        self.rates, self.traits = rates, Traits.of(policy)
        self.jobs = {job.name: job for job in sorted(jobs, key=lambda job: (job.arrival_s, job.name))}
        self.workers = {worker.name: worker for worker in workers}
        self.now = 0.0
        self.down: dict[str, int] = {}
        user_by_name = {user.name: user for user in users}
        names = sorted({job.user for job in jobs} | user_by_name.keys())
        accounts = {name: user_by_name.get(name, User(name)) for name in names}
        self.ledger = Ledger(workers, rates, accounts, self.jobs)
        self.running = Running(
            self.jobs,
            self.workers,
            rates,
            self.ledger,
            mixes=self.traits.mixes,
            ends={end.job: end for end in ends},
            late=late,
            predicted=predicted,
            expect=self._expect,
        )
        self.decisions: list[tuple[float, str]] = []
        self.events: list[_Event] = [_Event(job.arrival_s, ARRIVAL, job.name) for job in self.jobs.values()]
        for fault in faults:
            self.events.append(_Event(fault.start_s, FAULT, fault.worker))
            self.events.append(_Event(fault.start_s + fault.duration_s, REPAIR, fault.worker))
        self.events += [_Event(end.time_s, CANCEL, end.job) for end in ends if end.time_s is not None]
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
            decision_due = False
            while self.events and self.events[0].time_s <= now:
                decision_due |= self._happen(heapq.heappop(self.events))
            if decision_due or now >= next_tick:
                self._decide()
            if len(self.running.finish_s) == len(self.jobs):
                break
            if any(state.group is None for state in self.running.unfinished.values()):
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
            jobs=dict(self.running.unfinished),
            groups={name: live.state for name, live in self.running.groups.items()},
            users=self.ledger.user_states(),
        )

    def _expect(self, time_s: float, group: str, version: int) -> None:
        heapq.heappush(self.events, _Event(time_s, FINISH, group, version))

    def _advance(self, now: float) -> None:
        self.ledger.advance(self.now, now)
        self.now = now

    def _happen(self, event: _Event) -> bool:
        """Applies an event; returns whether the policy should decide."""
        if event.order == ARRIVAL:
            job = self.jobs[event.name]
            self.running.arrive(job, work_ahead_s(self.state(), job.user, self.now, self.rates), self.now)
            return True
        if event.order == CANCEL:
            return self.running.cancel(event.name, self.now)
        if event.order == FINISH:
            return self.running.finish(event.name, event.version, self.now)
        if event.order == FAULT:
            self.down[event.name] = self.down.get(event.name, 0) + 1
            self.ledger.up(self.workers[event.name], False)
            ended_groups = self.running.fail(event.name, self.now)
            self.decisions += [(self.now, f"{event.name} failed: {group} ends") for group in ended_groups]
            return True
        if event.order == REPAIR:
            self.down[event.name] -= 1
            self.ledger.up(self.workers[event.name], not self.down[event.name])
            return True
        return True

    def _decide(self) -> None:
        state = self.state()
        decisions = self.policy.decide(state, self.now)
        if not decisions:
            return
        self.running.apply(decisions, self.now)
        self.decisions += [(self.now, str(decision)) for decision in decisions]

    def _refuse_misfits(self) -> None:
        self.rates.prepare(self.jobs.values())
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
        moving = any(live.rate for live in self.running.groups.values()) or any(
            event.order < FINISH for event in self.events
        )
        if self.running.unfinished and not moving and not self.policy.refused_in_a_row:
            raise PlanError(
                "online.stuck",
                f"{self.traits.name} lets {len(self.running.unfinished)} jobs wait while no job runs and none comes",
            )

    def _result(self) -> ClusterResult:
        return ClusterResult(
            policy=self.traits.name,
            jobs=tuple(self.jobs.values()),
            gpus=sum(worker.gpus for worker in self.workers.values()),
            finish_s=self.running.finish_s,
            ended=self.running.ended,
            start_s=self.running.start_s,
            slowdown=self.running.slowdown,
            isolated={name: self.ledger.isolated_rate(job) for name, job in self.jobs.items()},
            preemptions=self.running.preemptions,
            decisions=tuple(self.decisions),
            refusals=tuple(self.policy.refusals),
            spans=tuple(self.running.spans),
            accounts=self.ledger.close(self.now),
        )


def make_policy(name: str, rates: Rates) -> Policy:
    """Returns a policy by its name.

    Raises:
        PlanError: `online.policy`.
    """
    if name not in POLICIES:
        raise PlanError("online.policy", f"no policy {name!r}", fix=f"one of {', '.join(POLICIES)}")
    return POLICIES[name](rates)


def simulate_cluster(
    jobs: Sequence[Job],
    workers: Sequence[Worker],
    policy: str | Policy = "ours",
    seed: int = 0,
    faults: Sequence[Fault | tuple[str, float, float]] = (),
    users: Sequence[User] = (),
    rates: Rates | None = None,
    truth: Rates | None = None,
    ends: Sequence[End] = (),
    late: float = 0.0,
) -> ClusterResult:
    """Simulates jobs that arrive over time on a cluster until all are done. The result is deterministic.

    Args:
        policy: a name from `POLICIES`, or an object with `decide(state, now)`. A refused decision of a named policy, or
            of a `CheckedPolicy`, changes nothing and is in the result; one of another object raises.
        seed: for policies that draw random numbers; the built-in ones do not.
        faults: workers that fail for some time; tuples are (worker, start_s, duration_s).
        users: weights and quotas; other users have weight 1.
        rates: cached predictions of the policy, to share between several runs of the same jobs.
        truth: how fast groups really train (None: as predicted). The checker knows the truth, and forgives a slowdown
            that is a quarter above its bound.
        ends: jobs that stop early, fail or are cancelled; the policy does not know before.
        late: every job ends so much later than its steps say (0.3: by 30 %; below 0: earlier), which the policy does
            not know either.

    Raises:
        PlanError: bad input, a job that no worker has the memory for, or a decision that breaks a rule.
    """
    if not -1.0 < late < inf:
        raise PlanError("online.late", f"late must be above -1, not {late!r}", fix="late=0.01: one per cent later")
    rates = rates or Rates()
    tolerance = WRONG if truth else 0.0
    chosen = make_policy(policy, rates) if isinstance(policy, str) else policy
    if isinstance(policy, str):
        chosen = CheckedPolicy(chosen, truth or rates, tolerance=tolerance)
    events = [fault if isinstance(fault, Fault) else Fault(*fault) for fault in faults]
    with few_collections():
        predicted = rates if truth else None
        simulator = Simulator(
            jobs, workers, chosen, truth or rates, predicted=predicted, users=users, faults=events, ends=ends, late=late
        )
        return simulator.run()


@contextmanager
def few_collections() -> Iterator[None]:
    """Rates are cached in millions of small tuples; looking through them for cycles again and again costs 4 %."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
