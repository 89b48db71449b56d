"""Random jobs, clusters and faults for property tests."""

from hypothesis import strategies as st

from scheduling.online import Fault, Job, Worker

BASES = ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b")


@st.composite
def jobs(draw, *, most_jobs: int = 10, bases=BASES):
    count = draw(st.integers(1, most_jobs))
    return [
        Job(
            f"j{index}",
            draw(st.sampled_from(["ann", "bob", "cem"])),
            draw(st.sampled_from(bases)),
            draw(st.floats(0, 4000)),
            draw(st.lists(st.integers(1, 4096), min_size=1, max_size=8)),
            global_batch=draw(st.integers(1, 40)),
            steps=draw(st.integers(1, 3000)),
            rank=draw(st.sampled_from([8, 16, 64])),
            weight=draw(st.sampled_from([1.0, 1.0, 1.0, 2.0, 0.5])),
            deadline_s=draw(st.sampled_from([None, None, 20_000.0])),
            max_slowdown=draw(st.sampled_from([1.3, 1.3, 1.1, 2.0])),
            priority=draw(st.sampled_from([0, 0, 0, 1])),
        )
        for index in range(count)
    ]


@st.composite
def workers(draw):
    count = draw(st.integers(1, 3))
    return [Worker("big", 8)] + [
        Worker(f"w{i}", draw(st.integers(1, 8)), draw(st.sampled_from([80.0, 140.0]))) for i in range(count)
    ]


@st.composite
def faults(draw, workers):
    names = [worker.name for worker in workers]
    return [
        Fault(draw(st.sampled_from(names)), draw(st.floats(0, 6000)), draw(st.floats(1, 5000)))
        for _ in range(draw(st.integers(0, 2)))
    ]
