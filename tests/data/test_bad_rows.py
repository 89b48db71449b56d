"""Rows that cannot be used: few are counted, named and left out, more are an error."""

from __future__ import annotations

import json

import pytest
from data_helpers import write_model

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data import load_samples, load_tokenizer
from lorafusion_jax.data.formats import detect_layout
from lorafusion_jax.data.rows import Rows
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.objective.choose import choose

GOOD = {
    "sft": {"prompt": "What is two and two?", "completion": "four"},
    "dpo": {"prompt": "yes or no?", "chosen": "yes", "rejected": "no"},
    "chat": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
}
BAD = {  # one of each kind that a row can be
    "empty answer": ("sft", {"prompt": "a", "completion": ""}),
    "null": ("sft", {"prompt": "a", "completion": None}),
    "number": ("sft", {"prompt": 3, "completion": "b"}),
    "unknown role": ("chat", {"messages": [{"role": "narrator", "content": "a"}]}),
    "role of no template": ("chat", {"messages": [{"role": "tool", "content": "a"}, *GOOD["chat"]["messages"]]}),
    "weight": ("chat", {"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}),
    "rejected is no text": ("dpo", {"prompt": "a", "chosen": "b", "rejected": 7}),
    "two answers": ("sft", '{"prompt": "a", "completion": "b", "completion": "c"}'),
    "torn line": ("sft", '{"prompt": "a", "comp'),
}  # fmt: skip


@pytest.fixture
def load(tmp_path):
    tokenizer = load_tokenizer(write_model(tmp_path / "model"))

    def read(rows, objective="sft", **settings):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
        return load_samples(
            "rows.jsonl",
            settings=DataSettings(train=(), **settings),
            tokenizer=tokenizer,
            adapter="law",
            base_dir=tmp_path,
            cache_dir=tmp_path / "cache",
            objective=choose(objective, {}),
        )

    return read


@pytest.mark.parametrize("name", BAD)
def test_one_of_many_is_left_out_and_named(load, name):
    form, bad = BAD[name]
    objective = "dpo" if form == "dpo" else "sft"
    rows = [GOOD[form]] * 150
    samples = load([*rows[:100], bad, *rows[100:]], objective)
    assert len(samples) == 150
    (note,) = [note for note in samples.report.notes if "data.left-out" in note]
    assert "1 of 151 rows" in note
    assert "line 101" in note
    assert isinstance(bad, str) or 100 not in samples.rows
    again = load([*rows[:100], bad, *rows[100:]], objective)  # from the cache
    assert again.report.notes == samples.report.notes
    with pytest.raises(LoraFusionError, match="line 101"):
        load([*rows[:100], bad, *rows[100:]], objective, on_bad="error")


def test_more_than_one_in_a_hundred_are_an_error(load):
    bad = BAD["empty answer"][1]
    with pytest.raises(LoraFusionError, match=r"(?s)data\.no-answer.*3 of 203"):
        load([*[GOOD["sft"]] * 200, bad, bad, bad])
    two_kinds = [BAD["number"][1], bad]
    assert len(load([*[GOOD["sft"]] * 200, *two_kinds])) == 200
    with pytest.raises(LoraFusionError, match=r"data\.bad-type") as caught:
        load([*[GOOD["sft"]] * 100, *two_kinds])
    assert "data.no-answer" in str(caught.value)


def test_what_only_some_rows_have_is_not_left_out(load):
    """A column of some rows is a mistake of the file, whichever rows are the few."""
    scored = {"prompt": "a", "completion": "b", "label": True}
    with pytest.raises(LoraFusionError):
        load([*[scored] * 200, {"prompt": "a", "completion": "b"}], "kto")


@pytest.mark.parametrize(
    ("columns", "fix"),
    [
        (["id", "Question", "Answer"], "{prompt: Question, completion: Answer}"),
        (["instruction", "context", "response"], "{instruction: instruction, input: context, output: response}"),
        (["prompt", "response"], "{prompt: prompt, completion: response}"),
        (["article", "highlights", "id"], "{prompt: article, completion: highlights}"),
        (["foo", "bar"], "{prompt: <column>, completion: <column>}"),
    ],
)
def test_likely_columns_are_proposed(columns, fix):
    with pytest.raises(LoraFusionError, match=r"data\.unknown-format") as caught:
        detect_layout(Rows(source="x.csv", values=[dict.fromkeys(columns, "a")]))
    assert caught.value.fix == f"data.columns: {fix}"
