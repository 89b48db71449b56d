"""Property tests: no GPU is used twice, every step is trained once, and promises hold."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from online_strategies import faults, jobs, workers

from scheduling import PlanError
from scheduling.online import POLICIES, Job, Rates, User, Worker, simulate_cluster
from scheduling.online.patience import PATIENCE

RATES = Rates()
SETTINGS = settings(max_examples=25, deadline=None)


def overlaps(intervals):
    ordered = sorted(intervals)
    return [pair for pair in pairwise(ordered) if pair[1][0] < pair[0][1] - 1e-6]


@SETTINGS
@given(st.data(), jobs(), workers(), st.sampled_from(sorted(POLICIES)))
def test_gpus_jobs_and_memory_are_conserved_at_every_instant(data, jobs, workers, policy):
    events = data.draw(faults(workers))
    result = simulate_cluster(jobs, workers, policy=policy, faults=events, rates=RATES)
    by_gpu, by_job, kinds = defaultdict(list), defaultdict(list), {worker.name: worker for worker in workers}
    by_name = {job.name: job for job in jobs}
    for span in result.accounts.groups:
        if span.members:
            members = [by_name[name] for name in span.members]
            assert RATES.memory_gib(members, kinds[span.worker].kind, span.mesh) <= kinds[span.worker].memory_gib
        for gpu in span.gpus:
            assert 0 <= gpu < kinds[span.worker].gpus
            by_gpu[span.worker, gpu].append((span.start_s, span.end_s))
        for name in span.members:
            by_job[name].append((span.start_s, span.end_s))
        for fault in events:
            if fault.worker == span.worker:
                assert span.end_s <= fault.start_s or span.start_s >= fault.start_s + fault.duration_s
    assert not [overlap for of in (by_gpu, by_job) for intervals in of.values() if (overlap := overlaps(intervals))]


@SETTINGS
@given(st.data(), jobs(), workers(), st.sampled_from(sorted(POLICIES)))
def test_every_step_of_every_job_is_trained_once(data, jobs, workers, policy):
    events = data.draw(faults(workers))
    result = simulate_cluster(jobs, workers, policy=policy, faults=events, rates=RATES)
    trained, by_job = defaultdict(float), {job.name: job for job in jobs}
    for span in result.spans:
        trained[span.job] += span.steps
        assert by_job[span.job].arrival_s <= span.start_s <= span.end_s <= result.finish_s[span.job]
    wasted = result.accounts.lost_tokens
    tokens = sum(steps * by_job[name].tokens / by_job[name].steps for name, steps in trained.items())
    assert tokens == pytest.approx(sum(job.tokens for job in jobs) + wasted, rel=1e-5)
    for job in jobs:
        assert trained[job.name] >= job.steps * (1 - 1e-5)
        if not events:
            assert trained[job.name] == pytest.approx(job.steps, rel=1e-5)


@SETTINGS
@given(jobs(), workers())
def test_runs_are_deterministic_with_shared_rates(jobs, workers):
    first = simulate_cluster(jobs, workers, rates=RATES)
    again = simulate_cluster(list(reversed(jobs)), workers, rates=Rates())
    assert first.decisions == again.decisions
    assert first.finish_s == again.finish_s


@SETTINGS
@given(jobs(most_jobs=14, bases=("llama-3.1-8b",)))
def test_groups_keep_every_members_bound(jobs):
    """The checker stops decisions that break a bound; a member that others left loses less than a new mesh costs."""
    result = simulate_cluster(jobs, [Worker("one", 8)], rates=RATES)
    in_groups_s = defaultdict(float)
    for span in result.spans:
        in_groups_s[span.job] += span.end_s - span.start_s
    for job in jobs:
        most = max(1.5, 1.15 * job.max_slowdown)
        fair_s = in_groups_s[job.name] / result.slowdown[job.name]
        assert in_groups_s[job.name] <= most * fair_s + RATES.changes.open_s(job.shape)


@SETTINGS
@given(jobs(most_jobs=14, bases=("llama-3.1-8b",)))
def test_nobody_starves_while_later_jobs_start(jobs):
    """One user on one GPU, so that a job's fair time is the work of the jobs up to it, at most."""
    jobs = sorted((replace(job, user="ann") for job in jobs), key=lambda job: (job.arrival_s, job.name))
    result = simulate_cluster(jobs, [Worker("small", 1)], rates=RATES)
    fair_s = 0.0
    for index, earlier in enumerate(jobs):
        fair_s += RATES.best_isolated_rate(earlier, ("h200", 140.0), 1).step_s * earlier.steps
        until_s = earlier.arrival_s + PATIENCE * fair_s + RATES.changes.open_s(earlier.shape)
        for later in jobs[index + 1 :]:
            if later.arrival_s > earlier.arrival_s and later.weight <= earlier.weight:
                overtakes = result.start_s[later.name] < result.start_s[earlier.name]
                assert not overtakes or result.start_s[later.name] <= until_s


