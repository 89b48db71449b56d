"""What each baseline decides, on the smallest cluster that tells it from the others."""

from dataclasses import replace

import pytest

from scheduling.online import ClusterState, GroupState, Job, JobState, Rates, Worker
from scheduling.online.policies.baselines import Backfill, ElasticSrtf, Fifo, Mlora, Packing, Srtf, Tlora
from scheduling.online.state import after

RATES = Rates()
KIND, NOW = ("h200", 140.0), 10_000.0
SMALL, WIDE = "llama-3.1-8b", "llama-3.1-70b"  # of one GPU, and of two at least


def job(name: str, steps: int, base: str = SMALL, **settings) -> Job:
    return Job(name, "ann", base, 0.0, [900, 500, 700], 8, steps, **settings)


def groups(policy, gpus: int, training: dict[Job, int], waiting: list[Job]) -> dict[tuple[str, ...], int]:
    """Members → GPUs after a decision; those that train have a group each, side by side."""
    running, first = {}, 0
    for trained, size in training.items():
        mesh, name = RATES.isolated_rate(trained, KIND, size).mesh, f"h:{first}"
        members = tuple(range(first, first + size))
        running[name] = GroupState(name, trained.base_name, "h", members, mesh, (trained.name,))
        first += size
    jobs = {other.name: JobState(other, at_s=NOW) for other in waiting}
    for name, group in running.items():
        (trained,) = (other for other in training if other.name == group.members[0])
        jobs[trained.name] = JobState(trained, at_s=NOW, steps_per_s=1.0, group=name)
    state = ClusterState(time_s=NOW, workers={"h": Worker("h", gpus)}, jobs=jobs, groups=running)
    decided = after(state, policy(RATES).decide(state, NOW))
    return {tuple(sorted(group.members)): len(group.gpus) for group in decided.values() if group.members}


@pytest.mark.parametrize(
    ("policy", "steps", "starts"), [(Fifo, 100, False), (Backfill, 100, True), (Backfill, 9000, False)]
)
def test_a_later_job_goes_first_only_if_it_ends_before_the_first_can_start(policy, steps, starts):
    """The first one needs both GPUs, of which one trains 3000 steps more."""
    decided = groups(policy, 2, {job("long", 3000): 1}, [job("a-first", 500, WIDE), job("later", steps)])
    assert decided == {("long",): 1} | ({("later",): 1} if starts else {})


@pytest.mark.parametrize(("policy", "steps", "runs"), [(Srtf, 100, "waits"), (Srtf, 9000, "long"), (Fifo, 100, "long")])
def test_only_a_shorter_job_preempts(policy, steps, runs):
    assert groups(policy, 1, {job("long", 3000): 1}, [job("waits", steps)]) == {(runs,): 1}


def test_elastic_shortest_first_scales_out_and_in():
    assert groups(Srtf, 2, {job("long", 3000): 1}, []) == {("long",): 1}
    assert groups(ElasticSrtf, 2, {job("long", 3000): 1}, []) == {("long",): 2}
    assert groups(ElasticSrtf, 2, {job("long", 20): 1}, []) == {("long",): 1}  # it ends before a session has opened
    assert groups(ElasticSrtf, 2, {job("long", 3000): 2}, [job("waits", 9000)]) == {("long",): 1, ("waits",): 1}


def test_mlora_takes_four_jobs_at_a_time_in_order_of_arrival():
    five = [replace(job(name, 100), arrival_s=float(place)) for place, name in enumerate("edcba")]
    assert groups(Mlora, 1, {}, five) == {("b", "c", "d", "e"): 1}


@pytest.mark.parametrize(
    ("policy", "bound", "shares"), [(Packing, 1.01, True), (Tlora, 1.01, False), (Tlora, 1.3, True)]
)
def test_packing_ignores_bounds_and_tlora_keeps_them(policy, bound, shares):
    """Together they train more tokens a second; the larger job takes 1.02 times as long as on half of the time."""
    large = Job("large", "ann", SMALL, 1.0, [4000], 64, 3000, max_slowdown=bound)
    decided = groups(policy, 1, {job("small", 3000): 1}, [large])
    assert decided == ({("large", "small"): 1} if shares else {("small",): 1})
