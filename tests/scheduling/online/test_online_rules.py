"""Single rules of the online layer, each on the smallest case that it decides."""

from types import SimpleNamespace

import pytest

from scheduling import PlanError
from scheduling.online import (
    ClusterState,
    Decision,
    GroupState,
    Job,
    JobState,
    Mesh,
    Ours,
    Rates,
    Settings,
    Worker,
)
from scheduling.online.check import check_decisions
from scheduling.online.patience import StepCost, step_cost, worker_sizes
from scheduling.online.policies.ours.claims import QUEUE, is_urgent, weigh
from scheduling.online.sharing import Members, alternate

RATES = Rates()


def job(name, arrival_s=0.0, **settings):
    return Job(name, "ann", "qwen2.5-0.5b", arrival_s, [700, 300], 4, **({"steps": 400} | settings))


@pytest.mark.parametrize(("waited", "refused"), [(3.8, False), (4.2, True)])
def test_no_later_job_starts_once_another_has_waited_four_times_its_fair_time(waited, refused):
    """A single user has all GPUs, so the fair time of its first job is that in isolation."""
    first = JobState(job("first"))
    workers = {"h": Worker("h", 1)}
    empty = ClusterState(time_s=0.0, workers=workers, jobs={"first": first})
    now = waited * step_cost(RATES, first.job, worker_sizes(empty)).seconds * first.job.steps
    later = JobState(job("later", arrival_s=now / 2), at_s=now / 2)
    state = ClusterState(time_s=now, workers=workers, jobs={"first": first, "later": later})
    opened = Decision(
        kind="open", group="g", base="qwen2.5-0.5b", worker="h", gpus=(0,), mesh=Mesh(1, 1, 1024), members=("later",)
    )
    if not refused:
        check_decisions(state, [opened], RATES, Ours(RATES), now)
        return
    with pytest.raises(PlanError, match="later starts while first has waited"):
        check_decisions(state, [opened], RATES, Ours(RATES), now)


@pytest.mark.parametrize(
    ("steps", "ready_before_s", "closes"),
    [(2, 0.0, False), (2, 15.0, False), (2, 60.0, True), (2_000, 0.0, True)],
)
def test_a_job_of_seconds_lets_a_session_train_that_has_just_opened(steps, ready_before_s, closes):
    """Its patience is over when one has opened, so it would end each before a first step. Longer jobs do not wait."""
    first, second = (Job(base, "ann", base, 0.0, [700, 300], 4, steps) for base in ("qwen2.5-0.5b", "llama-3.2-1b"))
    empty = ClusterState(time_s=0.0, workers={"h": Worker("h", 1)}, jobs={"second": JobState(second)})
    alone_s = step_cost(RATES, second, worker_sizes(empty)).seconds * steps
    now = 50.0 + 4 * alone_s
    group = GroupState("g", first.base_name, "h", (0,), Mesh(1, 1, 1024), (first.name,), ready_s=now - ready_before_s)
    states = JobState(first, at_s=now, group="g"), JobState(second)
    jobs = {state.job.name: state for state in states}
    state = ClusterState(time_s=now, workers=empty.workers, jobs=jobs, groups={"g": group})
    kinds = {decision.kind for decision in Ours(RATES).decide(state, now)}
    assert ("close" in kinds) is closes


@pytest.mark.parametrize(("factor", "urgent"), [(1.2, True), (1.4, True), (1.7, False), (0.0, True)])
def test_a_job_is_urgent_while_half_as_much_again_as_its_work_is_left_to_its_deadline(factor, urgent):
    now, left_s = 5_000.0, 10_000.0
    job_state = JobState(job("law", deadline_s=now + factor * left_s + 100.0), at_s=now)
    assert is_urgent(job_state, now, left_s, longest_wait_s=1e9) == urgent
    assert not is_urgent(JobState(job("law"), at_s=now), now, left_s, longest_wait_s=1e9)


def test_work_is_worth_more_while_jobs_wait_behind_it():
    """By QUEUE per job that comes later and GPU: what a second of delay costs them."""
    jobs = {name: JobState(job(name, steps=steps)) for name, steps in (("b", 300), ("a", 200), ("c", 400))}
    state = ClusterState(time_s=0.0, workers={"h": Worker("h", 2)}, jobs=jobs)
    order = weigh(state, 0.0, Settings(), lambda some_job: StepCost(1.0, 0.5)).order
    assert [order[name] for name in "abc"] == pytest.approx([0.5 + QUEUE * later / 2 for later in (2, 1, 0)])


@pytest.mark.parametrize(("slots", "cycle"), [((1,), 4), ((1, 1), 4), ((2, 2, 2), 6)])
def test_jobs_that_alternate_keep_the_distance_of_the_pipeline(slots, cycle):
    """A batch of one slot on four stages: its next batch starts four slots later, whoever fills the slots between."""
    profiles = [
        SimpleNamespace(slots_at=lambda *_, n=n: n, batch_tokens=1000, squares=700.0, between_steps_s=lambda *_: 0.0)
        for n in slots
    ]
    ones = [1.0] * len(slots)
    cost = SimpleNamespace(seconds=lambda tokens, squares: 1.0, update_s=0.0)
    rate = alternate(Members(profiles, ones, ones, ones), Mesh(4, 1, 1024), cost)
    assert rate.steps_per_s == pytest.approx([1 / cycle] * len(slots))
