import dataclasses
import json

import numpy as np
import pytest
from data_helpers import MARKED_TEMPLATE, chat, learned, write_model
from drawn import GOLDEN
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data import load_samples, load_tokenizer
from lorafusion_jax.data.model_fit import model_problems
from lorafusion_jax.errors import DataError
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.objective.choose import choose

SHAPE = ModelConfig.from_hf(GOLDEN["llama3"]["config"])
TWO_TURNS = {"messages": chat("2+2?", "four", "3+3?", "six", system="Be brief.")}
PAIR = {"prompt": "2+2?", "completion": "four"}
LONG = {"prompt": "two and " * 30, "completion": "four"}


def fails(load, code, rows, **options):
    with pytest.raises(DataError) as caught:
        load(rows, **options)
    assert caught.value.code == code
    return caught.value


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("auto", ["four<|end|>", "six<|end|>"]),
        ("assistant", ["four<|end|>", "six<|end|>"]),
        ("completion", ["six<|end|>"]),
    ],
)
@pytest.mark.parametrize("kind", ["tokenizer", "marked_tokenizer"])
def test_loss_of_conversations(load, request, kind, loss, expected):
    tokenizer = request.getfixturevalue(kind)
    assert learned(load([TWO_TURNS], loss=loss, tokenizer=tokenizer), tokenizer) == expected


@pytest.mark.parametrize("row", [TWO_TURNS, PAIR, {"text": "two and two"}])
def test_loss_all_learns_everything_but_the_first_token(load, row):
    samples = load([row], loss="all")
    assert not samples.loss_mask[0]
    assert samples.loss_mask[1:].all()


@pytest.mark.parametrize("loss", ["auto", "assistant", "completion"])
def test_loss_of_pairs(load, tokenizer, loss):
    assert learned(load([PAIR], loss=loss), tokenizer) == ["four<|end|>"]


@pytest.mark.parametrize("loss", ["assistant", "completion"])
def test_plain_text_has_no_answers(load, loss):
    assert "loss: all" in fails(load, "data.no-answer-column", [{"text": "a"}], loss=loss).fix


def test_without_template_pairs_are_written_plainly(load, plain_tokenizer):
    samples = load([PAIR], tokenizer=plain_tokenizer)
    assert plain_tokenizer.decode(samples.tokens) == "2+2?four<|end|>"
    (note,) = samples.report.notes
    assert note.startswith("[data.no-template]")
    assert "with nothing between them, as in line 1: '2+2?four'" in note
    assert learned(samples, plain_tokenizer) == ["four<|end|>"]


def test_without_template_instructions_get_an_empty_line(load, plain_tokenizer):
    samples = load([{"instruction": "Add.", "input": "2 2", "output": "4"}], tokenizer=plain_tokenizer)
    assert plain_tokenizer.decode(samples.tokens) == "Add.\n\n2 2\n\n4<|end|>"
    (note,) = samples.report.notes
    assert repr("Add.\n\n2 2\n\n4") in note
    assert "data.chat_template: alpaca" in note
    assert learned(samples, plain_tokenizer) == ["4<|end|>"]


def test_what_needs_no_word_about_a_missing_template_gets_none(load, tokenizer, plain_tokenizer):
    """Rows that a template writes, pairs with white space of their own, and texts."""
    instruction = {"instruction": "Add.", "output": "4"}
    assert load([instruction], tokenizer=tokenizer).report.notes == ()
    spaced = [PAIR, PAIR | {"completion": " four"}], [PAIR | {"prompt": "2+2?\n"}], [{"text": "two"}]
    assert [load(rows, tokenizer=plain_tokenizer).report.notes for rows in spaced] == [(), (), ()]


