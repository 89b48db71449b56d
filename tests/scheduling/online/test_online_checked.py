"""The policy never stops: no decision of it is refused on ordinary traces, and one that is refused changes nothing."""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
from more_cases import nightly

from scheduling import PlanError
from scheduling.cost_model import PassCost, StageCost
from scheduling.online import (
    POLICIES,
    TRACES,
    CheckedPolicy,
    ClusterState,
    Decision,
    GroupState,
    Job,
    JobState,
    LiveCluster,
    Mesh,
    Ours,
    Rates,
    Settings,
    ShapeFacts,
    Worker,
    generate_trace,
    simulate_cluster,
)

RATES = Rates()
BASES = {"llama-3.1-8b": 0.5, "qwen2.5-14b": 0.3, "qwen2.5-32b": 0.2}
RUNS = list(product((1, 2), TRACES, (0.7, 1.0, 1.2), (0, 1)))
CHEAP = [(1, "sweeps", 1.0, 0), (1, "day-night", 1.2, 1), (2, "sweeps", 0.7, 1), (2, "steady", 1.2, 0)]


@pytest.mark.parametrize("run", [run if run in CHEAP else nightly(run) for run in RUNS], ids=str)
def test_no_decision_on_a_small_machine_is_refused(run):
    gpus, trace, load, seed = run
    workers, rates = [Worker("one", gpus)], Rates()
    jobs = generate_trace(trace, jobs=150, workers=workers, load=load, seed=seed, bases=BASES, users=5, rates=rates)
    result = simulate_cluster(jobs, workers, rates=rates)
    assert len(result.finish_s) == 150
    assert result.refusals == ()


@pytest.mark.parametrize("switch", ["grouping", "residual", "urgency", "elasticity", "preemption"])
def test_an_ablation_keeps_the_promises_that_it_makes(switch):
    """A flood of one user, so that patience ends: `urgency` is what keeps later jobs from starting first."""
    policy = Ours(RATES, Settings(**{switch: False}))
    assert ("no starvation" in policy.promises) == (switch != "urgency")
    flood = [Job(f"a{i}", "ann", "qwen2.5-0.5b", 0.0, [700, 300], 4, 400 + i) for i in range(60)]
    flood += [Job(f"b{i}", "bob", "llama-3.2-1b", 60.0 * i, [900], 4, 300) for i in range(10)]
    result = simulate_cluster(flood, [Worker("one", 1)], policy, rates=RATES)  # raises on a refusal
    assert len(result.finish_s) == 70


JOBS = [Job(name, "ann", "qwen2.5-0.5b", 0.0, [700, 300], 4, 400) for name in "ab"]
STATE = ClusterState(time_s=5.0, workers={"h": Worker("h", 2)}, jobs={job.name: JobState(job) for job in JOBS})
GOOD = Decision(
    kind="open", group="g", base="qwen2.5-0.5b", worker="h", gpus=(1,), mesh=Mesh(1, 1, 1024), members=("b",)
)
BAD = Decision(kind="close", group="nothing")


class Scripted:
    """Decides what it was given, one after another; an exception is raised."""

    name = "scripted"

    def __init__(self, *answers):
        self.answers = iter(answers)

    def decide(self, state, now):
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_refused_decisions_change_nothing_and_a_simpler_policy_decides_after_three():
    policy = CheckedPolicy(Scripted([BAD], [GOOD], [BAD], KeyError("x"), [BAD], [BAD], [GOOD], [BAD]), RATES)
    decided = [policy.decide(STATE, now) for now in (5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0)]
    placed = [[name for decision in decisions for name in decision.members] for decisions in decided]
    assert placed == [[], ["b"], [], [], ["a", "b"], ["a", "b"], ["b"], []]
    assert [refusal.time_s for refusal in policy.refusals] == [5.0, 7.0, 8.0, 9.0, 10.0, 12.0]
    assert policy.refusals[0].why == "nothing does not exist"
    assert policy.refusals[2].why == "KeyError: 'x'"
    assert {refusal.policy for refusal in policy.refusals} == {"scripted"}


def test_a_fallback_that_fails_as_well_is_counted_too():
    policy = CheckedPolicy(Scripted(*[[BAD]] * 4), RATES, fallback=Scripted([BAD], [GOOD]))
    assert [policy.decide(STATE, 5.0) for _ in range(4)] == [[], [], [], [GOOD]]
    assert len(policy.refusals) == 5


def test_errors_of_the_caller_are_raised():
    policy = CheckedPolicy(Ours(RATES), RATES)
    with pytest.raises(PlanError, match="stepped back"):
        policy.decide(STATE, 4.0)
    assert policy.refusals == []


@pytest.mark.parametrize("late", [0.01, -0.01, 0.3])
@pytest.mark.parametrize("policy", POLICIES)
def test_jobs_may_end_later_or_earlier_than_predicted(policy, late):
    """No decision fails, and no session of ours is closed before it trains."""
    small = {"llama-3.1-8b": 0.5, "qwen2.5-14b": 0.5}
    for gpus in (1, 4):
        workers = [Worker("one", gpus)]
        jobs = generate_trace("sweeps", jobs=40, workers=workers, load=1.3, seed=2, bases=small, rates=RATES)
        result = simulate_cluster(jobs, workers, policy, rates=RATES, late=late)
        assert len(result.finish_s) == 40
        assert result.refusals == ()
        if policy == "ours":
            assert [session for session in sessions_of(result) if not session.trains_s] == []


class Session(NamedTuple):
    group: str
    base: str
    gpus: tuple[int, ...]
    trains_s: float
    end_s: float


