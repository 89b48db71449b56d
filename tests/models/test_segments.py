"""Segments of packed microbatches."""

import numpy as np
import pytest

from lorafusion_jax.families.rope import Rope, RopeScaling
from lorafusion_jax.models import Segments, segment_bucket
from lorafusion_jax.models.rope import inverse_frequencies, rope_tables


def test_remaining_rows_form_a_segment():
    segments = Segments.from_lengths([3, 1], 8)
    assert segments.ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert segments.offsets.tolist() == [0, 3, 4, *[-1] * 6]
    assert segments.lengths.tolist() == [3, 1, 4, *[-1] * 5]


def test_no_extra_segment_if_the_runs_fill_the_rows():
    assert Segments.from_lengths([3, 5], 8).lengths.tolist() == [3, 5, *[-1] * 6]


@pytest.mark.parametrize(("num_runs", "bucket"), [(0, 8), (8, 8), (9, 16), (16, 16), (17, 32)])
def test_bucket_is_the_smallest_that_fits(num_runs, bucket):
    assert segment_bucket(num_runs) == bucket
    assert len(Segments.from_lengths([1] * num_runs, max(num_runs, 1)).lengths) == bucket


def test_bucket_can_be_given():
    assert len(Segments.from_lengths([1], 2, bucket=24).lengths) == 24


@pytest.mark.parametrize(("lengths", "bucket"), [([5, 4], None), ([3, 0], None), ([1, 1, 1], 3)])
def test_runs_that_do_not_fit_are_refused(lengths, bucket):
    with pytest.raises(ValueError, match="do not fit"):
        Segments.from_lengths(lengths, 8, bucket=bucket)


def test_arrays_are_int32_for_cudnn():
    segments = Segments.from_lengths([2], 4)
    assert {array.dtype for array in (segments.ids, segments.offsets, segments.lengths)} == {np.dtype(np.int32)}


def test_samples_longer_than_the_context_of_longrope_take_its_long_factors():
    scaling = RopeScaling(kind="longrope", original_max_positions=4, short_factors=(1.0, 2.0), long_factors=(3.0, 5.0))
    rope, positions = Rope(scaling=scaling), np.array([0, 1, 2, 3, 0, 1, 2, 3, 4], np.int32)
    cos, _ = rope_tables(rope, 4, positions, Segments.from_lengths([4, 5], 9))
    for rows, long in ((slice(0, 4), False), (slice(4, 9), True)):
        wanted = np.cos(positions[rows, None] * inverse_frequencies(rope, 4, long=long))
        np.testing.assert_allclose(cos[rows, 0, :2], wanted, rtol=1e-6)