def test_preferences_without_template_are_told_their_text_once(tmp_path, tokenizer, plain_tokenizer):
    rows = [{"prompt": f"{number}+1?", "chosen": "yes", "rejected": "no"} for number in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = [
        load_samples(
            "pairs.jsonl",
            settings=DataSettings.model_validate({"train": "pairs.jsonl"}),
            tokenizer=of_base,
            adapter="law",
            base_dir=tmp_path,
            cache_dir=tmp_path / "cache",
            objective=choose("dpo", {}),
        ).report.notes
        for of_base in (tokenizer, plain_tokenizer)
    ]
    assert [len(notes) for notes in told] == [0, 1]
    assert "'0+1?yes'" in told[1][0]


def test_without_template_conversations_cannot_be_written(load, plain_tokenizer):
    assert "data.chat_template" in fails(load, "data.no-template", [TWO_TURNS], tokenizer=plain_tokenizer).fix


def test_template_that_refuses_a_row_names_it(load):
    error = fails(load, "data.template", [TWO_TURNS, {"messages": [*chat("a", "b"), {"role": "tool", "content": "c"}]}])
    assert error.where == "law.jsonl, line 2"
    assert "tools are not for me" in error.why


def test_text_ends_with_the_end_token(load, tokenizer):
    samples = load([{"text": "two and two"}])
    assert tokenizer.decode(samples.tokens) == "two and two<|end|>"


def test_report_counts(load):
    samples = load([PAIR, PAIR | {"prompt": "two and two and two?"}])
    report = samples.report
    assert (report.rows, report.cut, report.dropped, report.too_long) == (2, 0, (), ())
    assert report.tokens == len(samples.tokens) == samples.offsets[-1]
    assert report.loss_tokens == samples.loss_mask.sum()
    assert report.longest == samples.lengths.max() == report.uncut[-1]
    assert report.columns == {"prompt": "prompt", "completion": "completion"}


def test_arrays_are_as_promised(load):
    samples = load([PAIR, PAIR])
    assert [array.dtype for array in (samples.tokens, samples.loss_mask, samples.offsets, samples.rows)] == [
        np.int32,
        bool,
        np.int64,
        np.int64,
    ]
    tokens, mask = samples.sample(1)
    assert tokens.tolist() == samples.sample(0)[0].tolist()
    assert mask.tolist() == samples.sample(0)[1].tolist()


def test_one_row_is_a_data_set(load):
    assert load([PAIR]).lengths.shape == (1,)


def test_cut(load):
    whole = load([{"text": "two and two and two"}, {"text": "a"}])
    samples = load([{"text": "two and two and two"}, {"text": "a"}], max_length=4)
    assert samples.lengths.tolist() == [4, 2]
    assert samples.sample(0)[0].tolist() == whole.sample(0)[0][:4].tolist()
    assert samples.report.cut == 1
    assert samples.report.uncut[-1] == whole.report.longest > 4


def test_drop_long_rows(load):
    samples = load([PAIR, LONG, PAIR], max_length=32, on_long="drop")
    assert samples.rows.tolist() == [0, 2]
    assert (samples.report.too_long, samples.report.dropped, samples.report.cut) == ((1,), (), 0)


def test_long_row_as_an_error_names_row_and_length(load):
    whole = load([LONG]).report.longest
    error = fails(load, "data.too-long", [PAIR, LONG], max_length=32, on_long="error")
    assert error.where == "law.jsonl, line 2"
    assert str(whole) in error.why
    suggested = int(error.fix.split()[1])
    assert load([PAIR, LONG], max_length=suggested, on_long="error").report.cut == 0


@pytest.mark.parametrize(("spare", "fix"), [(5, "data.max_length: {}   or"), (-1, "data.on_long: {} (")])
def test_advice_on_lengths_stays_within_the_model(load, tokenizer, spare, fix):
    positions = load([LONG]).report.longest + spare
    known = dataclasses.replace(tokenizer, positions=positions)
    error = fails(load, "data.too-long", [PAIR, LONG], tokenizer=known, max_length=32, on_long="error")
    assert error.fix.startswith(fix.format(positions if spare > 0 else "cut"))
    error = fails(
        load, "data.empty-loss", [LONG], tokenizer=dataclasses.replace(tokenizer, positions=33), max_length=32
    )
    assert error.fix == "data.on_long: drop (the model has 33 positions)"


def test_dropping_every_row_is_an_error(load):
    fails(load, "data.too-long", [LONG], max_length=8, on_long="drop")


def test_few_rows_without_a_token_to_learn_are_dropped_and_named(load):
    samples = load([PAIR] * 60 + [LONG] + [PAIR] * 60, max_length=32)
    assert samples.report.dropped == (60,)
    assert len(samples) == 120
    assert 60 not in samples.rows
    assert samples.report.cut == 0  # a dropped row is not counted as cut


def test_many_rows_without_a_token_to_learn_are_an_error_with_the_fix(load):
    error = fails(load, "data.empty-loss", [PAIR] * 50 + [LONG], max_length=32)
    assert "law: 1 of 51 rows have no token to learn from." in error.what
    assert error.where == "law.jsonl, line 51"
    assert "data.max_length=32 cuts the answer" in error.why
    suggested = int(error.fix.split()[1])
    assert load([PAIR] * 50 + [LONG], max_length=suggested).report.dropped == ()


def test_template_that_renders_no_answer_is_an_error(load, tmp_path):
    silent = MARKED_TEMPLATE.replace("{{ m.content }}<|end|>{% endgeneration %}", "{% endgeneration %}")
    tokenizer = load_tokenizer(write_model(tmp_path / "model", template=silent))
    error = fails(load, "data.empty-loss", [TWO_TURNS], tokenizer=tokenizer)
    assert "has no answer" in error.why
    assert "chat template" in error.fix


def test_an_empty_text_is_called_empty_and_the_fix_is_no_command_that_fails_alike(load):
    error = fails(load, "data.empty-loss", [{"text": "two and two"}, {"text": ""}])
    assert error.why == "line 2 is empty"
    assert "take these rows out" in error.fix
    assert "preview" not in error.fix


def test_digest_follows_content(load):
    a, b, c = load([PAIR]), load([PAIR], name="other.jsonl"), load([PAIR], loss="all")
    assert a.digest == b.digest
    assert a.digest != c.digest


contents = st.text(st.sampled_from("ab yesno 24?\n é🎉東"), min_size=1, max_size=12)
non_empty = contents.filter(str.strip)
rows = st.one_of(
    st.builds(
        lambda turns, system: {"messages": chat(*[text for turn in turns for text in turn], system=system)},
        st.lists(st.tuples(contents, non_empty), min_size=1, max_size=3),
        st.none() | contents,
    )
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(rows, min_size=1, max_size=4), st.sampled_from(["assistant", "completion", "all"]), st.integers(24, 200)
)
def test_masks_hold_what_they_promise(tmp_path, tokenizer, marked_tokenizer, batch, loss, max_length):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in batch))
    values = DataSettings.model_validate({"train": "x", "loss": loss, "max_length": max_length})
    options = {"settings": values, "adapter": "law"}
    try:
        samples = load_samples(str(path), tokenizer=tokenizer, cache_dir=tmp_path / "cache", **options)
    except DataError as error:
        assume(error.code != "data.empty-loss")  # max_length cut every answer
        raise
    assert not samples.loss_mask[samples.offsets[:-1]].any()
    assert (np.add.reduceat(samples.loss_mask, samples.offsets[:-1]) > 0).all()
    assert samples.report.loss_tokens == samples.loss_mask.sum()
    assert samples.report.tokens == samples.lengths.sum() == len(samples.tokens)
    assert samples.lengths.max() <= max_length
    if samples.report.cut == 0 and loss == "assistant":
        for index, row in enumerate(samples.rows):
            answers = [m["content"] + "<|end|>" for m in batch[row]["messages"] if m["role"] == "assistant"]
            assert learned(samples, tokenizer, index) == answers
    # both ways to the mask agree
    marked = load_samples(str(path), tokenizer=marked_tokenizer, cache_dir=tmp_path / "cache", **options)
    assert np.array_equal(marked.loss_mask, samples.loss_mask)


def test_texts_of_a_sample_have_positions_of_their_own(load, tokenizer, tmp_path):
    samples = load([{"text": "two and two"}, {"text": "two and " * 8}])
    both = dataclasses.replace(samples, segment_lengths=np.array([[1, 2], [9, 8]]))
    model = dataclasses.replace(SHAPE, max_positions=12, vocab_size=2**20)
    told = {"tokenizer": tokenizer, "adapter": "law", "directory": tmp_path}
    assert model_problems(both, model, **told) == []
    (problem,) = model_problems(samples, model, **told)
    assert problem.code == "model.positions"
