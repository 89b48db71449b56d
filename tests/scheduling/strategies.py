"""Random jobs and limits for property tests."""

from hypothesis import strategies as st

from scheduling import AdapterJob


@st.composite
def jobs(draw, *, most_tokens: int = 600, most_jobs: int = 4, most_samples: int = 14):
    count = draw(st.integers(1, most_jobs))
    return [
        AdapterJob(
            f"a{index}",
            draw(st.lists(st.integers(1, most_tokens), min_size=1, max_size=most_samples)),
            global_batch=draw(st.integers(1, 6)),
            epochs=draw(st.integers(1, 3)),
            weight=draw(st.sampled_from([1.0, 1.0, 1.0, 2.0, 0.5])),
            max_batches=draw(st.sampled_from([None, None, 1, 3])),
        )
        for index in range(count)
    ]


@st.composite
def limits(draw):
    return {
        "capacity_tokens": draw(st.integers(128, 1500)),
        "num_stages": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "data_parallel": draw(st.sampled_from([1, 1, 2, 3])),
        "tile_tokens": draw(st.sampled_from([1, 16, 128])),
    }
