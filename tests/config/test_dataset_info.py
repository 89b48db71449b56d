"""Names of data sets in a file of LLaMA-Factory are looked up in its `dataset_info.json`."""

import json

import pytest
import yaml

from lorafusion_jax.config.convert import convert
from lorafusion_jax.config.data_sources import as_written
from lorafusion_jax.config.dataset_info import ROLE_TAGS
from lorafusion_jax.config.load import load_config
from lorafusion_jax.data.formats import detect_layout
from lorafusion_jax.data.messages import CALLING_ROLES, ROLES
from lorafusion_jax.data.rows import Rows
from lorafusion_jax.errors import ConfigError, ErrorList

OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
INFO = {
    "ask": {"file_name": "ask.jsonl", "columns": {"prompt": "question", "response": "answer"}},
    "more": {"file_name": "more.json", "columns": {"prompt": "question", "response": "answer"}, "num_samples": 20},
    "alpaca": {"file_name": "alpaca.json"},
    "history": {"file_name": "h.json", "columns": {
        "prompt": "q", "query": "about", "response": "a", "history": "turns", "system": "sys"}},
    "chat": {"file_name": "chat", "formatting": "sharegpt"},
    "openai": {"file_name": "chat.jsonl", "formatting": "sharegpt", "columns": {"messages": "dialog", "tools": "calls"},
               "tags": OPENAI},
    "pairs": {"file_name": "p.json", "ranking": True, "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}},
    "chat-pairs": {"file_name": "c.json", "ranking": True, "formatting": "sharegpt", "columns": {
        "messages": "conversations", "chosen": "good", "rejected": "bad"}},
    "labelled": {"file_name": "k.json", "formatting": "sharegpt", "columns": {"messages": "dialog", "kto_tag": "good"}},
    "text": {"file_name": "t.jsonl", "columns": {"prompt": "body"}},
    "hub": {"hf_hub_url": "org/set", "ms_hub_url": "org/other", "split": "train[:500]"},
    "pictures": {"file_name": "i.json", "formatting": "sharegpt", "columns": {"messages": "m", "images": "images"}},
    "speakers": {"file_name": "s.json", "formatting": "sharegpt", "tags": {"role_tag": "speaker"}},
    "turned": {"file_name": "s.json", "formatting": "sharegpt", "tags": {"user_tag": "gpt"}},
    "modelscope": {"ms_hub_url": "org/set"},
    "subset": {"hf_hub_url": "org/set", "subset": "en"},
    "part": {"file_name": "ask.jsonl", "split": "train[:10]"},
    "joined": {"file_name": "p.json", "ranking": True, "columns": {
        "prompt": "q", "query": "about", "chosen": "good", "rejected": "bad"}},
    "broken": {"file_name": "b.json", "columns": ["question"]},
    "other": {"file_name": "o.json", "formatting": "vicuna"},
    "nameless": {"formatting": "alpaca"},
}  # fmt: skip


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    return tmp_path / "data"


def converted(text, where="lf.yaml"):
    return convert(yaml.safe_load(f"model_name_or_path: m\nfinetuning_type: lora\n{text}"), "lf", where)


@pytest.mark.parametrize(
    ("names", "train", "format", "columns"),
    [
        ("ask", "data/ask.jsonl", "prompt", {"prompt": "question", "completion": "answer"}),
        ("ask, more", ["data/ask.jsonl", "data/more.json"], "prompt", {"prompt": "question", "completion": "answer"}),
        ("alpaca", "data/alpaca.json", "instruction", {}),
        ("history", "data/h.json", "instruction", {
            "instruction": "q", "input": "about", "output": "a", "history": "turns", "system": "sys"}),
        ("chat", "data/chat", "conversations", {}),
        ("openai", "data/chat.jsonl", "conversations", {"conversations": "dialog", "tools": "calls"}),
        ("alpaca,chat,rows.jsonl", ["data/alpaca.json", "data/chat", "rows.jsonl"], "auto", {}),
        ("text", "data/t.jsonl", "text", {"text": "body"}),
        ("hub", "hf:org/set:train[:500]", "instruction", {}),
    ],
)  # fmt: skip
def test_a_name_is_the_file_and_the_columns_of_its_entry(data, names, train, format, columns):
    result = converted(f"stage: sft\ndataset: {names}")
    path = data.parent / "jobs.yaml"
    path.write_text(result.text("Converted."))
    settings = load_config(path).adapters[0].data
    assert (as_written(settings.train), settings.format, settings.columns) == (train, format, columns)
    assert "dataset_dir" not in dict(result.notes)
    assert ("num_samples" in dict(result.notes)["dataset"]) == ("more" in names)
    assert ("line end" in dict(result.notes)["dataset"]) == (format == "instruction" or "alpaca" in names)


def test_the_columns_are_those_that_the_rows_are_read_by():
    row = {"question": "2 + 2?", "answer": "4", "input": "not LLaMA-Factory's"}
    job = {"prompt": "question", "completion": "answer"}
    layout = detect_layout(Rows(source="ask.jsonl", values=[row]), format="prompt", columns=job)
    assert (layout.columns, layout.unused) == (job, ("input",))


@pytest.mark.parametrize(
    ("stage", "name", "columns"),
    [
        ("dpo", "pairs", {"prompt": "q", "chosen": "good", "rejected": "bad"}),
        ("rm", "chat-pairs", {"chosen": "good", "rejected": "bad"}),  # `conversations` stands in for `prompt`
        ("kto", "labelled", {"prompt": "dialog", "label": "good"}),
    ],
)
def test_preferences_have_the_roles_of_their_objective(data, stage, name, columns):
    job = converted(f"stage: {stage}\ndataset: {name}").job
    assert job["data"]["columns"] == columns
    assert "format" not in job["data"]


def test_held_out_sets_and_another_folder_are_looked_up_too(data, tmp_path):
    (tmp_path / "far").mkdir()
    data.rename(tmp_path / "far/sets")
    file = "stage: sft\ndataset: ask\neval_dataset: more\n"
    result = converted(file + "dataset_dir: sets", "far/lf.yaml")
    assert result.job["adapters"][0]["data"] == {"train": "far/sets/ask.jsonl", "eval": "far/sets/more.json"}
    assert converted(file, "far/sets/lf.yaml").job["adapters"][0]["data"]["train"] == "far/sets/ask.jsonl"
    assert "write the file" in dict(converted(file + "dataset_dir: nowhere").notes)["dataset"]


@pytest.mark.parametrize(
    ("stage", "names", "says"),
    [
        ("sft", "aks", "has no data set 'aks'.*did you mean 'ask'"),
        ("sft", "pictures", "'pictures' has the column images"),
        ("sft", "speakers", "has the role_tag 'speaker'.*rename it in its messages: from or role"),
        ("sft", "turned", "has the user_tag 'gpt'.*human or user"),
        ("sft", "modelscope", "comes from ms_hub_url.*file_name"),
        ("sft", "subset", "names a subset of org/set"),
        ("sft", "part", r"takes the split train\[:10\] of a file"),
        ("sft", "pairs", r"holds pairs.*stage: dpo"),
        ("dpo", "ask", "holds no pairs"),
        ("kto", "ask", "names no column kto_tag"),
        ("dpo", "joined", "has the column query.*join 'about' with the prompt"),
        ("sft", "broken", "is no table with texts"),
        ("sft", "other", "has the formatting 'vicuna'"),
        ("sft", "nameless", "names no file"),
        ("sft", "ask,alpaca", "'alpaca' has other columns than 'ask'"),
    ],
)
def test_what_our_settings_cannot_say_is_refused(data, stage, names, says):
    with pytest.raises(ConfigError, match=rf"(?s)config\.not-convertible.*{says}") as caught:
        converted(f"stage: {stage}\ndataset: {names}")
    assert "fix: " in str(caught.value)


def test_every_set_that_is_refused_is_named_at_once(data):
    with pytest.raises(ErrorList) as caught:
        converted("stage: sft\ndataset: pictures,ask,aks\neval_dataset: other")
    assert [name in str(caught.value) for name in ("'pictures'", "'ask' ", "'aks'", "'other'")] == [
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("text", ["{", "[]", '{"ask": 3}', '{"ask": {"columns": {"prompt": 1}}}'])
def test_a_description_that_is_none_is_refused(data, text):
    (data / "dataset_info.json").write_text(text)
    with pytest.raises(ConfigError, match=r"dataset_info\.json cannot be read|is no table"):
        converted("stage: sft\ndataset: ask")


def test_tags_are_the_roles_that_messages_are_read_with():
    roles = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool"}
    for tag, role in roles.items():
        names = {name for name, other in ROLES.items() if other == role and name not in CALLING_ROLES}
        assert {*ROLE_TAGS[tag]} == names
    assert {*CALLING_ROLES} < {*ROLE_TAGS["function_tag"]}
