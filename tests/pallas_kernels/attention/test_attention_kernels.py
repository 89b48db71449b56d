"""Packed attention for Hopper in the GPU interpreter: values, gradients, isolation; and lowering for CUDA."""

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import needs_gpu_interpreter
from host_arrays import changed, on_device
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from more_cases import mostly_nightly, nightly
from packed_documents import POISONED, definition, inputs, rows_of

from pallas_kernels.attention import (
    AttentionConfig,
    attention_backward,
    attention_forward,
    document_rows,
    unsupported_reason,
)
from pallas_kernels.attention.hopper.blocks import key_blocks, query_blocks

INTERPRETED = AttentionConfig(through_smem=True)
# rows, query heads, key heads, width, documents (the rest of the rows is one more), multiprocessors
CASES = {
    "documents that straddle tiles": (256, 2, 1, 128, [70, 100, 30], 2),
    "odd group of heads, and more multiprocessors than work": (256, 3, 1, 64, [150, 1, 60], 7),
    "one document": (256, 2, 2, 64, [256], 3),
    "less than a tile of most documents": (128, 2, 1, 64, [1, 126], 5),
}


@functools.cache
def passes(case, config):
    """Forward and backward as two programs of a case, each lowered once."""
    return [jax.jit(functools.partial(function, config=config)) for function in (attention_forward, attention_backward)]


def run(case, arrays, rows, config=INTERPRETED):
    q, k, v, do = arrays
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=CASES[case][-1], platform="gpu")
    mesh = use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    with mesh, plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        forward, backward = passes(case, config)
        o, saved = forward(q, k, v, *rows)
        jax.block_until_ready(saved)
        return [np.asarray(x, np.float32) for x in (o, *backward(saved, do))]


@functools.cache
def clean(case):
    return run(case, *inputs(CASES[case], jnp.bfloat16))


@needs_gpu_interpreter
@pytest.mark.parametrize("case", mostly_nightly(CASES, [*CASES][:2]))
def test_output_and_gradients_match_the_definition(case):
    arrays, (first, _) = inputs(CASES[case], jnp.bfloat16)
    for name, got, wanted in zip(("o", "dq", "dk", "dv"), clean(case), definition(*arrays, first), strict=True):
        # bfloat16 keeps 8 bits: 2e-3 of rounding in p, ds and the result
        assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 5e-3, name


@needs_gpu_interpreter
@pytest.mark.parametrize("case", mostly_nightly(CASES, [*CASES][:1]))  # whose values are computed anyway
def test_a_launch_for_each_gradient_sums_as_one_for_both(case):
    apart = dataclasses.replace(INTERPRETED, apart=True)
    for got, expected in zip(run(case, *inputs(CASES[case], jnp.bfloat16), apart), clean(case), strict=True):
        np.testing.assert_array_equal(got, expected)


PLACES = ("q", "k", "v", "do")


@needs_gpu_interpreter
@pytest.mark.parametrize(
    "bad",
    [
        dict(zip(PLACES, (np.nan, np.inf, np.inf, np.nan), strict=True)),
        *(nightly({name: bad}) for name in PLACES for bad in (np.nan, np.inf)),
    ],
    ids=str,
)
def test_what_is_not_finite_stays_in_its_document(bad):
    arrays, rows = inputs(CASES[POISONED], jnp.bfloat16)
    spoiled = [
        changed(array, (100, 0, 3), bad[name]) if name in bad else array
        for name, array in zip(PLACES, arrays, strict=True)
    ]  # the second document has rows 70 to 169
    document = np.arange(256)
    document = (document >= 70) & (document < 170)
    outputs = run(POISONED, spoiled, rows)
    for got, wanted in zip(outputs, clean(POISONED), strict=True):
        np.testing.assert_array_equal(got[~document], wanted[~document])
    o, *grads = (x[document] for x in outputs)
    assert np.isnan(o).any() == (bad.keys() != {"do"})
    assert all(np.isnan(grad).any() for grad in grads)


@pytest.mark.parametrize("seed", range(4))
def test_tables_list_every_block_with_all_tiles_that_it_needs(seed):
    random = np.random.default_rng(seed)
    T = 1024
    lengths = []
    while sum(lengths) < T:
        lengths.append(min(int(random.integers(1, 300)), T - sum(lengths)))
    first, end = (np.asarray(x) for x in rows_of(lengths, T))
    row = np.arange(T)
    seen = (row <= row[:, None]) & (row >= first[:, None])  # [query, key]
    for table, blocks in (
        (query_blocks(first, 128, 64), seen.reshape(8, 128, 16, 64).any((1, 3))),
        (key_blocks(end, 128, 64), seen.reshape(16, 64, 8, 128).any((1, 3)).T),
    ):
        table = np.asarray(table)
        assert sorted(table[:, 0]) == list(range(8))
        assert list(table[:, 2]) == sorted(table[:, 2], reverse=True)
        for block, begin, num in table:
            np.testing.assert_array_equal(np.flatnonzero(blocks[block]), np.arange(begin, begin + num))


@pytest.mark.parametrize(
    ("heads", "key_heads", "width"), [nightly(32, 8, 128), (40, 8, 128), nightly(64, 8, 128), (32, 8, 64)]
)
def test_forward_and_backward_lower_for_hopper(heads, key_heads, width):
    T = 8192

    def both(q, k, v, do, first, end):
        o, saved = attention_forward(q, k, v, first, end)
        return o, attention_backward(saved, do)

    shapes = [jax.ShapeDtypeStruct((T, h, width), jnp.bfloat16) for h in (heads, key_heads, key_heads, heads)]
    rows = [jax.ShapeDtypeStruct((T,), jnp.int32)] * 2
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(both).trace(*shapes, *rows).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize("check_vma", [True, False])
def test_lowers_inside_shard_map(check_vma):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((2,), ("data",), (AxisType.Auto,), abstract_device=device)

    def local(q, k, v, do, ids, offsets, lengths):
        o, saved = attention_forward(q, k, v, *document_rows(ids, offsets, lengths))
        return o, *attention_backward(saved, do)

    shapes = [jax.ShapeDtypeStruct((512, heads, 128), jnp.bfloat16) for heads in (4, 2, 2, 4)]
    rows = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (512, 18, 16)]
    sharded = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    with use_abstract_mesh(mesh):
        text = jax.jit(sharded).trace(*shapes, *rows).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize(
    ("shape", "key_heads", "dtype", "reason"),
    [
        ((256, 4, 128), 2, jnp.float32, "bfloat16 or float16"),
        ((256, 4, 96), 2, jnp.bfloat16, "head width of 64 or 128"),
        ((192, 4, 128), 2, jnp.bfloat16, "multiple of 128 rows"),
        ((256, 5, 128), 2, jnp.bfloat16, "multiple of the 2 key heads"),
    ],
)
def test_unsupported_inputs_are_errors_with_a_reason(shape, key_heads, dtype, reason):
    q, k = on_device(np.zeros(shape), dtype), on_device(np.zeros((shape[0], key_heads, shape[2])), dtype)
    assert reason in unsupported_reason(q, k)
    with pytest.raises(NotImplementedError, match=reason):
        attention_forward(q, k, k, *rows_of([shape[0]], shape[0]))