def sessions_of(result):
    """Spans of a group on the same GPUs, joined."""
    sessions = []
    for span in sorted(result.accounts.groups, key=lambda span: (span.group, span.start_s)):
        same = span.group, span.base, span.gpus
        trains_s, before = span.end_s - span.ready_s, sessions[-1] if sessions else None
        if before and before[:3] == same and before.end_s == span.start_s:
            trains_s += sessions.pop().trains_s
        sessions.append(Session(*same, trains_s, span.end_s))
    return sessions


@pytest.mark.parametrize("late_s", [0.5, 5.0, 60.0])
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_a_job_that_is_late_stops_nobody(late_s, gpus):
    """It is past its predicted end while a job of another base waits for its GPUs."""
    cluster = LiveCluster([Worker("one", gpus)], RATES)
    cluster.arrive(Job("late", "ann", "llama-3.1-8b", 0.0, [512] * 50, 8, 100), 0.0)
    cluster.decide(0.0)
    cluster.ready(*cluster.groups, 30.0)
    cluster.progress("late", 99, 100.0)
    for number in range(2 * gpus):
        cluster.arrive(Job(f"new{number}", "ann", "qwen3-8b", 100.0, [512] * 50, 8, 4000), 100.0)
    opened = []
    for second in range(90):
        decisions = cluster.decide(100.0 + late_s + second)
        opened += [decision.group for decision in decisions if decision.kind == "open"]
    assert cluster.refusals == []
    assert len(opened) == len(set(opened))


def test_the_fallback_leaves_a_group_alone_that_has_just_begun():
    """Elastic SRTF would preempt the long job for the short one; a minute after it began it does."""
    jobs = [replace(JOBS[0], name="long", steps=40_000), replace(JOBS[1], name="short", base="llama-3.2-1b")]
    opened = Decision(
        kind="open", group="g", base="qwen2.5-0.5b", worker="h", gpus=(0,), mesh=Mesh(1, 1, 1024), members=("long",)
    )
    policy = Scripted([opened], *[[BAD]] * 9)
    cluster = LiveCluster([Worker("h", 1)], RATES, policy=policy)
    cluster.arrive(jobs[0], 0.0)
    cluster.decide(0.0)
    cluster.ready("g", 10.0)
    cluster.arrive(jobs[1], 20.0)
    assert [cluster.decide(now) for now in (21.0, 22.0, 23.0, 69.0)] == [[]] * 4
    assert {decision.kind for decision in cluster.decide(71.0)} >= {"open"}
    hasty = CheckedPolicy(Scripted(*[[BAD]] * 3), RATES, fallback=Scripted([Decision(kind="close", group="g")]))
    state = ClusterState(
        time_s=5.0,
        workers={"h": Worker("h", 1)},
        jobs={"long": JobState(jobs[0], group="g")},
        groups={"g": GroupState("g", "qwen2.5-0.5b", "h", (0,), Mesh(1, 1, 1024), ("long",), ready_s=4.0)},
    )
    assert [hasty.decide(state, 5.0) for _ in range(3)] == [[]] * 3
    assert "takes long from g" in hasty.refusals[-1].why


@pytest.mark.parametrize("late", [-1.0, float("nan"), float("inf")])
def test_a_job_cannot_end_before_it_starts(late):
    with pytest.raises(PlanError, match="late must be above -1"):
        simulate_cluster(JOBS, [Worker("h", 1)], late=late)


def test_a_run_goes_on_after_refusals():
    """Until the fallback decides, no job runs and no event comes, which is no standstill."""
    broken = CheckedPolicy(type("Broken", (), {"decide": lambda *_: [BAD]})(), RATES)
    result = simulate_cluster(JOBS, [Worker("h", 2)], broken, rates=RATES)
    assert len(result.finish_s) == 2
    assert len(result.refusals) >= 3
    with pytest.raises(PlanError, match="decided what cannot be"):
        simulate_cluster(JOBS, [Worker("h", 2)], broken.policy, rates=RATES)


def test_wrong_predictions_do_not_stop_a_run():
    """Every base and mesh is up to a fifth faster or slower than predicted; measured speeds reach the policy."""

    class Actual(ShapeFacts):
        def stage_costs(self, job, device, num_stages, recompute):
            factor = 1.0 + 0.1 * ((job.shape.num_layers * 7 + num_stages * 3 + recompute) % 5 - 2)
            costs = super().stage_costs(job, device, num_stages, recompute)
            return replace(costs, stages=tuple(scaled(stage, factor) for stage in costs.stages))

    def scaled(stage, factor):
        passes = {name: getattr(stage, name) for name in ("forward", "backward")}
        return StageCost(
            update_s=stage.update_s * factor,
            **{
                name: PassCost(fixed_s=of.fixed_s * factor, token_s=of.token_s * factor, square_s=of.square_s * factor)
                for name, of in passes.items()
            },
        )

    workers = [Worker("one", 2)]
    jobs = generate_trace("sweeps", jobs=80, workers=workers, load=1.0, seed=3, bases=BASES, users=5, rates=RATES)
    seen = set()

    class Watched(Ours):
        def decide(self, state, now):
            seen.update(job_state.speed for job_state in state.jobs.values())
            return super().decide(state, now)

    truth = Rates(facts=Actual())
    policy = CheckedPolicy(Watched(RATES), truth, tolerance=0.25)
    result = simulate_cluster(jobs, workers, policy, rates=RATES, truth=truth)
    assert len(result.finish_s) == 80
    assert result.refusals == ()
    assert min(seen) < 0.95
    assert max(seen) > 1.05
