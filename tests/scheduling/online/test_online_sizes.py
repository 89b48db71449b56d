"""Groups that grow onto free GPUs or give half of theirs away, each on the smallest cluster that decides it."""

import pytest

from scheduling.online import ClusterState, GroupState, Job, JobState, Ours, Rates, Settings, Worker
from scheduling.online.state import after

RATES = Rates()
KIND, NOW, STEPS = ("h200", 140.0), 100_000.0, 100_000
BASE, OTHER = "llama-3.1-8b", "mistral-7b"


def trains(name: str, gpus: int, left: int, *, base: str = BASE, first: int = 0, batch: int = 32, bound: float = 1.3):
    """A job alone in its group for ten seconds, with some steps left: its state and that of the group."""
    job = Job(name, "ann", base, 0.0, [900, 500, 700], batch, STEPS, max_slowdown=bound)
    group, mesh = f"h0:{first}", RATES.group([job], KIND, gpus).mesh
    state = JobState(
        job, at_s=NOW, done_steps=STEPS - left, steps_per_s=1.0, group=group, in_groups_s=10.0, alone_s=10.0
    )
    return state, GroupState(group, base, "h0", tuple(range(first, first + gpus)), mesh, (name,))


def waits(name: str, steps: int, *, base: str):
    return JobState(Job(name, "bob", base, NOW - 10.0, [900, 500], 8, steps), at_s=NOW)


def sizes(gpus: int, *running, waiting=(), **settings) -> dict[str, int]:
    """GPUs of every job that trains after a decision."""
    jobs = {state.job.name: state for state, _ in running} | {state.job.name: state for state in waiting}
    groups = {group.name: group for _, group in running}
    state = ClusterState(time_s=NOW, workers={"h0": Worker("h0", gpus)}, jobs=jobs, groups=groups)
    decided = after(state, Ours(RATES, Settings(**settings)).decide(state, NOW))
    return {name: len(group.gpus) for group in decided.values() for name in group.members}


@pytest.mark.parametrize(("left", "gpus"), [(20, 1), (100, 1), (300, 2), (10_000, 2)])
def test_a_group_takes_the_free_half_if_it_lasts_longer_than_its_session_opens(left, gpus):
    """A hundred steps take 129 s on one GPU, and on two 64 s after 34 s of opening. No bound decides."""
    law = trains("law", 1, left, bound=99.0)
    assert sizes(2, law) == {"law": gpus}
    assert sizes(2, law, elasticity=False) == {"law": 1}


def test_a_group_does_not_grow_if_the_stop_breaks_the_bound_of_a_member():
    assert sizes(2, trains("law", 1, 300, bound=1.05)) == {"law": 1}


def test_a_group_does_not_grow_onto_gpus_on_which_another_trains():
    running = trains("law", 1, 10_000), trains("med", 1, 10_000, base=OTHER, first=1)
    assert sizes(2, *running) == {"law": 1, "med": 1}


def test_a_group_gives_half_of_its_gpus_to_a_job_of_another_base():
    law = trains("law", 8, 20_000, batch=8)
    assert sizes(8, law) == {"law": 8}
    assert sizes(8, law, waiting=[waits("med", 5000, base=OTHER)]) == {"law": 4, "med": 4}