@SETTINGS
@given(st.integers(2, 5), st.floats(1.5, 6.0))
def test_a_user_with_more_weight_is_served_no_later(count, weight):
    """Two users with equal jobs: raising one's weight never lengthens its mean completion time beyond the other's."""
    jobs = [
        Job(f"{user}{i}", user, "llama-3.1-8b", 0.0, [900, 400], 8, 4000)
        for i in range(count)
        for user in ("ann", "bob")
    ]
    result = simulate_cluster(jobs, [Worker("one", 1)], rates=RATES, users=[User("ann", weight), User("bob", 1.0)])
    mean = {user: sum(result.jct_s[f"{user}{i}"] for i in range(count)) for user in ("ann", "bob")}
    assert mean["ann"] <= mean["bob"] * (1 + 1e-9)


@SETTINGS
@given(st.integers(2, 5), st.floats(1.0, 4.0), st.floats(1.0, 4.0))
def test_more_weight_never_makes_a_user_wait_longer(count, weight, factor):
    """Two users with equal jobs: the mean completion time of one does not grow with its weight."""

    def mean_s(weight):
        jobs = [
            Job(f"{user}{i}", user, "llama-3.1-8b", 0.0, [900, 400], 8, 4000)
            for i in range(count)
            for user in ("ann", "bob")
        ]
        users = [User("ann", weight), User("bob", 1.0)]
        result = simulate_cluster(jobs, [Worker("one", 1)], rates=RATES, users=users)
        return sum(result.jct_s[f"ann{i}"] for i in range(count)) / count

    assert mean_s(weight * factor) <= mean_s(weight) * (1 + 1e-9)


@SETTINGS
@given(st.integers(1, 4), st.integers(1, 6))
def test_a_quota_bounds_what_a_user_starts_with(count, quota):
    """Another user's jobs are there all the time, so nothing is left to the one with the quota by finishing."""
    jobs = [Job(f"ann{i}", "ann", "llama-3.2-1b", 0.0, [900, 400], 8, 2000) for i in range(count)]
    result = simulate_cluster(jobs, [Worker("one", 8)], rates=RATES, users=[User("ann", max_gpus=quota)])
    first = [span for span in result.accounts.groups if span.members and span.start_s == 0.0]
    assert 0 < sum(len(span.gpus) for span in first) <= quota


def test_a_quota_holds_over_all_bases_in_one_decision():
    """The checker stops a decision that gives ann's jobs of one base what those of the other have taken."""
    jobs = [Job(f"ann{i}", "ann", base, 0.0, [900, 400], 8, 2000) for i, base in enumerate(("llama-3.2-1b",) * 4)]
    jobs += [Job(f"more{i}", "ann", "llama-3.1-8b", 0.0, [900, 400], 8, 2000) for i in range(4)]
    hosts = [Worker("one", 8), Worker("two", 8)]
    result = simulate_cluster(jobs, hosts, rates=RATES, users=[User("ann", max_gpus=6.0)])
    assert sum(len(span.gpus) for span in result.accounts.groups if span.start_s == 0.0) <= 6


def test_a_job_that_fits_nowhere_is_refused_by_name():
    with pytest.raises(PlanError, match=r"tall fits nowhere"):
        simulate_cluster([Job("tall", "ann", "llama-3.1-70b", 0.0, [512], 8, 10)], [Worker("small", 1, 80.0)])
