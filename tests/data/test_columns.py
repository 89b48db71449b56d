"""Columns and keys of messages: each is used, refused by name, or named in a note."""

import csv
import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest
from data_helpers import TEMPLATE, chat, learned, write_model
from pyarrow import parquet
from template_cases import WEATHER

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data import load_samples, load_tokenizer
from lorafusion_jax.data.prompts import prompt_tokens
from lorafusion_jax.data.sources import open_source, read_rows, row_blocks, store_rows
from lorafusion_jax.errors import DataError, ErrorList
from lorafusion_jax.objective.choose import choose

TOOLS_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% if mood %}<{{ mood }}>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.content }}"
    "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASK, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}
PAIR = {"prompt": "2+2?", "completion": "four"}
FORMS = {
    "messages": {"messages": [ASK, ANSWER]},
    "conversations": {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "four"}]},
    "prompt": PAIR,
    "lists": {"prompt": [ASK], "completion": [ANSWER]},
    "instruction": {"instruction": "2+2?", "output": "four"},
}


@pytest.fixture(scope="module")
def tools_tokenizer(tmp_path_factory):
    return load_tokenizer(write_model(tmp_path_factory.mktemp("model"), template=TOOLS_TEMPLATE))


def text_of(samples, tokenizer, index: int = 0) -> str:
    return tokenizer.decode(samples.sample(index)[0])


def refused(load, row: dict, **options) -> DataError:
    with pytest.raises(DataError) as caught:
        load([FORMS["messages"], row] if "messages" in row else [row], **options)
    return caught.value


@pytest.mark.parametrize("form", FORMS)
def test_a_system_column_is_the_first_message(load, tokenizer, form):
    samples = load([FORMS[form] | {"system": "Be brief."}, FORMS[form] | {"system": ""}])
    assert text_of(samples, tokenizer).startswith("<|system|>\nBe brief.<|end|>\n<|user|>\n2+2?")
    assert text_of(samples, tokenizer, 1).startswith("<|user|>\n2+2?")
    assert learned(samples, tokenizer) == ["four<|end|>"]
    assert samples.report.notes == ()


def test_a_system_column_may_repeat_the_message_but_not_contradict_it(load, tokenizer):
    row = {"messages": chat("2+2?", "four", system="Be brief.")}
    assert text_of(load([row | {"system": "Be brief."}]), tokenizer).count("Be brief.") == 1
    error = refused(load, row | {"system": "Be long."})
    assert (error.code, error.where) == ("data.two-systems", "law.jsonl, line 2")


def test_a_system_column_of_another_name(load, tokenizer):
    samples = load([FORMS["messages"] | {"how": "Be brief."}], columns={"system": "how"})
    assert text_of(samples, tokenizer).startswith("<|system|>\nBe brief.")


def test_a_system_text_needs_a_template(load, plain_tokenizer):
    assert refused(load, PAIR | {"system": "x"}, tokenizer=plain_tokenizer).code == "data.no-template"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_are_given_to_the_template_as_a_list_and_as_json(load, tools_tokenizer, form, as_text):
    tools = json.dumps([WEATHER]) if as_text else [WEATHER]
    samples = load([FORMS[form] | {"tools": tools}, FORMS[form] | {"tools": ""}], tokenizer=tools_tokenizer)
    assert text_of(samples, tools_tokenizer).startswith(json.dumps(WEATHER))
    assert text_of(samples, tools_tokenizer, 1).startswith("<|user|>")
    assert samples.report.notes == ()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tools", "get_weather"),
        ("tools", '{"name": "x"}'),
        ("tools", 3),
        ("tools", "[" * 10_000),
        ("chat_template_kwargs", [1]),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", "x"),
    ],
)
def test_columns_that_are_not_what_their_name_says_are_refused(load, column, value):
    error = refused(load, FORMS["messages"] | {column: value})
    assert (error.code, error.where) == ("data.bad-column", "law.jsonl, line 2")
    assert f"'{column}'" in error.why


@pytest.mark.parametrize("value", [{"mood": "calm"}, '{"mood": "calm"}'])
def test_variables_reach_the_template(load, tools_tokenizer, value):
    samples = load([FORMS["messages"] | {"chat_template_kwargs": value}], tokenizer=tools_tokenizer)
    assert text_of(samples, tools_tokenizer).startswith("<calm>")


