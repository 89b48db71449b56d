"""`lorafusion new`: the job file that it writes passes `check`, for rows of many forms."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml
from cli_helpers import make_rows, write_rows_to

from lorafusion_jax.cli import new

CHATS = [
    {"messages": [{"role": "user", "content": f"a {n}"}, {"role": "assistant", "content": "b"}]} for n in range(24)
]
PAIRS = [{"prompt": f"a {n}", "chosen": "b c", "rejected": "d"} for n in range(24)]
QUESTIONS = [{"question": f"a {n}", "answer": "b"} for n in range(24)]
ALPACA = [{"instruction": f"a {n}", "output": "b"} for n in range(24)]
SAME = [{"prompt": "a", "completion": "b"}] * 24


@pytest.fixture
def plain_base(tmp_path, tiny_base) -> None:
    """A base without a chat template."""
    shutil.copytree(tiny_base, tmp_path / "plain")
    file = tmp_path / "plain" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))


@pytest.mark.usefixtures("plain_base")
@pytest.mark.parametrize(
    ("rows", "goal", "expected"),
    [
        pytest.param(make_rows(24, 0), "answers", {"eval": 0.1}, id="prompt"),
        pytest.param(
            QUESTIONS,
            "answers",
            {"columns": {"prompt": "question", "completion": "answer"}, "chat_template": "alpaca"},
            id="columns",
        ),
        pytest.param(CHATS, "compare", {"chat_template": "alpaca"}, id="no template"),
        pytest.param(ALPACA, "answers", {"chat_template": "alpaca"}, id="alpaca"),
        pytest.param(PAIRS, "preferences", {"eval": 0.1, "chat_template": "alpaca"}, id="pairs"),
        pytest.param(SAME, "answers", {}, id="equal rows"),
    ],
)
def test_the_job_fits_the_rows(lorafusion, tmp_path, monkeypatch, rows, goal, expected):
    monkeypatch.chdir(tmp_path)
    write_rows_to(tmp_path / "my rows.jsonl", rows)
    outcome = lorafusion("new", "--base", "plain", "--data", "my rows.jsonl", "--goal", goal, "-o", "jobs/mine.yaml")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1] == "next: lorafusion plan jobs/mine.yaml"
    job = yaml.safe_load((tmp_path / "jobs" / "mine.yaml").read_text())
    (adapter,) = job["adapters"]
    assert adapter["name"] == "my-rows"
    assert adapter["data"].items() >= {"train": "../my rows.jsonl", **expected}.items()
    assert ("eval" in adapter["data"]) == (rows is not SAME)
    checked = lorafusion("check", "jobs/mine.yaml", "--json")
    assert "no-template" not in checked.out
    names = json.loads(checked.out)["adapters"]
    assert len(names) == (4 if goal == "compare" else 1)
    assert job["data"]["max_length"] >= max(report["longest"] for report in names.values())


def test_files_of_a_glob_are_adapters(lorafusion, tmp_path, monkeypatch, tiny_base):
    monkeypatch.chdir(tmp_path)
    for name in ("law", "med"):
        write_rows_to(tmp_path / f"{name}.jsonl", make_rows(24, 0))
    assert lorafusion("new", "--base", tiny_base, "--data", "law.jsonl", "med.jsonl").code == 0
    assert [adapter["name"] for adapter in yaml.safe_load((tmp_path / "jobs.yaml").read_text())["adapters"]] == [
        "law",
        "med",
    ]


def test_it_asks_until_it_is_answered(lorafusion, tmp_path, monkeypatch, tiny_base):
    monkeypatch.chdir(tmp_path)
    write_rows_to(tmp_path / "rows.jsonl", make_rows(24, 0))
    answers = ["no-model", str(tiny_base), "row.jsonl", "rows.jsonl", "answer", "compare"]
    monkeypatch.setattr(new.typer, "prompt", lambda question, default=None: answers.pop(0))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    outcome = lorafusion("new")
    assert (outcome.code, answers) == (0, [])
    assert "rows.jsonl'?" in outcome.err
    assert "rows-rank32-lr3e-4" in outcome.out


def test_it_writes_over_nothing_and_asks_only_at_a_terminal(lorafusion, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "--base and --data are needed" in lorafusion("new").err
    (tmp_path / "jobs.yaml").touch()
    assert "error[new.exists] jobs.yaml" in lorafusion("new", "--base", "b", "--data", "d").err
    outcome = lorafusion("new", "--base", "b", "--data", "d", "-o", "x.yaml")
    assert "model.missing" in outcome.err
    assert "fix: --base: a folder" in outcome.err
    assert not (tmp_path / "x.yaml").exists()


def test_the_members_of_a_sweep_share_a_warning(lorafusion, tmp_path, monkeypatch, tiny_base):
    monkeypatch.chdir(tmp_path)
    write_rows_to(tmp_path / "rows.jsonl", [*make_rows(24, 0), {"prompt": "a " * 90, "completion": "b"}])
    assert lorafusion("new", "--base", tiny_base, "--data", "rows.jsonl", "--goal", "compare").code == 0
    job = ("data.max_length=64", "data.on_long=drop")
    warnings = json.loads(lorafusion("check", "jobs.yaml", *job, "--json").out)["warnings"]
    (warning,) = [text for text in warnings if "exceed 64 tokens" in text]
    assert warning.startswith("rows-rank8-lr1e-4, rows-rank8-lr3e-4, rows-rank32-lr1e-4, rows-rank32-lr3e-4: 1 of ")
