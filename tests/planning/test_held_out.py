"""Sizes of the microbatches of held-out sets, and adapters that begin with one held-out loss."""

from __future__ import annotations

import numpy as np
import pytest

from lorafusion_jax.adapters.kind import Sizes
from lorafusion_jax.adapters.table import KINDS
from lorafusion_jax.config.schema import BatchSettings, MeshSettings
from lorafusion_jax.planning.held_out import PASS_TOKENS, SetSize, pack_set, size_of_set

BATCH = BatchSettings(capacity_tokens=8192)


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        pytest.param([100], SetSize(1024, 1), id="no smaller than an eighth"),
        pytest.param([1500], SetSize(2048, 1), id="holds the longest"),
        pytest.param([600] * 4, SetSize(4096, 1), id="two passes cost more than padding"),
        pytest.param([5000] * 2, SetSize(8192, 2), id="samples that fit no half"),
        pytest.param([600] * 15, SetSize(2048, 5), id="a little more than the largest"),
        pytest.param([512] * 400, SetSize(8192, 25), id="a large set fills the largest"),
    ],
)
def test_a_set_has_the_size_of_least_cost(lengths, sizes):
    assert size_of_set(lengths, BATCH, MeshSettings()) == sizes


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_size_is_cheaper_than_the_chosen_one(replicas):
    draw, mesh = np.random.default_rng(0), MeshSettings(data=replicas)
    for _ in range(40):
        lengths = draw.integers(1, draw.integers(2, 2048), draw.integers(1, 60))

        def slots(size, lengths=lengths):
            return len(pack_set(lengths, size, BATCH, mesh))

        chosen, counted = size_of_set(lengths, BATCH, mesh)
        possible = [size for size in (1024, 2048, 4096, 8192) if size >= lengths.max()]
        least = min(slots(size) * (size + PASS_TOKENS) for size in possible)
        # One more microbatch than counted is allowed: packing and counting differ in the order of samples.
        assert abs(slots(chosen) - counted) <= 1
        assert slots(chosen) * (chosen + PASS_TOKENS) <= least + chosen + PASS_TOKENS


def test_sizes_are_whole_tiles_and_small_microbatches_stay_whole():
    assert size_of_set([40], BatchSettings(capacity_tokens=5376, tile_tokens=256), MeshSettings()).tokens == 768
    assert size_of_set([40], BatchSettings(capacity_tokens=768), MeshSettings()).tokens == 768


def test_a_limit_of_samples_counts():
    assert size_of_set([10] * 64, BATCH, MeshSettings(), 16) == SetSize(1024, 4)


@pytest.mark.parametrize("name", KINDS)
def test_kinds_that_start_as_the_base_have_first_values_without_effect(name):
    kind, draw = KINDS[name], np.random.default_rng(0)
    tensors = {
        leaf.name: leaf.init(lambda count: draw.random(count, np.float32), leaf.shape(8, 6, 2)) for leaf in kind.leaves
    }
    sizes = Sizes(K=8, N=6, R=2, scale=2.0)
    a_KC, b_CN = kind.low_rank(tensors, sizes)
    delta = kind.shift(tensors, sizes) if kind.shift else 0.0
    changes = bool(np.any(a_KC @ b_CN)) or bool(np.any(delta)) or kind.column_scale is not None
    assert kind.starts_as_base == (not changes and kind.start is None)
