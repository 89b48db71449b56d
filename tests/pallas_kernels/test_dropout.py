"""Dropout masks: rate, independence, purity. All draws are fixed, so the tests are deterministic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_arrays import on_device
from kernel_problems import keep_mask, keep_words

import pallas_kernels as pk
from pallas_kernels.dropout import inverse_keep, row_state, threshold, unpack

ROWS, COLUMNS = 1024, 2048


def mask(rate=0.1, key=5, row_key=None, columns=COLUMNS):
    row_key = np.arange(ROWS) if row_key is None else row_key
    drop = pk.Dropout(
        rate=on_device([rate], np.float32), key=on_device([key], np.uint32), row_key=on_device(row_key, np.uint32)
    )
    return np.asarray(keep_mask(drop, np.zeros(len(row_key), np.int32), columns))


def standardised(keep, rate):
    """Zero mean and unit variance under the rounded rate."""
    p = round(rate * 65536) / 65536
    return (keep - (1 - p)) / np.sqrt(p * (1 - p))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("key", [0, 1, 2**31])
def test_keep_rate_within_five_sigma(rate, key):
    values = standardised(mask(rate, key), rate)
    assert abs(values.mean()) * np.sqrt(values.size) < 5
    # 5.5 for the worst of thousands of rows and columns: exceeded by chance once in ten thousand such tests
    assert np.abs(values.mean(axis=0)).max() * np.sqrt(ROWS) < 5.5
    assert np.abs(values.mean(axis=1)).max() * np.sqrt(COLUMNS) < 5.5


LAGS = [(0, 1), (0, 7), (0, 8), (0, 16), (0, 256), (1, 0), (2, 0), (256, 0), (1, 1), (1, 8), (1, 16)]


@pytest.mark.parametrize("lag", LAGS)
def test_neighbours_are_uncorrelated(lag):
    values = standardised(mask(0.1), 0.1)
    rows, columns = lag
    product = values[rows:, columns:] * values[: ROWS - rows, : COLUMNS - columns]
    assert abs(product.sum()) / np.sqrt(product.size) < 5


def test_no_two_rows_share_or_shift_a_mask():
    values = standardised(mask(0.5), 0.5)
    spectrum = np.fft.rfft(values[:256], axis=1)
    # circular cross-correlation of every row with the first at every shift
    shifted = np.fft.irfft(spectrum[1:] * spectrum[0].conj(), COLUMNS, axis=1) / np.sqrt(COLUMNS)
    assert np.abs(shifted).max() < 6.5  # half a million values; a shared mask would give 45


@pytest.mark.parametrize("other", [{"key": 6}, {"row_key": np.arange(ROWS) + ROWS}])
def test_adapters_and_epochs_are_independent(other):
    product = standardised(mask(0.1), 0.1) * standardised(mask(0.1, **other), 0.1)
    assert abs(product.sum()) / np.sqrt(product.size) < 5


def test_rates_are_rounded_to_the_nearest_threshold():
    rates = np.float32([0.0, 1e-6, 0.05, 0.1, 0.3, 0.5, 0.9, 0.99999])
    assert np.abs(np.float64(threshold(rates)) - np.float64(rates) * 65536).max() <= 0.5


def test_keys_of_neighbouring_adapters_and_projections_all_differ():
    """As if 64 adapters were keyed by their number: no two masks of 64 projections are the same."""
    fold_key = jax.jit(pk.fold_key)
    keys = np.stack([fold_key(np.arange(64, dtype=np.uint32), site) for site in range(64)])
    assert len(np.unique(keys)) == keys.size


def test_layers_are_independent():
    fold_key = jax.jit(pk.fold_key)
    keys = [int(np.asarray(fold_key(np.array([5], np.uint32), site))[0]) for site in range(64)]
    assert len(set(keys)) == 64
    product = standardised(mask(0.1, keys[0]), 0.1) * standardised(mask(0.1, keys[1]), 0.1)
    assert abs(product.sum()) / np.sqrt(product.size) < 5


def test_masks_do_not_depend_on_the_position_in_the_microbatch():
    row_key = np.random.default_rng(0).permutation(ROWS)
    np.testing.assert_array_equal(mask(row_key=row_key), mask()[row_key])


def test_columns_do_not_depend_on_the_width():
    np.testing.assert_array_equal(mask(columns=300), mask()[:, :300])


def test_rate_zero_keeps_everything_and_scale_is_exact():
    assert mask(0.0).all()
    assert float(inverse_keep(jnp.float32(0.0))) == 1.0
    rate = jnp.float32(0.1)
    exact = 65536 / (65536 - int(threshold(rate)))
    assert float(inverse_keep(rate)) == pytest.approx(exact, rel=1e-7)


def test_packed_words_hold_column_8j_plus_c_in_bit_j_of_word_c():
    rows = np.arange(4, dtype=np.uint32)
    drop = pk.Dropout(rate=on_device([0.3], np.float32), key=on_device([1], np.uint32), row_key=on_device(rows))
    words = keep_words(drop, np.zeros(4, np.int32), 512)
    keep = np.asarray(jax.jit(unpack, static_argnums=1)(words, 512))
    for column in (0, 7, 8, 255, 256, 300, 511):
        block, inside = divmod(column, 256)
        bit = (np.asarray(words)[:, block, inside % 8] >> (inside // 8)) & 1
        np.testing.assert_array_equal(bit.astype(bool), keep[:, column])


def test_counters_of_rows_do_not_repeat():
    """An odd stride visits all 2^32 numbers; an even one repeats its words after a part of them."""
    keys = np.arange(4096, dtype=np.uint32)
    _, strides = jax.jit(row_state)(keys * np.uint32(77), keys)
    assert (np.asarray(strides) % 2 == 1).all()
