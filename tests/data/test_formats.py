import pytest
from data_helpers import chat, learned

from lorafusion_jax.data.formats import detect_layout
from lorafusion_jax.data.rows import Rows
from lorafusion_jax.errors import DataError, ErrorList

GPT = [{"from": "human", "value": "two and two?"}, {"from": "gpt", "value": "four"}]
BY_FORMAT = {
    "messages": {"messages": chat("two and two?", "four")},
    "conversations": {"conversations": GPT},
    "prompt": {"prompt": "two and two?", "completion": "four"},
    "instruction": {"instruction": "two and two?", "input": "", "output": "four"},
    "text": {"text": "two and two? four"},
}


@pytest.mark.parametrize("format", BY_FORMAT)
def test_format_is_recognised_and_reported(load, format):
    samples = load([BY_FORMAT[format]] * 3)
    assert samples.report.format == format
    assert len(samples) == samples.report.rows == 3


def test_the_four_ways_to_ask_make_the_same_sample(load, tokenizer):
    samples = [load([row], name=f"{format}.jsonl") for format, row in BY_FORMAT.items() if format != "text"]
    assert {tokenizer.decode(sample.tokens) for sample in samples} == {
        "<|user|>\ntwo and two?<|end|>\n<|assistant|>\nfour<|end|>\n"
    }
    assert {tuple(learned(sample, tokenizer)) for sample in samples} == {("four<|end|>",)}


def test_input_follows_the_instruction(load, tokenizer):
    samples = load([{"instruction": "Add.", "input": "2 2", "output": "4"}])
    assert "<|user|>\nAdd.\n\n2 2<|end|>" in tokenizer.decode(samples.tokens)


def test_format_that_only_some_rows_have_is_found_in_the_first_twenty(load):
    rows = [{"text": "a b"}] + [{"text": "a b", "note": "x"}] * 30
    assert load(rows).report.format == "text"


def test_columns_with_other_names(load, tokenizer):
    samples = load(
        [{"question": "2+2?", "answer": "4", "text": "by chance"}],
        columns={"prompt": "question", "completion": "answer"},
    )
    assert samples.report.format == "prompt"
    assert samples.report.columns == {"prompt": "question", "completion": "answer"}
    assert learned(samples, tokenizer) == ["4<|end|>"]


def test_format_of_the_job_file_wins(load):
    row = {"text": "a b c", "prompt": "a", "completion": "b"}
    assert load([row]).report.format == "prompt"
    assert load([row], format="text").report.format == "text"


def fails(load, code, rows, **settings):
    with pytest.raises(DataError) as caught:
        load(rows, **settings)
    assert caught.value.code == code
    return caught.value


def test_unknown_format_lists_columns_and_formats(load):
    error = fails(load, "data.unknown-format", [{"question": "a", "reply": "b"}])
    assert "question, reply" in error.why
    assert "prompt + completion" in error.why
    assert "data.columns" in error.fix


def test_wrong_columns_are_all_reported(load):
    with pytest.raises(ErrorList) as caught:
        load([{"question": "a", "answer": "b"}], columns={"prompt": "qestion", "promt": "answer"})
    role, column = caught.value.errors
    assert (role.code, role.fix) == ("data.unknown-role", "did you mean 'prompt'?")
    assert (column.code, column.fix) == ("data.missing-column", "did you mean 'question'?")


def test_format_without_its_column(load):
    assert "'completion'" in fails(load, "data.missing-column", [{"prompt": "a"}], format="prompt").what


@pytest.mark.parametrize("answer", [{"completion": ""}, {"completion": "  \n"}, {"completion": None}, {}])
def test_row_without_answer_names_its_line(load, answer):
    rows = [BY_FORMAT["prompt"], {"prompt": "a"} | answer, BY_FORMAT["prompt"]]
    error = fails(load, "data.no-answer", rows)
    assert error.where == "law.jsonl, line 2"
    assert "law: 1 of 3 rows have no answer" in error.what


@pytest.mark.parametrize("messages", [[], chat("two?"), chat("two?", " ")])
def test_conversation_without_answer(load, messages):
    assert fails(load, "data.no-answer", [{"messages": messages}]).where == "law.jsonl, line 1"


