"""Packed attention by Triton, interpreted: values, gradients, isolation; and lowering for GPUs from sm_80 on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import A10, A100, L40, lowered, num_kernels
from host_arrays import changed
from packed_documents import POISONED, definition, inputs

from pallas_kernels.attention.triton.api import (
    triton_attention_backward,
    triton_attention_forward,
    triton_unsupported_reason,
)
from pallas_kernels.attention.triton.config import SIZES, AttentionConfig, attention_config

# rows, query heads, key heads, width, documents (the rest of the rows is one more), own and other rows of a block
CASES = {
    "documents that straddle tiles": (256, 4, 2, 32, [70, 100, 30], (64, 64)),
    "odd group of heads, tall tiles": (192, 3, 1, 16, [100, 1, 27], (64, 32)),
    "one document": (128, 2, 2, 16, [128], (32, 32)),
    "documents of two rows": (64, 2, 1, 16, [2] * 32, (16, 16)),
    "wide tiles": (128, 2, 2, 16, [3, 60, 64], (16, 64)),
}


@functools.cache
def passes(case):
    block_rows, other = CASES[case][-1]
    config = AttentionConfig(block_rows=block_rows, tile_rows=other)

    @jax.jit
    def both(q, k, v, do, first, end):
        o, saved = triton_attention_forward(q, k, v, first, end, config=config)
        return o, *triton_attention_backward(saved, do, config=config)

    return both


def run(case, arrays, rows):
    return [np.asarray(x, np.float32) for x in passes(case)(*arrays, *rows)]


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_match_the_definition(case):
    (q, k, v, do), (first, end) = inputs(CASES[case], jnp.float32)
    wanted_of_all = definition(q, k, v, do, first)
    for name, got, wanted in zip(
        ("o", "dq", "dk", "dv"), run(case, (q, k, v, do), (first, end)), wanted_of_all, strict=True
    ):
        # float32 sums of at most 256 terms: 1e-6 of the largest, five times that for room
        np.testing.assert_allclose(got, wanted, atol=5e-6 * np.abs(wanted).max(), err_msg=name)


def test_bfloat16_is_near_the_definition():
    (q, k, v, do), (first, end) = inputs(CASES[POISONED], jnp.bfloat16)
    outputs = passes(POISONED)(q, k, v, do, first, end)
    assert {x.dtype for x in outputs} == {jnp.dtype(jnp.bfloat16)}
    for got, wanted in zip(outputs, definition(q, k, v, do, first), strict=True):
        # weights, their gradients and the result are rounded to 8 bits
        np.testing.assert_allclose(np.asarray(got, np.float32), wanted, atol=2**-6 * np.abs(wanted).max())


@pytest.mark.parametrize("where", range(4), ids=["q", "k", "v", "do"])
def test_other_documents_do_not_change_a_bit(where):
    arrays, rows = inputs(CASES[POISONED], jnp.float32)
    before = run(POISONED, arrays, rows)
    larger = list(arrays)
    larger[where] = changed(arrays[where], slice(70, 170), 1e4 * np.asarray(arrays[where])[70:170])  # of the second
    others = np.r_[0:70, 170:256]
    for got, wanted in zip(run(POISONED, larger, rows), before, strict=True):
        np.testing.assert_array_equal(got[others], wanted[others])


@pytest.mark.parametrize("device", [A100, A10, L40])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_it_lowers_for_gpus_from_sm_80_on(device, width):
    shapes = [jax.ShapeDtypeStruct((2048, heads, width), jnp.bfloat16) for heads in (8, 2, 2, 8)]
    rows = [jax.ShapeDtypeStruct((2048,), jnp.int32)] * 2

    def both(q, k, v, do, first, end):
        o, saved = triton_attention_forward(q, k, v, first, end)
        return o, *triton_attention_backward(saved, do)

    assert num_kernels(lowered(device, both, *shapes, *rows)) == (3, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": jnp.float64}, "not float64"),
        ({"width": 96}, "16 or 32 or 64 or 128 or 256, not 96"),
        ({"rows": 100}, "multiple of 64 rows, not 100"),
        ({"heads": 3}, "multiple of the 2 key heads"),
    ],
)
def test_unsupported_inputs_are_named(changes, words):
    sizes = {"rows": 128, "heads": 4, "width": 64, "dtype": jnp.bfloat16} | changes
    q, k = (jax.ShapeDtypeStruct((sizes["rows"], n, sizes["width"]), sizes["dtype"]) for n in (sizes["heads"], 2))
    assert words in (triton_unsupported_reason(q, k) or "")


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize(("device", "kib"), [(A100, 163), (A10, 99), (L40, 99)])
def test_blocks_fit_into_shared_memory(device, kib, width, item):
    from jax.sharding import AbstractMesh, use_abstract_mesh

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        config = attention_config(width, item)
    assert config.shared_bytes(width, item) <= kib * 1024
    assert config in SIZES
