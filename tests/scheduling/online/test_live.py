"""A live cluster against the simulator: the same arrivals, told to it as they happen."""

from __future__ import annotations

import heapq
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from benchmarks.online import calls_of
from scheduling.errors import PlanError
from scheduling.online import ChangeCosts, Job, LiveCluster, Rates, Worker, simulate_cluster
from scheduling.online.patience import work_ahead_s
from scheduling.online.simulator import TICK_S

HOSTS = [Worker("left", 2), Worker("right", 2)]


def arrivals(count: int, seed: int) -> list[Job]:
    draw, at = np.random.default_rng(seed), 0.0
    made = []
    for number in range(count):
        at += float(draw.exponential(240.0))
        lengths = np.clip(draw.lognormal(6.0, 0.6, 64).astype(int), 16, 4000).tolist()
        base = ("qwen2.5-7b", "llama-3.2-3b")[number % 3 == 0]
        steps = int(draw.integers(150, 900))
        made.append(Job(f"n{number}", f"user{number % 3}", base, at, lengths, int(draw.choice([4, 8, 16])), steps))
    return made


class SimulatedWorkers:
    """Carries out decisions: groups open after some time and then train at true rates, which reports tell."""

    def __init__(self, cluster: LiveCluster, truth: Rates, jobs: list[Job]):
        self.cluster, self.truth = cluster, truth
        self.jobs = {job.name: job for job in jobs}
        self.done: dict[str, float] = dict.fromkeys(self.jobs, 0.0)
        self.ready: dict[str, float] = {}
        self.finish: dict[str, float] = {}
        self.now = 0.0

    def rates_of(self, group) -> dict[str, float]:
        if not group.members:
            return {}
        kind = self.cluster.workers[group.worker].kind
        rate = self.truth.formed([self.jobs[name] for name in group.members], kind, group.mesh)
        return dict(zip(group.members, rate.steps_per_s, strict=True))

    def train_until(self, now: float) -> None:
        for group in list(self.cluster.groups.values()):
            seconds = now - max(self.now, self.ready.get(group.name, group.ready_s))
            for name, speed in self.rates_of(group).items() if seconds > 0 else ():
                self.done[name] = min(self.jobs[name].steps, self.done[name] + seconds * speed)
        self.now = now
        for name in list(self.cluster.jobs):
            self.cluster.progress(name, self.done[name], now)

    def next_end(self) -> tuple[float, str]:
        ends = [(float("inf"), "")]
        for group in self.cluster.groups.values():
            start = max(self.now, self.ready.get(group.name, group.ready_s))
            ends += [
                (start + (self.jobs[name].steps - self.done[name]) / speed, name)
                for name, speed in self.rates_of(group).items()
            ]
        return min(ends)

    def run(self) -> None:
        events = [(job.arrival_s, name) for name, job in self.jobs.items()]
        heapq.heapify(events)
        tick = TICK_S
        while len(self.finish) < len(self.jobs):
            at, ended = self.next_end()
            arriving = events[0][0] if events else float("inf")
            now = min(at, arriving, tick)
            self.train_until(now)
            if now == arriving:
                self.cluster.arrive(self.jobs[heapq.heappop(events)[1]], now)
            elif now == at:
                self.finish[ended] = now
                self.cluster.leave(ended, now)
            else:
                tick += TICK_S
            for decision in self.cluster.decide(now):
                self.ready.pop(decision.group, None)


@pytest.mark.parametrize("seed", [3, 8])
def test_a_live_cluster_ends_jobs_when_the_simulator_says(seed):
    """The target: within 10 %. Both have the same costs of changes; the live one learns of progress by reports."""
    jobs, changes = arrivals(24, seed), ChangeCosts(start_s=20.0, compile_s=0.0, move_s=0.0)
    simulated = simulate_cluster(jobs, HOSTS, rates=Rates(changes))
    workers = SimulatedWorkers(LiveCluster(HOSTS, Rates(changes)), Rates(changes), jobs)
    workers.run()
    live = [workers.finish[job.name] - job.arrival_s for job in jobs]
    foretold = [simulated.finish_s[job.name] - job.arrival_s for job in jobs]
    assert workers.cluster.refusals == []
    assert np.mean(live) == pytest.approx(np.mean(foretold), rel=0.1)
    assert np.median(np.abs(np.subtract(live, foretold)) / foretold) <= 0.1


