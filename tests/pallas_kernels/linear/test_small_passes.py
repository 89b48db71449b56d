"""Both implementations of the small passes give the same numbers, and keep adapters apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dropout import Dropout
from pallas_kernels.linear.chunks import make_chunks
from pallas_kernels.linear.passes import pallas, xla
from pallas_kernels.linear.passes.config import DaConfig, DownConfig, DsdbConfig

ADAPTERS, RANK, K, BLOCK = 2, 16, 256, 16
OWNERS = np.array([1, 0, 2, 1, 1, 0, 1, 1], np.int32)  # of row blocks; 2: padding rows
ROWS = BLOCK * OWNERS.size


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def both(name, *arguments, **options):
    """The same call of both implementations."""
    return getattr(pallas, name)(*arguments, **options, interpret=True), getattr(xla, name)(*arguments, **options)


def assert_close(got, want):
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def drop():
    rows = jnp.arange(ROWS, dtype=jnp.uint32) * 7
    return Dropout(rate=jnp.array([0.1, 0.5]), key=jnp.array([1, 2], jnp.uint32), row_key=rows)


@pytest.fixture(scope="module")
def bits(drop):
    return xla.keep_words(drop, jnp.asarray(OWNERS), K, block_t=BLOCK)


def test_keep_bits(drop):
    mine, theirs = both("keep_words", drop, jnp.asarray(OWNERS), K, block_t=BLOCK)
    np.testing.assert_array_equal(mine, theirs)


def test_the_transposed_bank():
    pieces = [normal(0, ADAPTERS, 64, 16), normal(1, ADAPTERS, 64, 32)]
    assert_close(*both("transposed_bank", pieces, jnp.array([0.5, 2.0]), 128, jnp.bfloat16))


def banks(*shape):
    return normal(2, ADAPTERS + 1, *shape).at[ADAPTERS].set(0)


@pytest.mark.parametrize("dropped", [False, True])
def test_s(bits, dropped):
    config = DownConfig(block_t=BLOCK, block_k=64, split_k=2)
    arguments = normal(3, ROWS, K), banks(K, RANK), jnp.asarray(OWNERS), bits if dropped else None
    assert_close(*both("down", *arguments, config=config))


@pytest.mark.parametrize("dropped", [False, True])
def test_da(bits, dropped):
    chunks = make_chunks(jnp.where(OWNERS == ADAPTERS, -1, OWNERS), ADAPTERS, 2, single=False)
    config = DaConfig(block_t=BLOCK, blocks_per_chunk=2, block_k=64)
    arguments = normal(3, ROWS, K), normal(4, ROWS, RANK), bits if dropped else None, chunks
    assert_close(*both("da", *arguments, config=config, contiguous=False))


def test_ds_and_db():
    config = DsdbConfig(block_t=BLOCK, blocks_per_chunk=1, block_n=64, split_n=2)
    arguments = normal(5, ROWS, K), normal(6, ROWS, 2 * RANK), banks(RANK, K), jnp.asarray(OWNERS)
    (ds, db), (xla_ds, xla_db) = both("dsdb", *arguments, config=config, rank_offset=RANK)
    assert_close((ds.sum(0), db), (xla_ds.sum(0), xla_db))


@pytest.mark.parametrize(("columns", "rows"), [(64, 0), (0, 64), (64, 128)])
def test_join(columns, rows):
    pieces = [normal(7, 2, ROWS, 16), normal(8, 1, ROWS, 32)]
    assert_close(*both("join", pieces, jnp.bfloat16, columns=columns, rows=rows))


@pytest.mark.parametrize("transposed", [False, True])
def test_sums_by_adapter_meet_nothing_foreign(transposed):
    partials, adapter = normal(9, 5, 32, 64), jnp.array([0, 1, -1, 1, 2], jnp.int32)
    partials = partials.at[2].set(jnp.nan).at[4].set(jnp.inf)  # of nobody, and of padding rows
    options = {"transposed": transposed}
    assert_close(*both("sum_partials", partials, adapter, jnp.array([0.5, 2.0]), [(0, 16), (32, 20)], **options))


def test_xla_keeps_a_nan_with_its_adapter():
    x = normal(3, ROWS, K).at[:BLOCK].set(jnp.nan)  # adapter 1
    chunks = make_chunks(jnp.where(OWNERS == ADAPTERS, -1, OWNERS), ADAPTERS, 2, single=False)
    config = DaConfig(block_t=BLOCK, blocks_per_chunk=2)
    partials = xla.da(x, normal(4, ROWS, RANK), None, chunks, config=config, contiguous=False)
    of_zero = np.asarray(partials)[np.asarray(chunks.adapter) == 0]
    assert np.isfinite(of_zero).all()
    s = xla.down(x, banks(K, RANK), jnp.asarray(OWNERS), None, config=DownConfig(block_t=BLOCK))
    assert np.isfinite(np.asarray(s)[BLOCK:]).all()
