"""Sessions that open, close and come back: what every policy pays for them, and names that are used again."""

from collections import defaultdict
from dataclasses import replace

import pytest

from scheduling.online import (
    POLICIES,
    ChangeCosts,
    ClusterState,
    Decision,
    GroupState,
    Job,
    JobState,
    Mesh,
    Rates,
    Settings,
    Worker,
    generate_trace,
    simulate_cluster,
)
from scheduling.online.patience import StepCost
from scheduling.online.policies.ours.claims import weigh
from scheduling.online.policies.ours.members import join_or_swap
from scheduling.online.policies.ours.search import Search

RATES = Rates()
KIND = ("h200", 140.0)
LAW = Job("law", "ann", "mistral-7b", 0.0, [640, 1200, 380], 6, 4000, max_slowdown=1.2)
BASES = {"llama-3.1-8b": 0.6, "llama-3.1-70b": 0.4}


def lasting(name, seconds, **changes):
    step = RATES.best_isolated_rate(LAW, KIND)
    return replace(LAW, name=name, steps=round(seconds / step.gpu_s(1)), **changes)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_member_trains_before_its_session_has_opened(policy):
    """Whoever joins a session that opens waits for it, also a job that trained until then."""
    rates, workers = Rates(ChangeCosts(start_s=70.0)), [Worker("left", 4), Worker("right", 2)]
    jobs = generate_trace("sweeps", jobs=50, workers=workers, load=1.3, seed=6, bases=BASES, rates=rates, users=3)
    result = simulate_cluster(jobs, workers, policy, rates=rates)
    periods = defaultdict(list)
    for period in result.accounts.groups:
        earlier = periods[period.group][-1:]
        continues = earlier and (earlier[0].end_s, earlier[0].gpus) == (period.start_s, period.gpus)
        if period.members and not (continues and earlier[0].base == period.base):
            job = next(job for job in jobs if job.name == period.members[0])
            assert period.ready_s >= min(period.start_s + rates.changes.open_s(job.shape), period.end_s) - 1e-6
        periods[period.group].append(period)
    assert len(periods) > 1
    for span in result.spans:
        mine = [period for period in periods[span.group] if span.job in period.members]
        (period,) = (period for period in mine if period.start_s <= span.start_s < period.end_s)
        assert span.start_s >= period.ready_s - 1e-6


@pytest.mark.parametrize(("opens_s", "joins"), [(1.0, True), (900.0, False)])
def test_a_job_that_trained_joins_a_new_session_only_if_its_bound_pays_for_the_opening(opens_s, joins):
    """Another move took it out of its group and opened the session in the same decision."""
    rates = Rates(ChangeCosts(start_s=opens_s, load_bytes_per_s=1e15))
    mover, first = lasting("mover", 900.0, weight=3.0), lasting("first", 90_000.0, max_slowdown=9.0)
    states = [JobState(mover, at_s=50.0, group="h:0", in_groups_s=100.0, alone_s=100.0), JobState(first, at_s=50.0)]
    mesh = rates.isolated_rate(mover, KIND, 1).mesh
    state = ClusterState(
        time_s=50.0,
        workers={"h": Worker("h", 1)},
        jobs={job_state.job.name: job_state for job_state in states},
        groups={"h:0": GroupState("h:0", "mistral-7b", "h", (0,), mesh, ("mover",))},
    )
    claims = weigh(state, 50.0, Settings(), lambda job: StepCost(1.0, 1.0))
    search = Search(rates, Settings(), state, 50.0, claims)
    search.begin(0)
    search.close(search.draft.groups["h:0"])
    search.open("mistral-7b", ("h", 0), ["first"], rates.group([first], KIND, 1), "test")
    assert (join_or_swap(search), "mover" in search.draft.groups["h:0"].members) == (joins, joins)


def test_the_end_that_was_expected_of_an_earlier_group_is_none_of_a_later_one_of_its_name():
    """The first group would have ended after 60 s. It is closed before, and its name is used again."""
    rates = Rates(ChangeCosts(start_s=0.0, load_bytes_per_s=1e15, change_s=0.0, compile_s=0.0, move_s=0.0, save_s=0.0))
    mesh = Mesh(1, 1, 3072)
    speed = rates.on_mesh([LAW], KIND, mesh).steps_per_s[0]
    short, long = replace(LAW, steps=round(60 * speed)), replace(LAW, name="long", steps=round(500 * speed))
    ticks = [replace(LAW, name=f"t{at}", arrival_s=at, steps=1) for at in (30.0, 40.0)]

    def group(*members):
        return Decision(
            kind="open", group="box:0", base="mistral-7b", worker="box", gpus=(0,), mesh=mesh, members=members
        )

    table = {0.0: [group("law")], 30.0: [Decision(kind="close", group="box:0")], 40.0: [group("long")]}

    class Script:
        def decide(self, state, now):
            rest = group(*state.jobs)
            return table.pop(now, [replace(rest, kind="change")] if now > 400 and "long" not in state.jobs else [])

    result = simulate_cluster([short, long, *ticks], [Worker("box", 1)], Script(), rates=rates)
    spans = [(span.start_s, span.end_s) for span in result.accounts.groups if span.members == ("long",)]
    assert spans == [(40.0, pytest.approx(540.0, abs=1.0))]