@pytest.mark.parametrize("history", [[["1+1?", "two"]], '[["1+1?", "two"]]'])
def test_history_is_earlier_turns(load, tokenizer, history):
    row = {"instruction": "2+2?", "input": "", "output": "four", "history": history, "system": "Be brief."}
    samples = load([row])
    assert text_of(samples, tokenizer) == (
        "<|system|>\nBe brief.<|end|>\n<|user|>\n1+1?<|end|>\n<|assistant|>\ntwo<|end|>\n"
        "<|user|>\n2+2?<|end|>\n<|assistant|>\nfour<|end|>\n"
    )
    assert learned(samples, tokenizer) == ["four<|end|>"]
    assert learned(load([row], loss="assistant"), tokenizer) == ["two<|end|>", "four<|end|>"]


@pytest.mark.parametrize("history", ["x", [["a"]], [3], {"a": 1}])
def test_a_history_of_another_shape_is_refused(load, history):
    row = {"instruction": "2+2?", "output": "four", "history": history}
    assert refused(load, row).code == "data.bad-column"


@pytest.mark.parametrize(
    "off",
    [
        {"weight": 0},
        {"weight": 0.0},
        {"train": False},
        {"weight": 0, "train": False},
        {"loss": False},
        {"training": False},
        {"trainable": False, "masked": True},
        {"mask": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["tokenizer", "marked_tokenizer"])
def test_messages_that_are_not_to_be_learned_are_context(load, request, kind, off):
    tokenizer = request.getfixturevalue(kind)
    turns = chat("2+2?", "four", "3+3?", "six")
    turns[1] |= off
    turns[3] |= {"weight": 1}
    turns[0] |= {"weight": 0}
    samples = load([{"messages": turns}], tokenizer=tokenizer)
    assert learned(samples, tokenizer) == ["six<|end|>"]
    whole = load([{"messages": chat("2+2?", "four", "3+3?", "six")}], tokenizer=tokenizer)
    assert samples.tokens.tolist() == whole.tokens.tolist()
    assert samples.report.notes == ()


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (1, {"weight": 0.5}),
        (1, {"weight": "0"}),
        (1, {"train": 1}),
        (1, {"weight": 1, "train": False}),
        (0, {"weight": 1}),
        (0, {"train": True}),
        (1, {"loss": 0.3}),
        (1, {"loss": 1}),
        (1, {"loss_scale": 0}),
        (1, {"masked": True, "loss": True}),
        (0, {"masked": False}),
    ],
)
def test_other_words_about_the_loss_are_refused(load, turn, words):
    turns = chat("2+2?", "four")
    turns[turn] |= words
    assert refused(load, {"messages": turns}).code == "data.bad-weight"


def test_what_is_not_to_be_learned_cannot_be_learned_with_the_whole(load):
    row = {"messages": [ASK, ANSWER | {"weight": 0}, ASK, ANSWER]}
    assert "data.loss: all" in refused(load, row, loss="all").why


def test_a_row_of_which_nothing_is_learned_has_no_answer(load):
    assert refused(load, {"messages": [ASK, ANSWER | {"train": False}]}).code == "data.no-answer"


@pytest.mark.parametrize("loss", ["auto", "completion"])
def test_lists_of_messages_as_prompt_and_completion(load, tokenizer, loss):
    row = {"prompt": [*chat("1+1?", "two", system="Be brief."), ASK], "completion": [ANSWER, ASK, ANSWER]}
    samples = load([row], loss=loss)
    assert learned(samples, tokenizer) == ["four<|end|>", "four<|end|>"]
    assert learned(load([row], loss="assistant"), tokenizer)[0] == "two<|end|>"
    whole = load([{"messages": row["prompt"] + row["completion"]}])
    assert samples.tokens.tolist() == whole.tokens.tolist()


def test_a_list_and_a_text_as_prompt_and_completion(load, tokenizer):
    samples = load([{"prompt": [ASK], "completion": "four"}])
    assert samples.tokens.tolist() == load([FORMS["messages"]]).tokens.tolist()


CALL = {"name": "get_weather", "arguments": {"city": "Rome"}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "assistant", "content": None, "function_call": CALL},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps([CALL])},
    ],
    ids=["tool_calls", "function_call key", "function_call role", "function_call list"],
)
def test_calls_of_tools_are_learned(load, tools_tokenizer, message):
    result = {"from": "observation", "value": "sunny"}
    samples = load([{"messages": [ASK, message, result, ANSWER]}], tokenizer=tools_tokenizer)
    assert learned(samples, tools_tokenizer) == ['[get_weather {"city": "Rome"}]<|end|>', "four<|end|>"]
    assert "<|tool|>sunny" in text_of(samples, tools_tokenizer)


