"""Reduction of token losses to adapters: the formula, isolation of NaN, and the table of samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lorafusion_jax.data.assemble import Piece, Weights, assemble, num_segments, stacked
from lorafusion_jax.data.sample_table import PieceTable, TableShape
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.objective.batch import check_loss, metric_names, totals_of
from lorafusion_jax.objective.protocol import SFT, Chosen, NoOptions, Objective, Segment

T, TILE = 128, 16


@dataclass(frozen=True)
class Options:
    beta: float = 1.0


def contrast(sample, options):
    first, second = sample.nll / sample.tokens
    return jnp.log1p(jnp.exp(options.beta * (first - second))), {"gap": second - first}


def segments(row):
    return (Segment(name="a", text=row["a"]), Segment(name="b", text=row["b"]))


PAIRS = Objective(
    loss=contrast, segments=segments, num_segments=2, columns=("a", "b"), metrics={"gap": "nats"}, options=Options
)


def pairs(beta: float = 1.0) -> Chosen:
    return Chosen(name="pairs", objective=PAIRS, options=Options(beta=beta))


def piece(adapter: int, lengths: tuple[int, ...], weights: Weights) -> Piece:
    tokens = np.arange(sum(lengths), dtype=np.int32)
    learned = np.ones(len(tokens), bool)
    table = None if weights.sample is None else PieceTable(weights.sample, [1.0] * len(lengths))
    return Piece(adapter, tokens, learned, weights.token, 7, lengths if len(lengths) > 1 else None, table)


def batch():
    """Adapter 0: two pairs; 1: two texts of a mean over 20 tokens; 2: one pair."""
    pieces = [
        piece(0, (5, 8), Weights(1.0, 0.5)),
        piece(0, (3, 4), Weights(1.0, 0.5)),
        piece(1, (9,), Weights(1 / 20)),
        piece(1, (13,), Weights(1 / 20)),
        piece(2, (6, 2), Weights(1.0, 1.0)),
    ]
    microbatch = assemble(
        pieces,
        capacity_tokens=T,
        tile_tokens=TILE,
        max_segments=num_segments(8),
        max_adapters=4,
        table=TableShape(6, 2),
    )
    return jax.tree.map(jnp.asarray, microbatch)


CHOSEN = (pairs(), SFT, pairs(0.1))


def losses_of(rows, nll):
    return jnp.where(rows.weights != 0, rows.weights * nll, 0.0)


@jax.jit
@partial(jax.value_and_grad, has_aux=True)
def run(nll, rows):
    totals = totals_of(losses_of(rows, nll), rows, CHOSEN)
    return totals["loss"].sum(), totals


def test_each_adapter_gets_the_mean_of_its_own_objective():
    rows, nll = batch(), np.random.default_rng(0).random(T).astype(np.float32)
    (_, totals), _ = run(nll, rows)

    def mean(start, length):  # the last row of a text has no next token
        return nll[start : start + length - 1].astype(np.float64).mean()

    gaps = [mean(5, 8) - mean(0, 5), mean(16, 4) - mean(13, 3)]
    of_third = mean(64 + 6, 2) - mean(64, 6)
    wanted = [
        np.mean([np.log1p(np.exp(-gap)) for gap in gaps]),
        (nll[32:40].sum() + nll[41:53].sum()) / 20,
        np.log1p(np.exp(-0.1 * of_third)),
    ]
    np.testing.assert_allclose(totals["loss"], wanted, rtol=1e-5)
    np.testing.assert_allclose(totals["gap"], [np.mean(gaps), 0, of_third], rtol=1e-4, atol=1e-6)
    assert metric_names(CHOSEN) == ["gap"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("adapter", range(3))
def test_nan_does_not_reach_other_adapters(adapter, bad):
    rows, nll = batch(), np.random.default_rng(0).random(T).astype(np.float32)
    spoilt = np.where(np.asarray(rows.row_adapter) == adapter, bad, nll).astype(np.float32)
    (_, actual), slopes = jax.tree.map(np.asarray, run(spoilt, rows))
    (_, clean), clean_slopes = jax.tree.map(np.asarray, run(nll, rows))
    others = [number for number in range(3) if number != adapter]
    for name in clean:
        np.testing.assert_array_equal(actual[name][others], clean[name][others])
    assert not np.isfinite(actual["loss"][adapter])
    theirs = np.asarray(rows.row_adapter) != adapter
    np.testing.assert_array_equal(slopes[theirs], clean_slopes[theirs])
    assert np.isfinite(clean_slopes).all()  # places without a sample are no 0 / 0


def test_only_sft_needs_no_table_and_has_no_metrics():
    pieces = [piece(0, (9,), Weights(0.5))]
    microbatch = assemble(pieces, capacity_tokens=T, tile_tokens=TILE, max_segments=num_segments(1), max_adapters=1)
    assert microbatch.samples is None
    assert stacked([microbatch, microbatch]).samples is None
    assert stacked([microbatch, microbatch]).tokens.shape == (2, T)
    assert [*totals_of(jnp.ones(T), microbatch, (SFT,))] == ["loss"]


def test_segments_of_a_sample_are_isolated():
    rows = assemble(
        [piece(0, (5, 8), Weights(1.0, 1.0))],
        capacity_tokens=T,
        tile_tokens=TILE,
        max_segments=num_segments(2),
        max_adapters=1,
        table=TableShape(1, 2),
    )
    assert rows.positions[:13].tolist() == [*range(5), *range(8)]
    assert rows.segment_ids[:13].tolist() == [0] * 5 + [1] * 8
    assert rows.weights[:13].tolist() == [1.0] * 4 + [0.0] + [1.0] * 7 + [0.0]
    assert len({*rows.row_key[:13].tolist()}) == 13  # dropout draws anew for each
    assert rows.samples.segments.tolist() == [[0, 1]]


def test_dropout_of_the_first_segment_equals_that_of_a_single_text():
    single, two = (
        assemble([piece(0, lengths, Weights(1.0))], capacity_tokens=T, tile_tokens=TILE, max_segments=8, max_adapters=1)
        for lengths in ((5,), (5, 8))
    )
    assert single.row_key[:5].tolist() == two.row_key[:5].tolist()


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda sample, options: (sample.nll, {"gap": 0.0}), "scalars"),
        (lambda sample, options: (sample.nll[0], {}), "['gap']"),
        (lambda sample, options: sample.nll[0], "TypeError"),
    ],
    ids=["vector", "metrics", "fails"],
)
def test_a_loss_that_breaks_its_declaration_is_an_error(loss, says):
    broken = Chosen(name="broken", objective=Objective(loss=loss, metrics={"gap": "nats"}), options=NoOptions())
    with pytest.raises(ConfigError) as caught:
        check_loss(broken)
    assert caught.value.code == "objective.broken"
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"mean_over": "tokens", "loss": contrast},
        {"mean_over": "samples"},
        {"loss": contrast, "num_segments": 2},
        {"loss": contrast, "metrics": {"loss": "nats"}},
        {"loss": contrast, "needs": frozenset({"dreams"})},
    ],
    ids=["loss of tokens", "no loss", "no segments", "taken name", "not given"],
)
def test_inconsistent_objectives_are_errors(given):
    with pytest.raises(ValueError, match=r"\w"):
        Objective(**given)


@pytest.mark.parametrize(
    "given", [{}, {"prompt": "a"}, {"text": "a", "messages": []}, {"prompt": "a", "answer": "b", "text": ""}]
)
def test_a_segment_has_exactly_one_text(given):
    with pytest.raises(ValueError, match="exactly one of"):
        Segment(name="x", **given)
