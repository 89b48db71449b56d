"""Packed cuDNN attention against the XLA reference, and its isolation, on a real GPU: make gpu-test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorafusion_jax.models import Segments, attention

pytestmark = pytest.mark.gpu

LENGTHS = [700, 33, 512, 128, 1, 419, 255]


def inputs(dtype=jnp.bfloat16, total=2048):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (
        jax.random.normal(key, (total, heads, 128), dtype) for key, heads in zip(keys, (8, 2, 2, 8), strict=True)
    )
    return q, k, v, do, Segments.from_lengths(LENGTHS, total)


def gradients(implementation, q, k, v, do, segments):
    def run(q, k, v, do):
        out, pull = jax.vjp(lambda *a: attention(*a, segments, implementation=implementation), q, k, v)
        return out, *pull(do)

    return [np.asarray(x, np.float32) for x in jax.jit(run)(q, k, v, do)]


def test_cudnn_matches_the_reference():
    q, k, v, do, segments = inputs()
    exact = gradients("xla", *(x.astype(jnp.float32) for x in (q, k, v, do)), segments)
    results = gradients("cudnn", q, k, v, do, segments)
    for name, a, b in zip(("o", "dq", "dk", "dv"), results, exact, strict=True):
        # bfloat16 keeps 8 bits: 4e-3 per rounding, a few roundings on the way
        assert np.linalg.norm(a - b) / np.linalg.norm(b) < 1e-2, name


def test_nan_in_one_segment_stays_there():
    q, k, v, do, segments = inputs()
    ids = np.asarray(segments.ids)
    clean = gradients("cudnn", q, k, v, do, segments)
    for poisoned in range(4):
        operands = [q, k, v, do]
        operands[poisoned] = operands[poisoned].at[720].set(jnp.nan)  # row of segment 1
        results = gradients("cudnn", *operands, segments)
        for a, b in zip(results, clean, strict=True):
            np.testing.assert_array_equal(a[ids != 1], b[ids != 1])