@pytest.mark.parametrize(
    ("arguments", "learned_as"),
    [("  ", "{}"), (json.dumps('{"n": [1]}'), '{"n": [1]}'), ("[1]", '"[1]"'), ("city=Rome", '"city=Rome"')],
)
def test_arguments_of_calls_that_are_texts(load, tools_tokenizer, arguments, learned_as):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    rows = [{"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]}]
    samples = load(rows, tokenizer=tools_tokenizer)
    assert learned(samples, tools_tokenizer) == [f"[f {learned_as}]<|end|>"]
    notes = [note for note in samples.report.notes if note.startswith("[data.quoted-arguments] 1 of 1 rows")]
    assert bool(notes) == learned_as.startswith('"')


def test_a_call_that_is_no_json_is_refused(load):
    assert "calls a function" in refused(load, {"messages": [ASK, {"from": "function_call", "value": "x()"}]}).why


def test_a_template_that_drops_calls_is_refused(load, tmp_path):
    silent = load_tokenizer(write_model(tmp_path / "m", template=TEMPLATE.replace("m.content", "m.content or ''")))
    row = {"messages": [ASK, ANSWER | {"tool_calls": [{"type": "function", "function": CALL}]}]}
    assert "does not write the call of get_weather" in refused(load, row, tokenizer=silent).why


def test_a_template_that_drops_tools_or_text_or_keys_is_noted(load, tmp_path):
    source = TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]")
    tokenizer = load_tokenizer(write_model(tmp_path / "m", template=source))
    rows = [
        FORMS["messages"],
        {"messages": [ASK, ANSWER | {"content": "<think>add</think>four", "mood": "calm"}], "tools": [WEATHER]},
    ]
    notes = load(rows, tokenizer=tokenizer).report.notes
    assert [note.split("]")[0] for note in notes] == [
        "[data.template-omits",
        "[data.template-tools",
        "[data.unused-key",
    ]
    assert "1 of 2 rows, first line 2, message 1" in notes[0]
    assert "'mood'" in notes[2]


def test_columns_without_a_role_are_noted_wherever_they_are(load):
    samples = load([PAIR] * 30 + [PAIR | {"late": 1, "input": "x"}])
    assert samples.report.notes == (
        "[data.unused-column] the columns 'late', 'input' are not used; data.columns can give a column a role",
    )


def test_notes_come_from_the_cache_too(load):
    rows = [PAIR | {"id": 1}]
    assert load(rows).report.notes == load(rows).report.notes != ()


def test_absent_keys_of_a_table_are_no_nulls(load, tools_tokenizer, tmp_path):
    calls = [{"type": "function", "function": {"name": "f", "arguments": args}} for args in ({"a": 1}, {"b": 2})]
    rows = [{"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]} for call in calls]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "law.parquet")
    from lorafusion_jax.config.schema import DataSettings
    from lorafusion_jax.data import load_samples

    samples = load_samples(
        "law.parquet",
        settings=DataSettings(train="law.parquet"),
        tokenizer=tools_tokenizer,
        adapter="law",
        base_dir=tmp_path,
        cache_dir=tmp_path / "cache",
    )
    assert [learned(samples, tools_tokenizer, row) for row in (0, 1)] == [
        ['[f {"a": 1}]<|end|>'],
        ['[f {"b": 2}]<|end|>'],
    ]


def test_texts_get_no_second_end_or_first_token(load, tmp_path):
    tokenizer = load_tokenizer(write_model(tmp_path / "m", template=None, bos_token="<s>", add_bos_token=True))
    texts = ["two", "two<|end|>", "<s>two", "<s>two<|end|>"]
    samples = load([{"text": text} for text in texts], tokenizer=tokenizer)
    assert {text_of(samples, tokenizer, row) for row in range(4)} == {"<s>two<|end|>"}
    assert {tuple(samples.sample(row)[1].tolist()) for row in range(4)} == {tuple(samples.sample(0)[1].tolist())}


@pytest.mark.parametrize("calls", [True, {"a": 1}, ["f"]])
def test_calls_that_are_no_list_of_objects_are_refused(load, calls):
    with pytest.raises(DataError) as caught:
        load([{"messages": [ASK, {"role": "assistant", "content": "x", "tool_calls": calls}, ANSWER]}])
    assert caught.value.code == "data.bad-type"


def test_a_row_far_too_long_costs_what_is_kept_of_it(load):
    whole = load([{"text": "a b " * 4096}, {"text": "a"}], max_length=64)
    huge = load([{"text": "a b " * (2 << 20)}, {"text": "a"}], max_length=64)
    np.testing.assert_array_equal(huge.tokens, whole.tokens)
    assert huge.report.cut == 1


def test_rows_too_large_to_be_tokenised_are_refused_at_once(load):
    with pytest.raises(DataError) as caught:
        load([{"text": "a b " * (2 << 20)}, {"text": "a"}], on_long="error")
    assert (caught.value.code, caught.value.where) == ("data.large-row", "law.jsonl, line 1")
    with pytest.raises(DataError, match=r"data\.large-row"):
        load([{"messages": [ASK, ANSWER | {"content": "a b " * (2 << 20)}]}])


def test_many_kinds_of_bad_rows_come_in_one_go(load):
    with pytest.raises(ErrorList) as caught:
        load([{"messages": [ASK]}, FORMS["messages"] | {"tools": "x"}, {"messages": [ASK | {"train": True}, ANSWER]}])
    assert {error.code for error in caught.value.errors} == {"data.no-answer", "data.bad-column", "data.bad-weight"}


def test_an_answer_that_ends_with_the_end_token_gets_one(load):
    """The template adds it, too, and the second one would teach to go on after the end."""
    once = {"prompt": "Two and two?", "completion": "four"}
    twice = once | {"completion": "four<|end|>"}
    rows = load([once, twice])
    (note,) = rows.report.notes
    assert note.startswith("[data.end-twice] 1 of 2 rows have answers that end with <|end|>, which the chat template")
    assert note.endswith("first line 2: it is learned once")
    for ours, theirs in zip(rows.sample(0), rows.sample(1), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    talk = [ASK, ANSWER | {"content": "four<|end|>"}, ASK, ANSWER | {"content": "five<|end|>"}]
    talks = load(
        [{"messages": talk}, {"messages": [ASK, ANSWER | {"content": "four"}, ASK, ANSWER | {"content": "five"}]}]
    )
    np.testing.assert_array_equal(talks.sample(0)[0], talks.sample(1)[0])
    assert load([{"prompt": "One?", "completion": "11"}]).report.notes == ()  # equal tokens of text are no ends
    asked = {"messages": [{"role": "user", "content": "One?<|end|>"}, {"role": "assistant", "content": "1"}]}
    assert load([asked]).report.notes == ()  # what is not learned teaches nothing


def test_a_flag_that_nobody_reads_is_said_to_do_nothing(load):
    for flag in ({"skip_me": True}, {"loss_weight": 0}):
        (note,) = load([{"messages": [ASK, ANSWER | flag]}]).report.notes
        assert str([*flag])[1:-1] in note
        assert "answers are learned" in note
    (note,) = load([{"messages": [ASK, ANSWER | {"stamp_x": 17}]}]).report.notes
    assert "answers are learned" not in note


QUOTING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ITEMS = QUOTING.replace(
    "{{ call.function.arguments | tojson }}",
    "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
)
AS_TEXT = QUOTING.replace("{{ call.function.arguments | tojson }}", "{{ call.function.arguments + '' }}")


@pytest.mark.parametrize(
    ("template", "written"),
    [(QUOTING, 'add {"a": "é", "b": [1]}'), (ITEMS, "add a=éb=[1]"), (AS_TEXT, 'add {"a":"é","b":[1]}')],
    ids=["quoting", "items", "text"],
)
def test_arguments_that_are_a_json_text_are_encoded_once(template, written, load, tmp_path):
    """As OpenAI writes them. Templates that take texts get them as they are."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a":"é","b":[1]}'}}
    turns = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tokenizer = load_tokenizer(write_model(tmp_path / template[:1], template))
    samples = load([{"messages": turns}], tokenizer=tokenizer)
    assert learned(samples, tokenizer) == [f"{written}<|end|>"]
    prompt = tokenizer.decode(prompt_tokens([*turns, {"role": "user", "content": "and?"}], tokenizer))
    assert written in prompt
    other = {"type": "function", "function": {"name": "add", "arguments": "no JSON"}}
    if template != ITEMS:
        load([{"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [other]}]}], tokenizer=tokenizer)


HUMAN, GPT = {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "four"}
BRIEF = {"role": "system", "content": "Be brief."}
WRONG, OTHER = {"role": "assistant", "content": "five"}, {"role": "user", "content": "3+3?"}
PAIRED = {"prompt": [ASK], "chosen": [ANSWER], "rejected": [WRONG]}
LABELLED = {"prompt": [ASK], "completion": [ANSWER], "label": True}
SECOND = {"prompt": [OTHER], "completion": [{"role": "assistant", "content": "two"}], "label": False}
LAYOUTS = [  # objective, a row of another program, the same row as ours, columns that are not used
    ("dpo", {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "five"}}, PAIRED, ""),
    ("orpo", {"messages": [ASK], "chosen": ANSWER, "rejected": WRONG}, PAIRED, ""),
    ("reward", PAIRED | {"messages": [ASK, ANSWER]}, PAIRED, "messages"),
    ("simpo", {"messages": [ASK, ANSWER], "chosen": [ASK, ANSWER], "rejected": [ASK, WRONG]}, PAIRED, ""),
    ("kto", {"messages": [ASK, ANSWER], "label": True}, LABELLED, ""),
    ("kto", {"conversations": [HUMAN, GPT], "label": True}, LABELLED, ""),
    ("dpo", PAIRED | {"system": "Be brief."}, PAIRED | {"prompt": [BRIEF, ASK]}, ""),
    ("cpo", PAIRED | {"prompt": "2+2?", "system": "Be brief."}, PAIRED | {"prompt": [BRIEF, ASK]}, ""),
    ("dpo", {"chosen": [ASK, ANSWER], "rejected": [ASK, WRONG], "system": "Be brief."},
     PAIRED | {"prompt": [BRIEF, ASK]}, ""),
    ("dpo", PAIRED | {"prompt": [BRIEF, ASK], "system": "Be brief."}, PAIRED | {"prompt": [BRIEF, ASK]}, ""),
    ("kto", LABELLED | {"system": "Be brief."}, LABELLED | {"prompt": [BRIEF, ASK]}, ""),
    ("grpo", {"prompt": "2+2?", "completion": "four", "advantage": 1, "system": "Be brief."},
     {"prompt": [BRIEF, ASK], "completion": "four", "advantage": 1}, ""),
    ("cit", {"prompt": "2+2?", "paraphrase": "2 and 2?", "completion": "four", "system": "Be brief."},
     {"prompt": [BRIEF, ASK], "paraphrase": [BRIEF, ASK | {"content": "2 and 2?"}], "completion": "four"}, ""),
]  # fmt: skip
SECONDS = {"kto": SECOND, "cit": {"prompt": [OTHER], "paraphrase": [ASK], "completion": "six"}}


def write_csv(path, rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        table.writeheader()
        for row in rows:
            table.writerow({key: cell if isinstance(cell, str) else json.dumps(cell) for key, cell in row.items()})


def as_texts(row: dict) -> dict:
    """The row as pandas writes it: messages are JSON in a text."""
    return {key: json.dumps(cell) if isinstance(cell, dict | list) else cell for key, cell in row.items()}


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "texts.jsonl"])
@pytest.mark.parametrize(("objective", "row", "same", "unused"), LAYOUTS)
def test_layouts_of_preferences_give_the_same_samples(objective, row, same, unused, suffix, tmp_path, tokenizer):
    def read(name: str, row: dict):
        second = SECONDS.get(objective)
        if second is not None and "prompt" not in row:
            second = {next(iter(row)): [*second["prompt"], *second["completion"]], "label": False}
        rows = [row] if second is None else [row, second]
        if name.endswith("csv"):
            write_csv(tmp_path / name, rows)
        else:
            rows = [as_texts(row) for row in rows] if "texts" in name else rows
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_samples(
            name,
            settings=DataSettings(train=name),
            tokenizer=tokenizer,
            adapter="a",
            base_dir=tmp_path,
            cache_dir=tmp_path / "cache",
            objective=choose(objective, {"group": 2} if objective in SECONDS else {}),
        )

    samples = read(f"row.{suffix}", row)
    assert text_of(samples, tokenizer) == text_of(read("same.jsonl", same), tokenizer)
    assert samples.digest == read("same.jsonl", same).digest
    notes = [note for note in samples.report.notes if "unused" in note]
    assert [unused in note for note in notes] == ([True] if unused else [])


@pytest.mark.parametrize(
    "row",
    [
        FORMS["messages"] | {"system": "Be brief."},
        FORMS["conversations"],
        FORMS["lists"],
        {"prompt": "[1, 2] + [3]", "completion": '[{"a": 1}]'},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 0]},
        {"input_ids": [5, 6, 7]},
    ],
)
def test_cells_of_csv_hold_lists_as_json(row, load, tmp_path, tokenizer):
    expected = load([row])
    write_csv(tmp_path / "rows.csv", [row])
    samples = load((tmp_path / "rows.csv").read_text(), name="rows.csv")
    assert samples.digest == expected.digest
    assert learned(samples, tokenizer) == learned(expected, tokenizer)


@pytest.mark.parametrize("sign", [";", "\t", "|"])
@pytest.mark.parametrize("blocks", [False, True])
def test_tables_with_other_signs_between_cells(sign, blocks, tmp_path):
    (tmp_path / "rows.csv").write_text(f'prompt{sign}completion\nyes, or "no"?{sign}"no{sign} maybe"\n')
    raw = open_source("rows.csv", tmp_path)
    raw = dataclasses.replace(raw, content=None) if blocks else raw
    assert [row for rows in row_blocks(raw) for row in rows.values] == [
        {"prompt": 'yes, or "no"?', "completion": f"no{sign} maybe"}
    ]


@pytest.mark.parametrize("form", ["messages", "conversations", "lists"])
def test_messages_as_a_text(load, tokenizer, form):
    samples = load([as_texts(FORMS[form])])
    assert text_of(samples, tokenizer) == text_of(load([FORMS[form]]), tokenizer)


@pytest.mark.parametrize("answer", ['{"role": "chair", "name": "Ada"}', '[{"from": "Ulm", "to": "Bonn"}]', "[]", "[{"])
def test_answers_in_json_that_are_no_messages_stay_texts(answer, load, tmp_path):
    row = {"prompt": "Who?", "completion": answer}
    write_csv(tmp_path / "rows.csv", [row])
    for samples in (load([row]), load((tmp_path / "rows.csv").read_text(), name="rows.csv")):
        assert samples.digest == load([{"prompt": "Who?", "completion": [ANSWER | {"content": answer}]}]).digest


@pytest.mark.parametrize(
    ("name", "content", "fix"),
    [
        ("x.txt", b"one", "jq -cR '{text: .}' x.txt > rows.jsonl"),
        ("x.xlsx", b"PK", "save the sheet as .csv"),
        ("x.csv", "prompt,completion".encode("utf-16"), "iconv -f utf-16 -t utf-8 x.csv > x-utf8.csv"),
        (
            "x.jsonl",
            b'{"prompt": "a"}'.decode().encode("utf-16-be"),
            "iconv -f utf-16be -t utf-8 x.jsonl > x-utf8.jsonl",
        ),
        ("x.jsonl", '{"prompt": "ä"}'.encode("latin1"), "iconv -f latin1 -t utf-8 x.jsonl > x-utf8.jsonl"),
    ],
)
def test_files_that_are_no_rows_say_how_to_make_them(name, content, fix, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(name, tmp_path)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("table", "code", "says"),
    [
        ("messages\nhello\n", "data.bad-type", "'messages' is a text, not a list of messages as JSON"),
        ('messages\n"[{""role"": "\n', "data.bad-type", "'messages' is a text"),
        ("input_ids\n1 2 3\n", "data.bad-tokens", "its input_ids is '1 2 3', not a number or a JSON list"),
        ("input_ids\n5\n", "data.bad-tokens", "'input_ids' is not a list of whole numbers"),
    ],
)
def test_cells_of_csv_that_hold_no_lists_are_named(table, code, says, load):
    with pytest.raises(DataError) as caught:
        load(table, name="rows.csv")
    assert caught.value.code == code
    assert says in caught.value.why


def test_messages_name_given_rows_not_the_cache_that_holds_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stored = store_rows([{"prompt": "2+2?", "completion": "four"}] * 200 + [{"prompt": "2+2?", "completion": 4}])
    assert str(stored).startswith(str(tmp_path))
    rows = read_rows(str(stored))
    assert rows.source == f"given rows {stored.stem[:8]}"
    written = tmp_path / "mine.jsonl"
    written.write_bytes(stored.read_bytes())
    assert read_rows(str(written)).source == str(written)
