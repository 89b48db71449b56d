"""Both implementations of the small passes give the same numbers, and keep adapters apart."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_arrays import changed, on_device
from kernel_problems import make_chunks

from pallas_kernels.dropout import Dropout
from pallas_kernels.linear.passes import pallas, xla
from pallas_kernels.linear.passes.config import DaConfig, DownConfig, DsdbConfig

ADAPTERS, RANK, K, BLOCK = 2, 16, 256, 16
OWNERS = np.array([1, 0, 2, 1, 1, 0, 1, 1], np.int32)  # of row blocks; 2: padding rows
ROWS = BLOCK * OWNERS.size


def normal(seed, *shape):
    return on_device(np.random.default_rng(seed).normal(size=shape), np.float32)


def both(name, *arguments, **options):
    """The same call of both implementations, each as one program."""
    traced = [
        all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(argument)) for argument in arguments
    ]

    def run(implementation):
        def program(*arrays):
            rest = iter(arrays)
            given = (next(rest) if is_array else other for other, is_array in zip(arguments, traced, strict=True))
            return implementation(*given, **options)

        arrays = [argument for argument, is_array in zip(arguments, traced, strict=True) if is_array]
        return jax.device_get(jax.jit(program)(*arrays))

    return run(partial(getattr(pallas, name), interpret=True)), run(getattr(xla, name))


def assert_close(got, want):
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def drop():
    rows = np.arange(ROWS, dtype=np.uint32) * np.uint32(7)
    return Dropout(rate=on_device([0.1, 0.5]), key=on_device([1, 2], np.uint32), row_key=on_device(rows))


@pytest.fixture(scope="module")
def bits(drop):
    return both("keep_words", drop, OWNERS, K, block_t=BLOCK)[1]


def test_keep_bits(drop):
    mine, theirs = both("keep_words", drop, OWNERS, K, block_t=BLOCK)
    np.testing.assert_array_equal(mine, theirs)


def test_the_transposed_bank():
    pieces = [normal(0, ADAPTERS, 64, 16), normal(1, ADAPTERS, 64, 32)]
    assert_close(*both("transposed_bank", pieces, on_device([0.5, 2.0]), 128, jnp.bfloat16))


def banks(*shape):
    return changed(normal(2, ADAPTERS + 1, *shape), ADAPTERS, 0)


@pytest.mark.parametrize("dropped", [False, True])
def test_s(bits, dropped):
    config = DownConfig(block_t=BLOCK, block_k=64, split_k=2)
    arguments = normal(3, ROWS, K), banks(K, RANK), OWNERS, bits if dropped else None
    assert_close(*both("down", *arguments, config=config))


@pytest.mark.parametrize("dropped", [False, True])
def test_da(bits, dropped):
    chunks = make_chunks(np.where(OWNERS == ADAPTERS, -1, OWNERS), ADAPTERS, 2, single=False)
    config = DaConfig(block_t=BLOCK, blocks_per_chunk=2, block_k=64)
    arguments = normal(3, ROWS, K), normal(4, ROWS, RANK), bits if dropped else None, chunks
    assert_close(*both("da", *arguments, config=config, contiguous=False))


def test_ds_and_db():
    config = DsdbConfig(block_t=BLOCK, blocks_per_chunk=1, block_n=64, split_n=2)
    arguments = normal(5, ROWS, K), normal(6, ROWS, 2 * RANK), banks(RANK, K), OWNERS
    (ds, db), (xla_ds, xla_db) = both("dsdb", *arguments, config=config, rank_offset=RANK)
    assert_close((ds.sum(0), db), (xla_ds.sum(0), xla_db))


@pytest.mark.parametrize(("columns", "rows"), [(64, 0), (0, 64), (64, 128)])
def test_join(columns, rows):
    pieces = [normal(7, 2, ROWS, 16), normal(8, 1, ROWS, 32)]
    assert_close(*both("join", pieces, jnp.bfloat16, columns=columns, rows=rows))


@pytest.mark.parametrize("transposed", [False, True])
def test_sums_by_adapter_meet_nothing_foreign(transposed):
    partials, adapter = normal(9, 5, 32, 64), on_device([0, 1, -1, 1, 2], np.int32)
    partials = changed(changed(partials, 2, np.nan), 4, np.inf)  # of nobody, and of padding rows
    options = {"transposed": transposed}
    assert_close(*both("sum_partials", partials, adapter, on_device([0.5, 2.0]), [(0, 16), (32, 20)], **options))


def test_xla_keeps_a_nan_with_its_adapter():
    x = changed(normal(3, ROWS, K), slice(BLOCK), np.nan)  # adapter 1
    chunks = make_chunks(np.where(OWNERS == ADAPTERS, -1, OWNERS), ADAPTERS, 2, single=False)
    config = DaConfig(block_t=BLOCK, blocks_per_chunk=2)
    _, partials = both("da", x, normal(4, ROWS, RANK), None, chunks, config=config, contiguous=False)
    of_zero = np.asarray(partials)[np.asarray(chunks.adapter) == 0]
    assert np.isfinite(of_zero).all()
    _, s = both("down", x, banks(K, RANK), OWNERS, None, config=DownConfig(block_t=BLOCK, block_k=64, split_k=2))
    assert np.isfinite(np.asarray(s)[BLOCK:]).all()
