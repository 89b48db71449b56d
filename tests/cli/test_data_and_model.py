"""Every command that reads data rejects samples that the base model does not support."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from cli_helpers import Job, make_job, write_rows_to

import lorafusion_jax as lf

COMMANDS = [("check",), ("plan",), ("train", "--out", "run")]


@pytest.fixture
def own_base(tmp_path, tiny_base) -> Path:
    """A copy of the tiny base, free to be spoilt."""
    return Path(shutil.copytree(tiny_base, tmp_path / "base"))


@pytest.fixture
def own_job(tmp_path, own_base) -> Job:
    return make_job(tmp_path, own_base)


def change_config(base: Path, **changes) -> None:
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def add_token(base: Path, text: str) -> int:
    """Adds a token to the tokenizer without giving the model a row for it; returns its id."""
    path = base / "tokenizer.json"
    values = json.loads(path.read_text())
    rows = json.loads((base / "config.json").read_text())["vocab_size"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    values["added_tokens"].append({"id": rows, "content": text, "special": True} | flags)
    values["model"]["vocab"][text] = rows
    path.write_text(json.dumps(values))
    return rows


def run(lorafusion, job: Job, command, monkeypatch):
    monkeypatch.chdir(job.folder)
    outcome = lorafusion(command[0], job.path, *command[1:])
    assert not (job.folder / "run").exists() or outcome.code == 0
    return outcome


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("part", ["law.jsonl", "law_eval.jsonl"])
def test_tokens_beyond_the_embedding_table_are_refused(lorafusion, own_job, own_base, command, part, monkeypatch):
    token = add_token(own_base, "<new>")
    rows = [{"prompt": "cat", "completion": " dog"}, {"prompt": "cat <new>", "completion": " dog"}]
    write_rows_to(own_job.folder / part, rows)
    outcome = run(lorafusion, own_job, command, monkeypatch)
    assert (outcome.code, outcome.errors) == (2, ["data.token-id"])
    for part_of_message in ("law:", f"{part}, row 1", "'<new>'", str(token), "vocab_size", "resize_token_embeddings"):
        assert part_of_message in outcome.err


def test_a_token_that_the_head_does_not_predict_may_be_in_prompts_only(lorafusion, own_job, make_base, tmp_path):
    shape = {"mlp_gated": False, "mlp_names": ("up_proj", "down_proj"), "qk_norm": True, "tie_embeddings": False}
    base = make_base(tmp_path / "own", family="apertus1p5_text", activation="xielu", output_vocab=3064, **shape)
    for labels, errors in (([-100, 5], []), ([-100, 3064], ["data.token-id"])):
        write_rows_to(own_job.folder / "law.jsonl", [{"input_ids": [3064, abs(labels[1])], "labels": labels}])
        outcome = lorafusion("check", own_job.path, f"base.model={base}")
        assert outcome.errors == errors, outcome.err
    assert "output_vocab_size is 3064" in outcome.err


def test_a_tokenizer_may_be_larger_than_the_table_if_no_row_uses_it(lorafusion, own_job, own_base):
    add_token(own_base, "<new>")
    assert lorafusion("check", own_job.path).code == 0


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("part", ["law.jsonl", "law_eval.jsonl"])
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"max_position_embeddings": 16}, "model.positions"),
    ],
)
def test_samples_beyond_the_positions_are_refused(
    lorafusion, own_job, own_base, command, part, changes, code, monkeypatch
):
    change_config(own_base, **changes)
    own_job.values["adapters"].pop()
    own_job.write()
    short, long = [{"prompt": "a", "completion": " b"}] * 2, {"prompt": "c", "completion": " cat" * 20}
    for name in ("law.jsonl", "law_eval.jsonl"):
        write_rows_to(own_job.folder / name, short + [long] * (name == part))
    outcome = run(lorafusion, own_job, command, monkeypatch)
    assert (outcome.code, outcome.errors) == (2, [code])
    for part_of_message in ("law: row 2", part, "data.max_length: 16"):
        assert part_of_message in outcome.err
    assert lorafusion("check", own_job.path, "data.max_length=16").code == 0


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("changes", [{"rms_norm_eps": "abc"}, {"vocab_size": 10**12}, {"architectures": 5}])
def test_a_broken_config_of_the_model_is_refused(lorafusion, own_job, own_base, command, changes, monkeypatch):
    change_config(own_base, **changes)
    outcome = run(lorafusion, own_job, command, monkeypatch)
    assert (outcome.code, outcome.errors) == (2, ["model.bad-config"])


def test_columns_that_are_not_used_are_named_by_check_and_train(lorafusion, own_job, monkeypatch):
    rows = [{"prompt": "cat", "completion": " dog", "note": "x", "id": 3}] * 4
    for name in ("law.jsonl", "med.jsonl", "law_eval.jsonl"):
        write_rows_to(own_job.folder / name, rows)
    warning = "law.jsonl: [data.unused-column] the columns 'note', 'id' are not used"
    assert lorafusion("check", own_job.path).out.count(warning) == 1
    assert warning in json.loads(lorafusion("check", own_job.path, "--json").out)["warnings"][0]
    outcome = run(lorafusion, own_job, ("train", "--out", "run"), monkeypatch)
    assert outcome.code == 0
    assert warning in outcome.out


@pytest.mark.parametrize("command", [*COMMANDS, ("data", "preview")], ids=lambda command: command[-1])
def test_rows_of_tokens_need_no_tokenizer(lorafusion, own_job, own_base, command, monkeypatch):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (own_base / name).unlink(missing_ok=True)
    for name in ("law.jsonl", "med.jsonl", "law_eval.jsonl"):
        write_rows_to(own_job.folder / name, [{"input_ids": [3, 11, 13], "labels": [-100, 11, 13]}] * 4)
    monkeypatch.chdir(own_job.folder)
    words = (*command, own_job.path) if command[0] == "data" else (command[0], own_job.path, *command[1:])
    outcome = lorafusion(*words)
    assert outcome.code == 0, outcome.err
    if command[0] == "data":
        assert "3 ⟦11 13 ⟧" in outcome.out


def test_texts_need_a_tokenizer(lorafusion, own_job, own_base):
    (own_base / "tokenizer.json").unlink()
    assert lorafusion("check", own_job.path).errors == ["tokenizer.missing"]
    for name in ("law.jsonl", "med.jsonl", "law_eval.jsonl"):
        write_rows_to(own_job.folder / name, [{"input_ids": [3, 11, 13]}] * 4)
    own_job.values["train"] = own_job.values.get("train", {}) | {"samples": ["Two?"]}
    own_job.write()
    assert lorafusion("check", own_job.path).errors == ["tokenizer.missing"]


def test_a_column_that_one_adapter_leaves_unused_is_named_with_that_adapter(own_job, monkeypatch):
    """DPO, alone and in a list, has no use for what `reward` reads; adapters with one note share it."""
    rows = [{"prompt": "cat", "chosen": " dog", "rejected": f" {number}", "margin": 0.5} for number in range(6)]
    write_rows_to(own_job.folder / "shared.jsonl", rows)
    monkeypatch.chdir(own_job.folder)
    values = yaml.safe_load(own_job.path.read_text())
    values["batch"]["capacity_tokens"] = 384
    values["adapters"] = [
        {"name": "first", "data": {"train": "shared.jsonl"}, "objective": {"name": "dpo"}},
        {"name": "graded", "data": {"train": "shared.jsonl"}, "objective": {"name": "reward"}},
        {"name": "second", "data": {"train": [{"path": "shared.jsonl", "weight": 2}]}, "objective": {"name": "dpo"}},
    ]
    notes = [note for note in lf.plan(values).notes if "'margin'" in note]
    assert notes == [
        "first, second: shared.jsonl: [data.unused-column] the column 'margin' is not used; "
        "data.columns can give a column a role"
    ]


@pytest.mark.parametrize(("shared", "said"), [(4, "4 of 4"), (1, "1 of 4"), (0, None)])
@pytest.mark.parametrize("files", [["law.jsonl"], ["more.jsonl", "law.jsonl"]])
def test_held_out_samples_that_are_trained_on_are_noted(lorafusion, own_job, files, shared, said):
    rows = [{"prompt": "cat", "completion": f" dog {number}"} for number in range(9)]
    write_rows_to(own_job.folder / "law.jsonl", rows[:4])
    write_rows_to(own_job.folder / "more.jsonl", rows[8:])
    write_rows_to(own_job.folder / "law_eval.jsonl", [*rows[4 : 8 - shared], *rows[4 - shared : 4]])
    own_job.values["adapters"][0]["data"]["train"] = files
    own_job.write()
    warnings = json.loads(lorafusion("check", own_job.path, "--json").out)["warnings"]
    notes = [warning for warning in warnings if "data.eval-in-train" in warning]
    assert [f"law_eval.jsonl: [data.eval-in-train] {said} held-out" in note for note in notes] == [True] * bool(said)


@pytest.mark.parametrize(
    ("words", "positions", "suggested"),
    [
        ((40, 90), 64, {64: "for as much as the model has positions"}),
        ((90, 90), 200, {192: "to keep all whole"}),
        ((90, 93), 200, {192: "to keep all whole"}),
        ((40, 90), 16, {}),
    ],
)
def test_the_length_that_is_suggested_is_one_that_the_model_takes(
    lorafusion, own_job, own_base, words, positions, suggested
):
    change_config(own_base, max_position_embeddings=positions)
    own_job.values["data"]["max_length"] = 16
    rows = [{"text": "cat " * count} for count in (8, *words)]
    for part in ("law.jsonl", "law_eval.jsonl", "med.jsonl"):
        write_rows_to(own_job.folder / part, rows)
    outcome = lorafusion("check", own_job.write())
    assert outcome.code == 0, outcome.err
    text = outcome.out
    assert "set data.on_long: drop" in text
    pairs = re.findall(r"(?:max_length|,) to (\d+) (.*?)(?=,|$)", text, re.MULTILINE)
    assert {int(length): why for length, why in pairs} == suggested
    for length in suggested:
        assert lorafusion("check", own_job.path, f"data.max_length={length}", "batch.capacity_tokens=256").code == 0


@pytest.mark.parametrize(
    ("command", "positions"), [(("check",), 64), (("data", "preview"), 64), (("data", "preview"), 200)]
)
def test_errors_advise_no_length_beyond_the_positions(lorafusion, own_job, own_base, command, positions):
    change_config(own_base, max_position_embeddings=positions)
    write_rows_to(own_job.folder / "law.jsonl", [{"text": "cat " * 90}])
    outcome = lorafusion(*command, own_job.write(), "data.max_length=16", "data.on_long=error")
    assert outcome.errors[0] == "data.too-long"
    assert ("the model has 64 positions" in outcome.err) is (positions == 64)
    assert ("data.max_length: 200" in outcome.err) is (positions == 200)


def test_prompts_without_a_reward_are_no_rows_of_answers(lorafusion, tmp_path, tiny_base):
    """What is missing is said once; the rows are prompts, and need no advantage."""
    write_rows_to(tmp_path / "prompts.jsonl", [{"prompt": "cat"}, {"prompt": "dog"}])
    adapter = {"name": "law", "objective": "grpo", "rollout": {"prompts": "prompts.jsonl", "reward": []}}
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump({"base": {"model": str(tiny_base)}, "adapters": [adapter]}))
    outcome = lorafusion("check", tmp_path / "jobs.yaml")
    assert outcome.code == 2
    assert re.findall(r"error\[(.*?)\]", outcome.err) == ["config.rollout"]


def test_rows_of_something_else_are_told_what_an_objective_reads_and_the_fix_helps(lorafusion, tmp_path, tiny_base):
    write_rows_to(tmp_path / "sums.jsonl", [{"prompt": f"cat {n}", "answer": "dog"} for n in range(20)])
    adapter = {"name": "law", "objective": "grpo", "data": {"train": "sums.jsonl"}}
    job = {"base": {"model": str(tiny_base)}, "data": {"max_length": 256}, "batch": {"capacity_tokens": 8192}}
    path = tmp_path / "jobs.yaml"

    def check(**changes):
        path.write_text(yaml.safe_dump({**job, "adapters": [adapter | changes]}))
        return lorafusion("check", path)

    fix = check().err.partition("fix: ")[2]
    section = re.match(r"rollout: (\{.*?\}) instead of data\.train", fix)
    assert section, fix
    assert check(data={}, rollout=yaml.safe_load(section[1])).code == 0
    assert "advantage" in fix.partition("; or rows with columns that grpo reads (")[2]
    labels = check(objective="kto").err.partition("fix: ")[2]
    assert labels.startswith("rows with columns that kto reads (prompt, completion, label, chosen")
