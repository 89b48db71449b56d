"""What `lorafusion check` and `data preview` say of preferences: cuts, rows left out, dropout, where answers begin."""

from __future__ import annotations

import json

import pytest
import small_jobs

from lorafusion_jax.cli.main import run

LONG = "one two " * 60
PAIR = {"prompt": "one two", "chosen": " three four five six seven eight", "rejected": " ten"}


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_base):
    folder = tmp_path_factory.mktemp("preferences")
    pairs = [PAIR | {"chosen": f"{PAIR['chosen']} {number}"} for number in range(401)]
    questions = [row | {"prompt": f"one {number}"} for number, row in enumerate(pairs)]
    pairs[4] = {"prompt": LONG, "chosen": " a", "rejected": " b"}
    labelled = [{"prompt": f"one {number}", "completion": " two", "label": number % 2} for number in range(7)]
    for name, rows in {"pairs": pairs, "questions": questions, "labelled": labelled}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entries = [
        {"name": "dpo", "data": {"train": "pairs.jsonl"}, "objective": {"name": "dpo"}, "lora": {"dropout": 0.1}},
        {"name": "kto", "data": {"train": "labelled.jsonl"}, "objective": {"name": "kto", "group": 3}},
        {"name": "halves", "data": {"train": "questions.jsonl"}, "objective": {"name": "kto", "group": 4}},
        {"name": "judge", "data": {"train": "pairs.jsonl", "max_length": 60}, "objective": {"name": "reward"}},
    ]
    sections = {"data": {"max_length": 14}, "batch": {"capacity_tokens": 512, "tile_tokens": 16}}
    return str(small_jobs.write_job(folder, tiny_base, entries, **sections))


def test_check_says_what_is_cut_left_out_and_what_dropout_means(job, capsys):
    assert run(["check", job]) == 0
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "dpo: lora.dropout=0.1, but objective dpo compares with a reference without dropout" in shown
    assert "dpo: 400 of 401 rows (99.8 %) are cut at 14 tokens" in shown
    assert "dpo: 1 of 401 rows (0.2 %) have no token to learn from and are left out: row 4" in shown
    assert "judge: 1 of 401 rows (0.2 %) exceed 60 tokens and are left out: row 4" in shown  # a cut text ends elsewhere
    assert "left out at the end, no whole group of 3: row 6" in shown
    assert "left out at the end, no whole group of 4: rows 399, 400" in shown  # 802 answers


def test_more_rows_without_room_than_a_few_are_an_error(job, capsys):
    assert run(["check", job, "data.max_length=5"]) == 2
    assert "cuts the answer" in " ".join(capsys.readouterr().err.split())


def test_preview_shows_where_each_answer_begins(job, capsys):
    assert run(["data", "preview", job, "--adapter", "dpo", "--rows", "1", "data.max_length=64"]) == 0
    shown = capsys.readouterr().out
    chosen, rejected = shown.split("segment 2 of 2")
    assert "⟦ three four five six seven eight 0<|end|>" in chosen.replace("\n", "")
    assert "⟦ ten<|end|>" in rejected
