"""The gated MLP as one op on a real Hopper GPU: make gpu-test."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks import mlp

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def problem():
    return mlp.draw()


def test_right_against_float32(problem):
    assert max(mlp.errors(problem)) < mlp.BF16


def test_two_runs_are_bitwise_equal(problem):
    run = jax.jit(lambda given: mlp.step(given, "pallas_mosaic_gpu"))
    first, second = run(problem), run(problem)
    assert all(
        np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )
