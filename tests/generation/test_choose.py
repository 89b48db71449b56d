"""The choice of the next token: what is kept of the distribution, and how often tokens are drawn."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from scipy import special

from lorafusion_jax.generation.choose import (
    Choices,
    Edits,
    choose_tokens,
    edit,
    keep_likely,
    list_likely,
    seen_tokens,
    token_logprobs,
)
from lorafusion_jax.generation.packing import bucket
from lorafusion_jax.generation.requests import Request
from lorafusion_jax.generation.row_settings import row_settings
from lorafusion_jax.generation.sampling import Sampling

choose, keep = jax.jit(choose_tokens, static_argnames="mode"), jax.jit(keep_likely)


def kept_by_definition(z: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens in falling order of probability, until k of them, and until their sum reaches p."""
    order = np.argsort(-z, kind="stable")[: top_k or None]
    p = np.exp(z[order] - z.max())
    sums = np.cumsum(p / p.sum())
    order = order[: int(np.searchsorted(sums, top_p)) + 1]
    return {token for token in order.tolist() if np.exp(z[token] - z.max()) >= min_p}


FILTERS = [
    (0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.4, 0.0), (5, 0.7, 0.0), (1, 0.2, 0.0), (900, 0.999, 0.0), (0, 1.0, 0.1),
    (4, 1.0, 0.02), (0, 0.9, 0.3), (0, 1.0, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_filters_keep_what_their_definitions_say(top_k, top_p, min_p):
    z = np.random.default_rng(5).normal(size=(4, 37)).astype(np.float32) * 3
    kept = keep(z, np.full(4, top_k, np.int32), np.full(4, top_p, np.float32), np.full(4, min_p, np.float32))
    for row, values in enumerate(np.asarray(kept)):
        assert set(np.flatnonzero(np.isfinite(values)).tolist()) == kept_by_definition(z[row], top_k, top_p, min_p)


def choices(count: int, seeds: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Choices:
    halves = np.stack([seeds >> 32, seeds & 0xFFFFFFFF], 1).astype(np.uint32)
    full = partial(np.full, count, dtype=np.float32)
    return Choices(full(temperature), np.full(count, top_k, np.int32), full(top_p), full(min_p), halves)


SETTINGS = [
    {"temperature": 2.0}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_have_the_probabilities_that_their_settings_say(settings):
    """A chi-square test of 4000 draws; seeds beyond 32 bits."""
    z, count = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], np.float32)), 4000
    seeds = np.arange(count, dtype=np.uint64) * 2**33 + 5
    mode = "sampled" if settings.keys() == {"temperature"} else "filtered"
    drawn = choose(np.tile(z, (count, 1)), choices(count, seeds, **settings), np.zeros(count, np.int32), mode=mode)
    tempered = z / settings.get("temperature", 1.0)
    kept = kept_by_definition(tempered, *(settings.get(*pair) for pair in (("top_k", 0), ("top_p", 1), ("min_p", 0))))
    assert_drawn(drawn, np.where([token in kept for token in range(6)], np.exp(tempered), 0))


def assert_drawn(tokens, weights: np.ndarray) -> None:
    """Tokens have the probabilities of their weights."""
    counts, wanted = np.bincount(np.asarray(tokens), minlength=6), len(tokens) * weights / weights.sum()
    assert not counts[wanted == 0].any()
    square = (((counts - wanted) ** 2)[wanted > 0] / wanted[wanted > 0]).sum()
    assert square < special.chdtri(np.count_nonzero(weights) - 1, 0.001) or np.count_nonzero(weights) == 1


def test_draws_have_the_probabilities_of_edited_logits():
    """4000 of each: a penalty of repetition, a bias, and tokens that are allowed."""
    count, p = 4000, np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], np.float32)
    setting = np.repeat(np.arange(3), count)
    seen = jax.jit(seen_tokens, static_argnums=1)(np.where(setting == 0, 1, -1).astype(np.int32)[:, None], 6)
    allowed = np.where((setting == 2)[:, None], np.array([[0, 3, 4]], np.int32), -1)
    biased = np.where(setting == 1, 5, -1).astype(np.int32)[:, None]
    edits = Edits(
        np.where(setting == 0, 1.5, 1).astype(np.float32), seen, setting == 2, allowed, biased,
        np.full((3 * count, 1), 2, np.float32),
    )  # fmt: skip
    z = jax.jit(edit)(np.tile(np.log(p), (3 * count, 1)), edits)
    seeds = np.arange(3 * count, dtype=np.uint64)
    drawn = choose(z, choices(3 * count, seeds), np.zeros(3 * count, np.int32), mode="sampled")
    lower = np.where(np.arange(6) == 1, p**1.5, p)  # logits below 0 are multiplied by the penalty
    higher = np.where(np.arange(6) == 5, p * np.exp(2), p)
    few = np.where(np.isin(np.arange(6), [0, 3, 4]), p, 0)
    for number, weights in enumerate((lower, higher, few)):
        assert_drawn(drawn[setting == number], weights)