def test_a_flood_costs_a_small_user_as_little_live_as_simulated():
    """Ann floods the cluster, then bob sends four jobs. They end about as soon as alone on half of the GPUs."""
    changes = ChangeCosts(start_s=20.0, compile_s=0.0, move_s=0.0)
    job = Job("a", "ann", "llama-3.2-3b", 0.0, [400, 900, 600], 8, 8000)
    bobs = [replace(job, name=f"b{number}", user="bob", arrival_s=60.0) for number in range(4)]
    jobs = [replace(job, name=f"a{number}") for number in range(60)] + bobs
    workers = SimulatedWorkers(LiveCluster(HOSTS, Rates(changes)), Rates(changes), jobs)
    workers.run()
    simulated = simulate_cluster(jobs, HOSTS, rates=Rates(changes))
    share = simulate_cluster([replace(job, arrival_s=0.0) for job in bobs], HOSTS[:1], rates=Rates(changes))
    live, foretold, alone = (
        max(finish[job.name] for job in bobs) - arrival_s
        for finish, arrival_s in ((workers.finish, 60.0), (simulated.finish_s, 60.0), (share.finish_s, 0.0))
    )
    assert live == pytest.approx(foretold, rel=0.15)
    assert max(live, foretold) <= 1.5 * alone


class Odd:
    """A policy of a stranger: wants a job that is not there, then too many GPUs, then fails."""

    def __init__(self):
        self.calls = 0

    def decide(self, state, now):
        self.calls += 1
        raise (ValueError, KeyError, ZeroDivisionError)[self.calls % 3]("no idea")


def test_a_policy_that_fails_changes_nothing_until_the_fallback_decides():
    cluster = LiveCluster([Worker("one", 1)], Rates(), policy=Odd())
    cluster.arrive(Job("j", "ann", "llama-3.1-8b", 0.0, [300], 4, 50), 5.0)
    assert cluster.decide(5.0) == cluster.decide(6.0) == []
    assert cluster.groups == {}
    assert [decision.members for decision in cluster.decide(7.0)] == [("j",)]
    assert [refusal.why for refusal in cluster.refusals] == [
        "KeyError: 'no idea'",
        "ZeroDivisionError: no idea",
        "ValueError: no idea",
    ]


def test_what_happens_to_jobs_and_groups_is_in_the_state():
    cluster = LiveCluster([Worker("one", 1)], Rates())
    jobs = [Job(name, "ann", "llama-3.2-3b", 0.0, [400, 900], 8, 5000) for name in "ab"]
    for job in jobs:
        cluster.arrive(job, 10.0)
    assert cluster.jobs["b"].ahead_s > cluster.jobs["a"].ahead_s == 0.0
    (decision,) = cluster.decide(10.0)
    cluster.ready(decision.group, 50.0)
    first = decision.members[0]
    predicted = cluster.jobs[first].steps_per_s
    cluster.progress(first, 100 * predicted / 2, 150.0)
    assert cluster.jobs[first].speed == pytest.approx(0.5)
    assert cluster.jobs[first].in_groups_s == pytest.approx(100.0)
    cluster.lose(decision.group, 160.0)
    assert {state.group for state in cluster.jobs.values()} == {None}
    assert cluster.decide(160.0)[0].kind == "open"
    cluster.leave(first, 170.0)
    assert first not in {name for group in cluster.groups.values() for name in group.members}
    with pytest.raises(PlanError, match=r"online\.clock"):
        cluster.leave("b", 100.0)
    with pytest.raises(PlanError, match=r"online\.job-too-large"):
        cluster.arrive(Job("huge", "ann", "llama-3.1-70b", 0.0, [400], 8, 10), 180.0)


