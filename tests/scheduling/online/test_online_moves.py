"""Moves of the policy that could make jobs displace each other, or stop them for too long."""

from dataclasses import replace

import pytest

from scheduling.online import ClusterState, GroupState, Job, JobState, Ours, Rates, Settings, Worker, simulate_cluster
from scheduling.online.patience import StepCost
from scheduling.online.policies.ours.claims import weigh
from scheduling.online.policies.ours.packs import evict, pack
from scheduling.online.policies.ours.search import Search
from scheduling.online.state import after

RATES = Rates()
KIND = ("h200", 140.0)
NOW = 100_000.0


def job(name, steps):
    return Job(name, "ann", "llama-3.1-8b", 0.0, [900, 500, 700], 8, steps, max_slowdown=9.0)


def cluster(*states):
    """One GPU, on which the jobs with a group train."""
    members = tuple(job_state.job.name for job_state in states if job_state.group)
    mesh = RATES.group([job_state.job for job_state in states if job_state.group], KIND, 1).mesh
    group = GroupState("h0:0", "llama-3.1-8b", "h0", (0,), mesh, members)
    jobs = {job_state.job.name: job_state for job_state in states}
    return ClusterState(time_s=NOW, workers={"h0": Worker("h0", 1)}, jobs=jobs, groups={"h0:0": group})


@pytest.mark.parametrize(("waited_s", "members"), [(0.0, {"ends", "waits"}), (90_000.0, {"ends", "trains"})])
def test_a_job_that_has_waited_long_is_not_displaced_by_another(waited_s, members):
    """It would be the next to displace a job: 900 jobs at once were displaced 1 356 times before, 532 times since."""
    ends = JobState(job("ends", 50), at_s=NOW, steps_per_s=1.0, group="h0:0", waited_s=90_000.0)
    trains = JobState(job("trains", 1100), at_s=NOW, steps_per_s=1.0, group="h0:0", waited_s=waited_s)
    waits = JobState(job("waits", 1000), at_s=NOW, waited_s=90_000.0)
    state = cluster(ends, trains, waits)
    groups = after(state, Ours(RATES, Settings(most_members=2)).decide(state, NOW))
    assert [set(group.members) for group in groups.values()] == [members]


@pytest.mark.parametrize(("group", "stalls"), [(None, False), ("h0:0", True)])
def test_a_job_that_trains_is_not_moved_to_a_session_that_opens_too_late_for_it(group, stalls):
    """Opening counts for a job that trained until then; one that waits may start."""
    short_job = replace(job("short", 300), max_slowdown=1.2)
    short = JobState(short_job, at_s=NOW, steps_per_s=1.0, group=group, in_groups_s=20.0, alone_s=20.0)
    state = cluster(JobState(job("other", 1000), at_s=NOW, steps_per_s=1.0, group="h0:0"), short)
    settings = Settings()
    search = Search(RATES, settings, state, NOW, weigh(state, NOW, settings, lambda some_job: StepCost(1.0, 1.0)))
    assert (pack(search, KIND, 1, ["short"]) is None) == stalls


def test_equal_jobs_take_turns_if_sharing_gains_less_than_it_delays():
    """Together all would end last: six jobs at once on one GPU complete later in the mean than one after the other."""
    jobs = [replace(job(f"j{i}", 2000), arrival_s=0.0) for i in range(6)]

    def mean_s(policy):
        result = simulate_cluster(jobs, [Worker("h0", 1)], policy, rates=RATES)
        return sum(result.jct_s.values()) / len(jobs)

    assert mean_s("ours") < 0.85 * mean_s("packing")


def test_jobs_share_a_pipeline_that_one_of_them_leaves_empty():
    """The gain is larger than the delay: each of two waits four slots for its update, in which the other trains."""
    jobs = [Job(name, name, "llama-3.1-70b", 0.0, [900], 1, 2000, max_slowdown=3.0) for name in "ab"]
    result = simulate_cluster(jobs, [Worker("h0", 8, 40.0)], rates=RATES)
    first = next(span for span in result.accounts.groups if span.members)
    assert (first.mesh.stages, first.members) == (8, ("a", "b"))


@pytest.mark.parametrize("protected", [False, True])
def test_a_group_that_was_placed_because_it_waited_long_is_not_evicted_by_the_same_decision(protected):
    """Later jobs may have started since: the group would have been overtaken."""
    placed = JobState(job("placed", 30_000), at_s=NOW, steps_per_s=1.0, group="h0:0")
    short = JobState(replace(job("short", 3_000), base="mistral-7b"), at_s=NOW)
    state = cluster(placed, short)
    search = Search(RATES, Settings(), state, NOW, weigh(state, NOW, Settings(), lambda some_job: StepCost(1.0, 1.0)))
    search.begin(0)
    search.protected |= {"placed"} if protected else set()
    assert evict(search) != protected


@pytest.mark.parametrize(("minutes", "hours", "goes_first"), [(1.0, 3.0, True), (1.0, 0.02, False)])
def test_a_short_job_goes_first_if_the_group_comes_back_before_its_gpu_were_free(minutes, hours, goes_first):
    """A job of another base waits for one GPU. It ends, and the group comes back, within a quarter of an hour.

    A group that ends soon is not stopped, whoever waits.
    """
    step_s = RATES.isolated_rate(job("one", 1), KIND, 1).step_s
    trains = JobState(job("trains", round(hours * 3600 / step_s)), at_s=NOW, steps_per_s=1 / step_s, group="h0:0")
    short = replace(job("short", 1), base="mistral-7b")
    short = replace(short, steps=round(60 * minutes / RATES.isolated_rate(short, KIND, 1).step_s))
    state = cluster(trains, JobState(short, at_s=NOW))
    groups = after(state, Ours(RATES, Settings(urgency=False)).decide(state, NOW))
    assert [group.members for group in groups.values()] == [("short",) if goes_first else ("trains",)]
