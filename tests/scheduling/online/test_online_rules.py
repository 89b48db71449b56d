"""Single rules of the online layer, each on the smallest case that it decides."""

from types import SimpleNamespace

import pytest

from scheduling import PlanError
from scheduling.online import ClusterState, Decision, Job, JobState, Mesh, Ours, Rates, Settings, Worker
from scheduling.online.check import check_decisions, isolated_time_s
from scheduling.online.policies.ours.claims import is_urgent
from scheduling.online.policies.ours.worth import Appraiser
from scheduling.online.sharing import Members, alternate

RATES = Rates()


def job(name, arrival_s=0.0, **settings):
    return Job(name, "ann", "qwen2.5-0.5b", arrival_s, [700, 300], 4, 400, **settings)


@pytest.mark.parametrize(("waited", "refused"), [(9.0, False), (11.0, True)])
def test_no_later_job_starts_once_another_has_waited_ten_times_its_time(waited, refused):
    first = JobState(job("first"))
    workers = {"h": Worker("h", 1)}
    alone_s = isolated_time_s(first, RATES, ClusterState(time_s=0.0, workers=workers, jobs={"first": first}))
    now = waited * alone_s
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


@pytest.mark.parametrize(("factor", "urgent"), [(1.2, True), (1.4, True), (1.7, False), (0.0, True)])
def test_a_job_is_urgent_while_half_as_much_again_as_its_work_is_left_to_its_deadline(factor, urgent):
    now, left_s = 5_000.0, 10_000.0
    one = JobState(job("law", deadline_s=now + factor * left_s + 100.0), at_s=now)
    assert is_urgent(one, now, left_s, longest_wait_s=1e9) == urgent
    assert not is_urgent(JobState(job("law"), at_s=now), now, left_s, longest_wait_s=1e9)


def test_delay_costs_more_while_jobs_wait():
    """The last of n members must bring price / (2 (n - 1) + jobs that wait on the GPUs of the group)."""

    def least_gain(waiting):
        jobs = {name: JobState(job(name)) for name in waiting}
        state = ClusterState(time_s=0.0, workers={"h": Worker("h", 2)}, jobs=jobs)
        return Appraiser(RATES, Settings(), state, 0.0, None, None).least_gain(2, 2)

    price = Settings().delay_price
    assert least_gain("abc") == pytest.approx(price / (2 + 3))
    assert least_gain("") == pytest.approx(price / 2)


@pytest.mark.parametrize(("slots", "cycle"), [((1,), 4), ((1, 1), 4), ((2, 2, 2), 6)])
def test_jobs_that_alternate_keep_the_distance_of_the_pipeline(slots, cycle):
    """A batch of one slot on four stages: its next batch starts four slots later, whoever fills the slots between."""
    profiles = [SimpleNamespace(slots_at=lambda *_, n=n: n, batch_tokens=1000, squares=700.0) for n in slots]
    ones = [1.0] * len(slots)
    cost = SimpleNamespace(seconds=lambda tokens, squares: 1.0, update_s=0.0)
    rate = alternate(Members(profiles, ones, ones, ones), Mesh(4, 1, 1024), cost)
    assert rate.steps_per_s == pytest.approx([1 / cycle] * len(slots))