def test_what_a_user_changes_reaches_the_policy():
    """A waiting job of another base is given a priority, and takes the GPU; a member's weight changes its rate."""
    cluster = LiveCluster([Worker("one", 1)], Rates())
    jobs = [Job(name, "ann", base, 0.0, [400, 900], 8, 20_000) for name, base in
            (("a", "llama-3.2-3b"), ("b", "llama-3.2-3b"), ("c", "qwen2.5-0.5b"))]  # fmt: skip
    for job in jobs:
        cluster.arrive(job, 0.0)
    cluster.decide(0.0)
    cluster.ready(*cluster.groups, 40.0)
    (group,) = cluster.groups.values()
    waiting = next(name for name in "abc" if name not in group.members)
    assert cluster.decide(700.0) == []
    cluster.revise(replace(cluster.jobs[waiting].job, priority=50), 701.0)
    assert [decision.members for decision in cluster.decide(701.0) if decision.members] == [(waiting,)]
    assert cluster.jobs[waiting].job.arrival_s == 0.0
    cluster.revise(replace(cluster.jobs[waiting].job, weight=3.0), 702.0)
    assert cluster.jobs[waiting].job.weight == 3.0
    assert cluster.refusals == []


def test_a_lost_worker_takes_no_job_until_it_is_back():
    """Its group ends and its job waits, as the other worker is full; shares count the GPUs that are up."""
    cluster = LiveCluster([Worker("left", 1), Worker("right", 1)], Rates())
    for name, base in (("a", "llama-3.2-3b"), ("b", "qwen2.5-7b")):
        cluster.arrive(Job(name, name, base, 0.0, [700] * 8, 8, 5000), 0.0)
        cluster.decide(0.0)
    lost = cluster.groups[cluster.jobs["b"].group].worker
    cluster.set_down([lost], 400.0)
    assert {group.worker for group in cluster.groups.values()} == {"left", "right"} - {lost}
    assert [name for name, state in cluster.jobs.items() if state.group is None] == ["b"]
    cluster.decide(400.0)
    assert {group.worker for group in cluster.groups.values()} == {"left", "right"} - {lost}
    cluster.set_down([], 800.0)
    cluster.decide(800.0)
    assert {group.worker for group in cluster.groups.values()} == {"left", "right"}
    assert cluster.refusals == []


def test_arrivals_in_a_row_cost_as_much_each_however_many_wait():
    """Counted. What its user's other jobs have left when a job arrives is as counted anew for each."""
    rates = Rates()
    jobs = [replace(job, name=f"m{number}", user="ann", arrival_s=0.0) for number, job in enumerate(arrivals(90, 3))]
    cluster = LiveCluster(HOSTS, rates)
    for job in jobs[:30]:
        cluster.arrive(job, 0.0)
    cluster.decide(0.0)
    calls = []
    for some in (jobs[30:60], jobs[60:]):
        rates.prepare(some)
        calls.append(0)
        for job in some:
            rates.best_isolated_rate(job, HOSTS[0].kind, HOSTS[0].gpus)
            expected = work_ahead_s(cluster._state(0.0), "ann", 0.0, rates)
            calls[-1] += calls_of(partial(cluster.arrive, job, 0.0))
            assert cluster.jobs[job.name].ahead_s == pytest.approx(expected)
    assert calls[1] < 1.3 * calls[0]
    cluster.progress("m80", 7.0, 1.0)
    cluster.leave("m50", 1.0)
    cluster.arrive(replace(jobs[0], name="last"), 1.0)
    without = [state for name, state in cluster.jobs.items() if name != "last"]
    state = replace(cluster._state(1.0), jobs={state.job.name: state for state in without})
    assert cluster.jobs["last"].ahead_s == pytest.approx(work_ahead_s(state, "ann", 1.0, rates))
