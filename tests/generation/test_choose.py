"""The choice of the next token: what is kept of the distribution, and how often tokens are drawn."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from lorafusion_jax.generation.choose import NOT_FINITE, Choices, choose_tokens, keep_likely, token_logprobs
from lorafusion_jax.generation.places import bucket, make_places, share_rows

choose, keep = jax.jit(choose_tokens, static_argnames="mode"), jax.jit(keep_likely)


def kept_by_definition(z: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """Tokens in falling order of probability, until k of them, and until their sum reaches p."""
    order = np.argsort(-z, kind="stable")[: top_k or None]
    p = np.exp(z[order] - z.max())
    sums = np.cumsum(p / p.sum())
    return set(order[: int(np.searchsorted(sums, top_p)) + 1].tolist())


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.4), (5, 0.7), (1, 0.2), (900, 0.999)])
def test_top_k_and_top_p_keep_what_their_definition_says(top_k, top_p):
    z = np.random.default_rng(5).normal(size=(4, 37)).astype(np.float32) * 3
    kept = keep(z, np.full(4, top_k, np.int32), np.full(4, top_p, np.float32))
    for row, values in enumerate(np.asarray(kept)):
        assert set(np.flatnonzero(np.isfinite(values)).tolist()) == kept_by_definition(z[row], top_k, top_p)


def test_draws_have_the_probabilities_of_the_softmax():
    z, count = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32)), 4000
    seeds, zeros, ones = np.arange(count, dtype=np.uint32), np.zeros(count, np.int32), np.ones(count, np.float32)
    drawn = choose(np.tile(z, (count, 1)), Choices(2 * ones, zeros, ones, seeds), zeros, mode="sampled")
    wanted = np.exp(z / 2) / np.exp(z / 2).sum()
    shares = np.bincount(np.asarray(drawn), minlength=4) / count
    assert np.abs(shares - wanted).max() < 4 * (0.25 / count) ** 0.5  # four standard errors


def test_draws_change_with_the_seed_and_with_the_number_of_the_token():
    draw = partial(choose, np.zeros((3, 1000), np.float32), mode="sampled")
    rest = (np.ones(3, np.float32), np.zeros(3, np.int32), np.ones(3, np.float32))
    numbers = np.array([0, 1, 0], np.int32)
    first = draw(Choices(*rest, np.array([4, 4, 5], np.uint32)), numbers).tolist()
    assert len(set(first)) == 3
    assert draw(Choices(*rest, np.array([5, 4, 4], np.uint32)), numbers).tolist() == first[::-1]


def test_log_likelihoods_are_those_of_the_whole_distribution():
    p = np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], np.float32)
    shifted = np.log(p) + np.array([[7.0], [-40.0]], np.float32)
    np.testing.assert_allclose(jax.jit(token_logprobs)(shifted, np.array([1, 2])), np.log([0.25, 0.7]), rtol=1e-5)


def test_logits_that_are_not_numbers_choose_no_token():
    z = np.array([[1.0, np.nan], [0.0, 2.0]], np.float32)
    zeros, ones = np.zeros(2, np.int32), np.ones(2, np.float32)
    choices = Choices(0 * ones, zeros, ones, np.zeros(2, np.uint32))
    for mode in ("greedy", "sampled", "filtered"):
        assert choose(z, choices, zeros, mode=mode).tolist() == [NOT_FINITE, 1]


def test_rows_are_few_whatever_the_shares_of_the_adapters():
    many = make_places({5: 64} | dict.fromkeys(range(4), 1))
    assert many.rows_of(5)[:64] == [*range(64)]
    assert many.count <= 2 * 68 + 2 * 4 * many.rows
    assert make_places({3: 1}).count == 1
    assert share_rows({0: 1000, 1: 1}, 64) == {0: 63, 1: 1}
    assert [bucket(number, 128) for number in (1, 128, 129, 193, 257)] == [128, 128, 192, 256, 384]
