"""Constants that decide: deadlines, claims, costs of changes, rates of the baselines. A wrong one fails here."""

from dataclasses import replace

import numpy as np
import pytest
from more_cases import nightly

from benchmarks.online_traces import HELD_OUT, held_out_trace
from scheduling.online import (
    POLICIES,
    ChangeCosts,
    CheckedPolicy,
    ClusterState,
    Job,
    JobState,
    Mesh,
    Ours,
    Rates,
    Settings,
    Worker,
    simulate_cluster,
)
from scheduling.online.costs import rank_class
from scheduling.online.patience import step_cost
from scheduling.online.policies.ours.claims import weigh
from scheduling.online.traces import TRACES, generate_trace

RATES = Rates()
KIND = ("h200", 140.0)
DEFAULTS = Settings()
MODEL = Job("model", "ann", "llama-3.1-8b", 0.0, [900, 500, 700], 8, 1000)
STEP = RATES.best_isolated_rate(MODEL, KIND)


def lasting(name, seconds, **changes):
    return replace(MODEL, name=name, steps=round(seconds / STEP.gpu_s(1)), **changes)


def claims_of(*jobs, gpus=1, now=0.0, settings=DEFAULTS):
    state = ClusterState(
        time_s=now, workers={"h": Worker("h", gpus)}, jobs={job.name: JobState(job, at_s=now) for job in jobs}
    )
    return weigh(state, now, settings, lambda job: step_cost(RATES, job, ((KIND, gpus),)))


@pytest.mark.parametrize(("share", "urgent"), [(1.3, True), (1.7, False)])
def test_a_job_is_urgent_while_its_deadline_is_within_one_and_a_half_of_its_time(share, urgent):
    """Beyond two minutes that a session needs to open."""
    job = lasting("a", 10_000.0)
    due = replace(job, deadline_s=120.0 + share * 10_000.0 / STEP.mesh.gpus)
    assert bool(claims_of(due).urgent) == urgent
    late = claims_of(replace(job, deadline_s=1.0), now=2.0)
    assert not late.urgent  # too late for its deadline: in turn


def test_a_deadline_decides_who_goes_first():
    """Of two jobs, the longer one has a deadline that it only meets if it starts now."""
    jobs = [lasting("short", 1000.0), lasting("due", 4000.0, deadline_s=4800.0)]
    result = simulate_cluster(jobs, [Worker("one", 1)], rates=RATES)
    assert result.finish_s["due"] <= 4800.0
    free = simulate_cluster([jobs[0], replace(jobs[1], deadline_s=None)], [Worker("one", 1)], rates=RATES)
    assert free.finish_s["due"] > 4800.0


def test_a_deadline_makes_a_job_scale_out():
    """Two hours of a GPU are due in half an hour, beside jobs that keep the other GPUs busy."""
    jobs = [lasting(f"j{i}", 20_000.0) for i in range(8)]
    jobs.append(lasting("due", 7200.0, arrival_s=600.0, deadline_s=2400.0))
    result = simulate_cluster(jobs, [Worker("host0", 8)], rates=RATES)
    assert result.finish_s["due"] <= 2400.0
    assert result.refusals == ()


def test_of_all_policies_only_ours_scales_a_job_out_for_its_deadline():
    """Two hours of a GPU are due in half an hour. Who has no deadlines runs the job on its best mesh, or in turn."""
    jobs = [lasting(f"j{i}", 20_000.0, user=f"u{i % 3}") for i in range(8)]
    jobs.append(lasting("due", 7200.0, arrival_s=600.0, deadline_s=2400.0))
    hosts = [Worker("host0", 8)]
    results = {policy: simulate_cluster(jobs, hosts, policy, rates=RATES) for policy in POLICIES}
    met = {policy: result.summary()["deadlines_met"] for policy, result in results.items()}
    assert met == dict.fromkeys(POLICIES, 0.0) | {"ours": 1.0}
    most = max(len(span.gpus) for span in results["ours"].accounts.groups if "due" in span.members)
    assert most > STEP.mesh.gpus
    assert all(result.refusals == () for result in results.values())


