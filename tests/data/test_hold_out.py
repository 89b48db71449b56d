"""A share of the training data is held out: by content, the same for every adapter, and nothing is in both parts."""

import numpy as np
import pytest

from lorafusion_jax.config import load_config
from lorafusion_jax.data import hold_out as hold_out_file
from lorafusion_jax.data.hold_out import hold_out, repeated_samples
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.data.tokenized_set import DataReport, TokenizedSet
from lorafusion_jax.errors import DataError
from lorafusion_jax.examples import examples_directory


def samples_of(texts):
    """One sample of a few segments, numbers and values for each text."""
    tokens = np.concatenate([np.frombuffer(text.encode(), np.uint8) for text in texts]).astype(np.int32)
    lengths = np.array([len(text) for text in texts])
    report = DataReport(
        source="notes.jsonl", format="text", columns={}, loss="all", rows=len(texts) + 3, tokens=len(tokens),
        loss_tokens=len(tokens), longest=int(lengths.max()), cut=2, dropped=(1,), too_long=(4, 5), uncut=(1, 2, 3, 4),
    )  # fmt: skip
    return TokenizedSet(
        tokens=tokens, loss_mask=tokens % 3 > 0, offsets=np.concatenate([[0], np.cumsum(lengths)]),
        rows=np.arange(len(texts)) * 2, report=report,
        segment_lengths=np.stack([lengths - 1, np.ones_like(lengths)], 1),
        numbers={"label": np.arange(len(texts), dtype=np.float32)}, values={"price": tokens / np.float32(7)},
    )  # fmt: skip


def described(samples):
    """All that a sample has, by its row."""
    return {
        int(samples.rows[index]): (
            samples.sample(index)[0].tolist(), samples.sample(index)[1].tolist(), samples.segment_lengths_of(index),
            float(samples.numbers["label"][index]),
            samples.values["price"][samples.offsets[index] : samples.offsets[index + 1]].tolist(),
        )
        for index in range(len(samples))
    }  # fmt: skip


TEXTS = [f"text {number % 31} of {'x' * (number % 5 + 1)}" for number in range(60)]  # some of them are equal


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_every_sample_is_in_one_part_and_no_content_in_both(share):
    whole = samples_of(TEXTS)
    train, held = hold_out(whole, share, "ash")
    assert described(train) | described(held) == described(whole)
    assert len(train) + len(held) == len(whole)
    assert not {TEXTS[row // 2] for row in train.rows} & {TEXTS[row // 2] for row in held.rows}
    assert max(1, round(share * len(whole))) <= len(held) < len(whole)
    assert (held.report.rows, held.report.cut, held.report.dropped) == (len(held), 0, ())
    assert (train.report.rows, train.report.cut, train.report.too_long) == (len(train), 2, (4, 5))
    assert train.report.tokens + held.report.tokens == whole.report.tokens
    assert train.report.loss_tokens == int(train.loss_mask.sum())


def test_the_order_of_the_rows_does_not_matter():
    chosen = {TEXTS[row // 2] for row in hold_out(samples_of(TEXTS), 0.2, "ash")[1].rows}
    turned = TEXTS[::-1]
    assert {turned[row // 2] for row in hold_out(samples_of(turned), 0.2, "oak")[1].rows} == chosen


@pytest.mark.parametrize(("texts", "why"), [(["one"], ""), (["same"] * 9, "equal samples")])
def test_something_must_be_left_to_train(texts, why):
    with pytest.raises(DataError, match=r"data\.eval-share.*oak") as caught:
        hold_out(samples_of(texts), 0.1, "oak")
    assert why in caught.value.why


def test_a_job_with_a_share_holds_out_the_same_rows_for_all_members_of_a_sweep():
    config = load_config(examples_directory() / "demo.yaml")
    adapter = config.adapters[0]
    data = adapter.data.model_copy(update={"eval": 0.1})
    members = tuple(
        adapter.model_copy(update={"name": name, "seed": seed, "data": data}) for name, seed in (("p", 3), ("q", 8))
    )
    p, q = prepare(config.model_copy(update={"adapters": members})).adapters.values()
    assert p.eval.digest == q.eval.digest
    assert not set(p.train.rows) & set(p.eval.rows)
    assert set(p.order) <= set(range(len(p.train)))


def test_only_samples_that_look_alike_are_read_in_full(monkeypatch):
    """Of 3 000 texts of one length; two differ from a held-out one in a token between those that are looked at."""
    rng = np.random.default_rng(0)
    texts = ["".join(chr(97 + letter) for letter in row) for row in rng.integers(0, 26, (3000, 40))]
    alike = texts[7][:1] + texts[7][1].swapcase() + texts[7][2:]
    train, held = samples_of([*texts, alike, texts[5]]), samples_of([alike.swapcase(), texts[7], "new", texts[2999]])
    read, of = [], hold_out_file._hash
    monkeypatch.setattr(hold_out_file, "_hash", lambda samples, index: read.append(index) or of(samples, index))
    np.testing.assert_array_equal(repeated_samples(held, train), [1, 3])
    assert sorted(read) == sorted([7, 3000, 2999, 1, 3])
    assert len(repeated_samples(samples_of(["new"]), train)) == 0
