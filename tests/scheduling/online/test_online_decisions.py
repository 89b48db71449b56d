"""The checker finds every invalid decision, and policies are pure."""

from copy import deepcopy
from dataclasses import replace

import pytest

from scheduling import PlanError
from scheduling.online import (
    POLICIES,
    ClusterState,
    Decision,
    GroupState,
    Job,
    JobState,
    Mesh,
    Ours,
    Rates,
    User,
    UserState,
    Worker,
    check_decisions,
    make_policy,
    simulate_cluster,
)

RATES = Rates()
OURS = Ours(RATES)


def job(name, **changes):
    values = {"user": "ann", "base": "llama-3.1-8b", "arrival_s": 0.0, "lengths": [900, 500, 700]}
    return Job(**({"name": name, "global_batch": 8, "steps": 2000} | values | changes))


def running(job, group, steps_per_s=1.0):
    return JobState(job, at_s=50.0, steps_per_s=steps_per_s, group=group)


@pytest.fixture
def state():
    """Two hosts; a, b train together on four GPUs, c waits and so does the 70B job d; e is tall and slow."""
    jobs = [job("a"), job("b"), job("c"), job("d", base="llama-3.1-70b"), job("e", lengths=[4096], global_batch=1)]
    states = [running(jobs[0], "h0:0"), running(jobs[1], "h0:0"), *(JobState(job_state) for job_state in jobs[2:])]
    return ClusterState(
        time_s=100.0,
        workers={name: Worker(name, 8) for name in ("h0", "h1")},
        jobs={job_state.job.name: job_state for job_state in states},
        groups={"h0:0": GroupState("h0:0", "llama-3.1-8b", "h0", (0, 1, 2, 3), Mesh(1, 4, 2560), ("a", "b"))},
        users={"ann": UserState(User("ann"))},
    )


def opened(**changes):
    values = {"kind": "open", "group": "h1:0", "base": "llama-3.1-8b", "worker": "h1", "gpus": (0, 1)}
    return Decision(**(values | {"mesh": Mesh(1, 2, 2560), "members": ("c",), "why": "test"} | changes))


def changed(**changes):
    values = {"kind": "change", "group": "h0:0", "base": "llama-3.1-8b", "worker": "h0", "gpus": (0, 1, 2, 3)}
    return Decision(**(values | {"mesh": Mesh(1, 4, 2560), "members": ("a", "b", "c"), "why": "test"} | changes))


def test_good_decisions_pass(state):
    check_decisions(state, [opened()], RATES, OURS, 100.0)
    check_decisions(state, [changed()], RATES, OURS, 100.0)
    check_decisions(state, [Decision(kind="close", group="h0:0"), opened(members=("a",))], RATES, OURS, 100.0)