def test_conversation_without_answer_may_be_learned_whole(load):
    assert load([{"messages": chat("two?")}], loss="all").report.loss_tokens > 3


def test_unknown_role(load):
    error = fails(load, "data.bad-role", [{"messages": [*chat("a", "b"), {"role": "wizard", "content": "c"}]}])
    assert "message 2 has the role 'wizard'" in error.why


@pytest.mark.parametrize(("twice", "code", "says"), [
    ({"from": "gpt"}, "data.bad-role", "the roles 'user' and 'gpt'"),
    ({"value": "three?"}, "data.bad-type", "a content and another value"),
])  # fmt: skip
def test_keys_of_a_message_that_say_one_thing_are_equal(load, twice, code, says):
    first, answer = chat("two?", "2")
    error = fails(load, code, [{"messages": [first | twice, answer]}])
    assert says in error.why
    same = load([{"messages": [first | {"from": "human", "value": "two?"}, answer]}])
    assert same.sample(0)[0].tolist() == load([{"messages": [first, answer]}]).sample(0)[0].tolist()
    assert same.report.notes == ()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
        {"prompt": 3, "completion": "a"},
        {"prompt": "a", "completion": 3},
        {"text": None},
        {"text": "\ud800"},
    ],
)
def test_wrong_types(load, row):
    assert fails(load, "data.bad-type", [row]).where == "law.jsonl, line 1"


@pytest.mark.parametrize("part", [{"type": "image", "image": "a.png"}, {"type": "input_audio"}, {"type": "image_url"}])
def test_rows_with_images_and_sound_say_that_adapters_learn_from_text(load, part):
    content = [part, {"type": "text", "text": "what is this?"}]
    error = fails(load, "data.not-text", [{"messages": [{"role": "user", "content": content}]}])
    assert f"message 0 has parts of the type {part['type']}" in error.why
    assert "not supported" in error.fix


@pytest.mark.parametrize(
    ("columns", "fix"),
    [
        (
            ("instruction", "context", "response", "category"),
            "{instruction: instruction, input: context, output: response}",
        ),
        (("question", "passage", "answer"), "{instruction: question, input: passage, output: answer}"),
        (("context", "response"), "{prompt: context, completion: response}"),
    ],
)
def test_a_column_of_context_is_not_left_out_of_the_proposal(load, columns, fix):
    row = {column: f"the {column}" for column in columns}
    error = fails(load, "data.unknown-format", [row])
    assert error.fix == f"data.columns: {fix}"
    followed = dict(pair.split(": ") for pair in fix[1:-1].split(", "))
    assert set(load([row], columns=followed).report.columns.values()) == set(followed.values())


def test_every_kind_of_bad_row_is_reported_at_once(load):
    good, no_answer = BY_FORMAT["prompt"], {"prompt": "a", "completion": ""}
    with pytest.raises(ErrorList) as caught:
        load([good, no_answer, {"prompt": 3, "completion": "b"}, *[no_answer] * 6])
    by_code = {error.code: error for error in caught.value.errors}
    assert by_code["data.no-answer"].where == "law.jsonl, lines 2, 4, 5, 6, 7 and 2 more"
    assert by_code["data.bad-type"].where == "law.jsonl, line 3"


def test_rows_of_tables_are_counted_from_zero(load):
    assert fails(load, "data.no-answer", "prompt,completion\na,b\nc,\n", name="a.csv").where == "a.csv, row 1"


def test_parts_of_text_are_joined(load, tokenizer):
    parts = [{"type": "text", "text": "fo"}, {"type": "text", "text": "ur"}]
    samples = load([{"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": parts}]}])
    assert learned(samples, tokenizer) == ["four<|end|>"]


def test_sharegpt_roles(load, tokenizer):
    samples = load([{"conversations": [{"from": "system", "value": "Be brief."}, *GPT]}])
    assert tokenizer.decode(samples.tokens).startswith("<|system|>\nBe brief.<|end|>\n<|user|>")


def test_first_rows_decide():
    rows = Rows(source="a", values=[{"text": "x"}] * 25 + [{"messages": []}])
    assert detect_layout(rows).format == "text"