@pytest.mark.parametrize(("count", "gpus"), [(3, 1), (60, 2), (1000, 64)])
@pytest.mark.parametrize("priority", [100, -100, 7])
def test_any_priority_goes_before_all_lower_ones(count, gpus, priority):
    """Priorities are compared and never computed with, so none is too large."""
    jobs = [lasting(f"j{i}", 400.0 + i, base=("llama-3.1-8b", "qwen3-8b")[i % 2]) for i in range(count)]
    jobs.append(lasting("odd", 90_000.0, priority=priority, base="mistral-7b"))
    workers = {f"h{host}": Worker(f"h{host}", min(gpus, 8)) for host in range(max(1, gpus // 8))}
    state = ClusterState(time_s=0.0, workers=workers, jobs={job.name: JobState(job) for job in jobs})
    policy = CheckedPolicy(Ours(RATES), RATES, strict=True)
    placed = {name for decision in policy.decide(state, 0.0) for name in decision.members}
    assert ("odd" in placed) == (priority > 0)
    assert placed


def test_a_job_keeps_its_session_from_one_of_a_lower_priority():
    """A short job of another base would go first, and the long one come back after it."""
    jobs = [lasting("long", 20_000.0, priority=1), lasting("short", 30.0, base="qwen3-8b", arrival_s=60.0)]
    for priority, first in ((1, "long"), (0, "short")):
        run = simulate_cluster([replace(jobs[0], priority=priority), jobs[1]], [Worker("one", 1)], rates=RATES)
        assert min(run.finish_s, key=run.finish_s.get) == first


def test_a_group_is_worth_what_each_of_its_members_adds():
    """Beside a job of the highest priority, one of the lowest that costs it nothing still counts."""
    claims = claims_of(lasting("a", 900.0, priority=100), lasting("b", 900.0), lasting("c", 900.0, priority=-100))
    for priority in (100, 0, -100):
        step = claims.at(priority).step
        own = {100: "a", 0: "b", -100: "c"}[priority]
        assert sum(step.values()) > sum(step.values()) - step[own]
        assert step[own] == claims.step[own]
    assert sorted("abc", key=claims.rank) == ["c", "b", "a"]


def test_a_claim_is_what_a_jobs_work_brings_forward():
    """The first of three jobs delays two on two GPUs, and each counts twice, for those that will come."""
    jobs = [lasting("c", 3000.0), lasting("a", 1000.0), lasting("b", 2000.0)]
    order = claims_of(*jobs, gpus=2).order
    own_claim = 1 / STEP.mesh.gpus
    assert order == pytest.approx({"a": own_claim + 2 * 2 / 2, "b": own_claim + 2 * 1 / 2, "c": own_claim})
    in_turn = claims_of(*jobs, gpus=2, settings=Settings(short_first=False)).order
    assert sorted(in_turn, key=in_turn.get, reverse=True) == ["c", "a", "b"]


@pytest.mark.parametrize("seed", [3, 9, nightly(1), nightly(4), nightly(5)])
def test_a_bound_holds_from_the_first_step_to_the_last(seed):
    """Long samples beside small batches of short ones mix as fluids, and wait for each other in microbatches."""
    draw, jobs = np.random.default_rng(seed), []
    for index in range(12):
        middle, spread, longest, batch = ((1300, 0.7, 4000, 4), (280, 0.5, 900, 2))[index % 2]
        lengths = np.clip(draw.lognormal(np.log(middle), spread, 64), 20, longest).astype(int).tolist()
        shape = Job(f"j{index}", "ann", "qwen2.5-14b", 60.0 * index, lengths, batch, 1)
        steps = round((1500 + 100 * index) / RATES.best_isolated_rate(shape, KIND, 1).step_s)
        jobs.append(replace(shape, steps=steps))
    result = simulate_cluster(jobs, [Worker("one", 1)], rates=RATES)
    assert max(len(span.members) for span in result.accounts.groups) > 1
    assert result.summary()["bounds_broken"] == 0


def host_trace(trace, gpus, load, seed, jobs):
    make = generate_trace if trace in TRACES else held_out_trace
    small = {"bases": {"qwen3-8b": 0.5, "mistral-7b": 0.3, "qwen3-14b": 0.2}} if trace in TRACES and gpus < 8 else {}
    workers = [Worker("one", gpus)]
    return make(trace, jobs=jobs, workers=workers, load=load, seed=seed, rates=RATES, **small), workers


@pytest.mark.parametrize(
    ("trace", "gpus", "load", "seed", "jobs"),
    [
        ("pareto", 8, 1.3, 4, 80),  # sessions that open together share the rate of loading
        ("sweeps", 2, 1.3, 2, 80),  # the last member of a group ends alone, on a mesh that was chosen for two
        ("tiny+huge", 8, 1.0, 2, 150),  # a job takes another's place, which joins again at once: one stop for both
        ("pareto", 8, 1.0, 1, 80),  # a job joins a group that slows it down more than the group after the change
        ("bursts", 8, 1.0, 1, 150),  # the first of three ends, and two do not fill their mesh
        *(
            nightly(trace, gpus, load, seed, 80)
            for gpus, load in ((8, 0.7), (8, 1.0), (8, 1.3), (2, 1.3), (1, 1.0))
            for seed in range(5)
            for trace in (*HELD_OUT, *TRACES)
        ),
    ],
)
def test_bounds_hold_in_whole_traces(trace, gpus, load, seed, jobs):
    jobs, workers = host_trace(trace, gpus, load, seed, jobs)
    result = simulate_cluster(jobs, workers, rates=RATES)
    assert result.summary()["bounds_broken"] == 0
    assert result.refusals == ()


def test_a_job_whose_bound_is_broken_trains_alone_at_once():
    """Its partner was cancelled: what it has had is above its bound, and no way to its end is within."""
    late = JobState(replace(MODEL, steps=500, name="late"), done_steps=480.0, in_groups_s=900.0, alone_s=500.0)
    state = ClusterState(time_s=10.0, workers={"one": Worker("one", 1)}, jobs={"late": late})
    (decision,) = CheckedPolicy(Ours(RATES), RATES, strict=True).decide(state, 10.0)
    assert (decision.kind, decision.members) == ("open", ("late",))


def test_a_longer_queue_makes_jobs_share():
    """Two jobs gain less work by sharing than they delay each other; with a queue behind them it pays."""
    rates = Rates(capacities=[4096])
    small = replace(MODEL, lengths=[1400, 300, 900, 700], global_batch=4)

    def most_members(queue):
        jobs = [replace(small, name=f"j{i}", steps=3000 + i) for i in range(2 + queue)]
        state = ClusterState(time_s=0.0, workers={"h": Worker("h", 1)}, jobs={job.name: JobState(job) for job in jobs})
        return max(len(decision.members) for decision in Ours(rates, Settings(most_members=2)).decide(state, 0.0))

    assert (most_members(0), most_members(40)) == (1, 2)


def test_a_job_that_alternates_alone_trains_as_fast_as_alone():
    """Between two batches of a job the baseline waits for the pipeline, as an isolated job does."""
    tall = replace(MODEL, base="llama-3.1-70b")
    for gpus in (2, 4, 8):
        alone = RATES.isolated_rate(tall, KIND, gpus)
        rate = RATES.alternating_on_mesh([tall], KIND, alone.mesh)
        assert rate.steps_per_s[0] == pytest.approx(1 / alone.step_s, rel=1e-6)
    deep = Mesh(4, 1, alone.mesh.capacity_tokens)
    single, two = (RATES.alternating_on_mesh([tall] * count, KIND, deep) for count in (1, 2))
    slots = RATES.profile(tall).slots_at(deep.capacity_tokens, 1)
    gained = 2 * (slots + 3) / max(2 * slots, slots + 3)
    assert two.tokens_per_s / single.tokens_per_s == pytest.approx(gained, rel=0.05)


def test_a_change_costs_what_it_compiles():
    """A session has the programs of meshes and classes of ranks that it had before."""
    costs = ChangeCosts(change_s=3.0, compile_s=20.0, start_s=30.0, load_bytes_per_s=4e9)
    assert (costs.stop_s(True), costs.stop_s(False)) == (3.0, 23.0)
    shape = MODEL.shape
    load_s = 2 * shape.parameters / 4e9
    assert costs.open_s(shape, loading=2) == pytest.approx(30.0 + 3 * load_s)
    assert [rank_class(ranks) for ranks in ([8], [16, 4], [17], [64, 8], [300])] == [16, 16, 32, 64, 300]


class Script:
    """Decides what a function says."""

    def __init__(self, decide):
        self.decide = decide


def test_the_simulator_compiles_only_what_a_session_has_not_compiled():
    """A large rank joins after a small one and leaves again: the first change compiles, later ones do not."""
    from scheduling.online import Decision

    jobs = [lasting("small", 4000.0), lasting("large", 4000.0, rank=64), lasting("tick", 1.0, base="qwen2.5-0.5b")]
    jobs = jobs[:2] + [replace(jobs[0], name=f"t{i}", arrival_s=1000.0 * i, steps=1) for i in (1, 2, 3)]
    mesh = Mesh(1, 1, 4096)
    members = {0.0: ("small",), 1000.0: ("small", "large"), 2000.0: ("small",), 3000.0: ("small", "large")}
    ready = []

    def decide(state, now):
        if now in members:
            kind = "open" if now == 0.0 else "change"
            return [
                Decision(
                    kind=kind, group="g", base="llama-3.1-8b", worker="h", gpus=(0,), mesh=mesh, members=members[now]
                )
            ]
        if now > 3000.0 and "g" in state.groups and not state.groups["g"].members and state.jobs:
            return [
                Decision(
                    kind="change", group="g", base="llama-3.1-8b", worker="h", gpus=(0,), mesh=mesh,
                    members=tuple(state.jobs),
                )
            ]  # fmt: skip
        return []

    result = simulate_cluster(jobs, [Worker("h", 1)], Script(decide), rates=RATES)
    spans = [span for span in result.accounts.groups if span.members and span.start_s in (1000.0, 2000.0, 3000.0)]
    ready = [round(span.ready_s - span.start_s, 3) for span in spans]
    assert ready == [23.0, 3.0, 3.0]


def test_short_jobs_do_not_thrash():
    """Jobs of less than a minute of two bases: sessions stay, for opening one takes longer than a job."""
    jobs = [
        replace(lasting(f"j{i}", 20.0 + 60.0 * (i * 7 % 11) / 11), base=("llama-3.1-8b", "mistral-7b")[i % 3 == 0],
                arrival_s=3.0 * i)
        for i in range(120)
    ]  # fmt: skip
    ours, packing, srtf = (
        simulate_cluster(jobs, [Worker("host0", 8)], policy, rates=RATES) for policy in ("ours", "packing", "srtf")
    )
    mean = [sum(result.jct_s.values()) for result in (ours, packing, srtf)]
    assert mean[0] <= 1.1 * min(mean)
    assert ours.refusals == ()
