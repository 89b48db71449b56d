"""A service sees jobs come and go for months: caches stay small, and forgetting changes no result."""

import gc

from scheduling.online import ClusterState, Job, JobState, Ours, Rates, Worker, job_cache
from scheduling.online.policies.ours import policy as ours

KIND = ("h200", 140.0)


def coming(number):
    lengths = [300 + number % 97, 500, 700 + number % 13]
    return Job(f"j{number}", "ann", "qwen2.5-0.5b", float(number), lengths, 4, 50)


def alive():
    gc.collect()
    return sum(isinstance(candidate, Job) for candidate in gc.get_objects())


def test_jobs_that_were_seen_long_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr(job_cache, "MOST_JOBS", 40)
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
    monkeypatch.setattr(job_cache, "MOST_JOBS", 8)
    small, members = Rates(), [coming(number) for number in range(60)]
    for first in (0, 31, 4, 57, 0, 29):
        group = members[first : first + 3]
        for gpus in (1, 2):
            assert small.group(group, KIND, gpus) == Rates().group(group, KIND, gpus)
        for job in group:
            assert small.best_isolated_rate(job, KIND) == Rates().best_isolated_rate(job, KIND)
            assert small.profile(job).batch_tokens == Rates().profile(job).batch_tokens
