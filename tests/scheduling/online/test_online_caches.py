"""A service sees jobs come and go for months: caches stay small, and forgetting changes no result."""

import gc
from dataclasses import replace

import pytest
from more_cases import nightly

from benchmarks.online import calls_of
from scheduling.online import ClusterState, Job, JobState, LiveCluster, Ours, Rates, Worker, rates
from scheduling.online.policies.ours import policy as ours

KIND = ("h200", 140.0)


def coming(number):
    lengths = [300 + number % 97, 500, 700 + number % 13]
    return Job(f"j{number}", "ann", "qwen2.5-0.5b", float(number), lengths, 4, 50)


def alive():
    gc.collect()
    return sum(isinstance(candidate, Job) for candidate in gc.get_objects())


def test_jobs_that_were_seen_long_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr(rates, "MOST_JOBS", 40)
    monkeypatch.setattr(ours, "SPARE", 20)
    policy, before = Ours(Rates()), alive()
    for number in range(150):
        job = coming(number)
        state = ClusterState(
            time_s=float(number), workers={"host0": Worker("host0", 1)}, jobs={job.name: JobState(job)}
        )
        assert policy.decide(state, float(number))
    assert alive() - before <= 40 + 20 + 3


def test_forgetting_changes_no_rate(monkeypatch):
    monkeypatch.setattr(rates, "MOST_JOBS", 8)
    small, members = Rates(), [coming(number) for number in range(60)]
    for first in (0, 31, 4, 57, 0, 29):
        group = members[first : first + 3]
        for gpus in (1, 2):
            assert small.group(group, KIND, gpus) == Rates().group(group, KIND, gpus)
        for job in group:
            assert small.best_isolated_rate(job, KIND) == Rates().best_isolated_rate(job, KIND)
            assert small.profile(job).batch_tokens == Rates().profile(job).batch_tokens


def decision_calls(waiting, share):
    """Function calls of the first decision, and of one after nothing has changed; some jobs have waited for a month."""
    cluster, now = LiveCluster([Worker("host0", 1)], Rates(), policy=Ours(Rates())), 1e7
    for number in range(waiting):
        waited_s = 3e6 if number % 10 < 10 * share else 0.0
        job = replace(coming(number % 5), name=f"w{number}", arrival_s=now - waited_s + number * 1e-3 - 100.0)
        cluster.arrive(job, now, waited_s=waited_s)
    first = calls_of(lambda: cluster.decide(now))
    for _ in range(20):
        if not cluster.decide(now):
            break
    last = calls_of(lambda: cluster.decide(now))
    assert len(cluster.jobs) == waiting
    assert cluster.refusals == []
    return first, last


@pytest.mark.parametrize(("share", "waiting"), [(0.3, 500), nightly(1.0, 1500), nightly(0.3, 10_000)])
def test_the_work_of_a_decision_is_linear_in_the_jobs_that_wait(share, waiting):
    few, many = decision_calls(waiting // 5, share), decision_calls(waiting, share)
    assert many[0] <= 5.5 * few[0]
    assert many[1] <= 5.5 * few[1]
    assert many[1] <= 20 * waiting + 20_000