MUTATIONS = {
    "opened twice": ([opened(), opened()], "two decisions"),
    "open already": ([opened(group="h0:0", worker="h0", gpus=(4, 5))], "open already"),
    "changes what is not there": ([changed(group="h1:0", worker="h1")], "does not exist"),
    "closes what is not there": ([Decision(kind="close", group="h9:0")], "does not exist"),
    "changed and closed": ([changed(), Decision(kind="close", group="h0:0")], "changed and closed"),
    "no mesh": ([opened(mesh=None)], "no mesh"),
    "another base": ([changed(base="llama-3.1-70b")], "another base or worker"),
    "worker that is down": ([opened(worker="h7")], "not up"),
    "GPU beyond the worker": ([opened(gpus=(7, 8))], "on GPU 8"),
    "GPU used twice": ([opened(worker="h0", group="h0:3", gpus=(3, 4))], "share GPU 3"),
    "three GPUs": ([opened(gpus=(0, 1, 2), mesh=Mesh(1, 3, 2560))], "mesh of 3"),
    "mesh of another size": ([opened(mesh=Mesh(1, 4, 2560))], "2 GPUs for a mesh of 4"),
    "unknown job": ([opened(members=("z",))], "no unfinished job"),
    "job of another base": ([opened(members=("d",))], "not on its own base"),
    "job in two groups": ([opened(members=("a",))], "a is in"),
    "samples longer than microbatches": ([opened(members=("e",))], "shorter than a sample"),
    "more memory than there is": (
        [opened(base="llama-3.1-70b", members=("d",), gpus=(0,), mesh=Mesh(1, 1, 2560))],
        "more than 140 GiB",
    ),
    "a member slowed beyond its bound": ([opened(members=("c", "e"), mesh=Mesh(1, 2, 8192))], "slows"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_checker_catches(state, name):
    decisions, message = MUTATIONS[name]
    with pytest.raises(PlanError, match=message) as caught:
        check_decisions(state, decisions, RATES, OURS, 100.0)
    assert caught.value.code == "online.decision"


def test_checker_catches_starvation(state):
    late = replace(state, time_s=1e6, jobs={**state.jobs, "y": JobState(job("y", arrival_s=9e5), at_s=9e5)})
    with pytest.raises(PlanError, match="y starts while c has waited"):
        check_decisions(late, [opened(members=("y",))], RATES, OURS, 1e6)
    check_decisions(late, [opened(members=("y",))], RATES, make_policy("fifo", RATES), 1e6)  # promises nothing


def test_checker_catches_a_broken_quota(state):
    tight = replace(state, users={"ann": UserState(User("ann", max_gpus=5.0))})
    with pytest.raises(PlanError, match="quota of 5"):
        check_decisions(tight, [opened()], RATES, OURS, 100.0)


def test_clock_going_back_is_an_error(state):
    for policy in POLICIES:
        with pytest.raises(PlanError, match="stepped back") as caught:
            make_policy(policy, RATES).decide(state, 99.0)
        assert caught.value.code == "online.clock"


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_pure(state, policy):
    """Another caller, with rates of its own, gets the same decisions."""
    before = deepcopy(state)
    decisions = make_policy(policy, RATES).decide(state, 100.0)
    assert decisions
    assert make_policy(policy, Rates()).decide(before, 100.0) == decisions
    assert state == before


def test_measured_speeds_correct_predictions(state):
    """One GPU and two jobs of bases that cannot share it: a is shorter, unless it trains at half its predicted rate."""
    jobs = [job("a", steps=2000), job("b", steps=2300, base="mistral-7b")]

    def first(speed):
        waiting = {job.name: JobState(job, speed=speed if job.name == "a" else 1.0) for job in jobs}
        return OURS.decide(replace(state, workers={"h": Worker("h", 1)}, jobs=waiting, groups={}), 100.0)[0]

    predicted, measured = first(1.0), first(0.5)
    assert (predicted.members, measured.members) == (("a",), ("b",))
    with pytest.raises(PlanError) as caught:
        first(0.0)
    assert caught.value.code == "online.speed"


def test_decisions_have_reasons(state):
    for decision in OURS.decide(state, 100.0):
        assert "\n" not in str(decision)
        if decision.members:
            assert "tokens/s" in decision.why
            assert "slowdowns" in decision.why
            assert "of 140 GiB" in decision.why


def test_any_object_that_decides_is_a_policy():
    class Patient:
        """Opens one group for each job, an hour late."""

        def decide(self, state, now):
            if now < 3600:
                return []
            waiting = [job_state.job for job_state in state.jobs.values() if job_state.group is None]
            free = [gpu for gpu in range(8) if all(gpu not in group.gpus for group in state.groups.values())]
            pairs = zip(waiting, free, strict=False)
            return [
                opened(group=f"h1:{gpu}", gpus=(gpu,), mesh=Mesh(1, 1, 2560), members=(job.name,)) for job, gpu in pairs
            ]

    jobs = [job("a"), job("b", arrival_s=3700.0)]
    result = simulate_cluster(jobs, [Worker("h1", 8)], Patient(), faults=[("h1", 10.0, 20.0)])
    assert result.policy == "Patient"
    assert result.start_s["a"] >= 3600
    with pytest.raises(PlanError, match="wait while no job runs"):
        simulate_cluster(jobs[:1], [Worker("h1", 8)], type("Idle", (), {"decide": lambda *_: []})())