def test_draws_change_with_the_seed_and_with_the_number_of_the_token():
    draw = partial(choose, np.zeros((4, 1000), np.float32), mode="sampled")
    numbers = np.array([0, 1, 0, 0], np.int32)
    first = draw(choices(4, np.array([4, 4, 5, 4 + 2**32])), numbers).tolist()
    assert len(set(first)) == 4
    assert draw(choices(4, np.array([5, 4, 4, 4])), numbers).tolist()[2::-1] == first[:3]


def test_seeds_of_32_bits_draw_as_keys_of_jax_do():
    z, seeds = np.random.default_rng(3).normal(size=(3, 50)).astype(np.float32), np.array([0, 7, 2**32 - 1])
    drawn = choose(z, choices(3, seeds), np.array([2, 0, 9], np.int32), mode="sampled")
    for row, number in enumerate((2, 0, 9)):
        key = jax.random.fold_in(jax.random.key(np.uint32(seeds[row])), number)
        assert int(drawn[row]) == int(np.argmax(z[row] + np.asarray(jax.random.gumbel(key, (50,)))))


def test_edits_are_what_their_definitions_say():
    z = np.array([[2.0, -1.0, 0.5, 3.0], [2.0, -1.0, 0.5, 3.0], [2.0, -1.0, 0.5, 3.0]], np.float32)
    seen = jax.jit(seen_tokens, static_argnums=1)(np.array([[0, 1, 1], [-1, -1, -1], [3, -1, -1]], np.int32), 4)
    ids = np.array([[-1, -1], [2, -1], [1, 2]], np.int32)
    edits = Edits(
        np.array([2.0, 1.0, 2.0], np.float32), seen, np.array([False, False, True]), np.array([[-1], [-1], [1]]),
        ids, np.array([[9.0, 9.0], [-4.0, 9.0], [0.25, 7.0]], np.float32),
    )  # fmt: skip
    wanted = [[1.0, -2.0, 0.5, 3.0], [2.0, -1.0, -3.5, 3.0], [-np.inf, -0.75, -np.inf, -np.inf]]
    assert jax.jit(edit)(z, edits).tolist() == wanted


def test_the_most_probable_tokens_have_their_log_likelihoods():
    p = np.array([[0.2, 0.5, 0.3]], np.float32)
    listed = jax.jit(list_likely, static_argnums=1)(np.log(p) + 3, 2)
    assert listed.tokens_Bk.tolist() == [[1, 2]]
    np.testing.assert_allclose(listed.logprobs_Bk, np.log([[0.5, 0.3]]), rtol=1e-5)


def test_log_likelihoods_are_those_of_the_whole_distribution():
    p = np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], np.float32)
    shifted = np.log(p) + np.array([[7.0], [-40.0]], np.float32)
    np.testing.assert_allclose(jax.jit(token_logprobs)(shifted, np.array([1, 2])), np.log([0.25, 0.7]), rtol=1e-5)


BEYOND_FLOAT32 = [
    ({"temperature": 1e-39}, {1}), ({"temperature": 1e-300}, {1}), ({"temperature": 1e300}, {0, 1, 2, 3}),
    ({"temperature": 1.0, "top_p": 1e-60}, {1}), ({"temperature": 1.0, "top_k": 10**30, "min_p": 1e-60}, {0, 1, 2}),
    ({"temperature": 1.0, "top_k": 10**30, "logit_bias": {3: 1e39}}, {3}),
    ({"temperature": 1e-38, "top_p": 0.9, "logit_bias": {1: -1e300, 2: -1e300}}, {0}),
    ({"temperature": 1.0, "top_p": 0.999, "repetition_penalty": 1e300, "logit_bias": {3: -1e300}}, {0, 1, 2}),
    ({"temperature": 1e-30, "repetition_penalty": 1e-300}, {1}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "drawn"), BEYOND_FLOAT32, ids=str)
def test_settings_that_float32_does_not_hold_choose_what_they_say(settings, drawn):
    """The logits are 1, 2, 0.5 and -50, and all tokens were seen."""
    sequences = [
        SimpleNamespace(
            row=row, slot=0, length=4, tokens=[0, 1, 2, 3],
            request=(Request(tokens=[0, 1, 2, 3], sampling=Sampling(seed=row, **settings)), None),
        )
        for row in range(64)
    ]  # fmt: skip
    its = row_settings(sequences, 64)
    z = np.tile(np.array([1.0, 2.0, 0.5, -50.0], np.float32), (64, 1))
    if its.edits is not None:
        z = jax.jit(edit)(z, its.edits._replace(seen_BV=jax.jit(seen_tokens, static_argnums=1)(its.seen_BL, 4)))
    assert set(choose(z, its.choices, its.number_B, mode=its.mode).tolist()) == drawn


def test_buckets_are_few():
    assert [bucket(number, 128) for number in (1, 128, 129, 193, 257)] == [128, 128, 192, 256, 384]
