"""Sources of rows from another package, and rows from Python: beside files, for every kind of rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import small_jobs

import lorafusion_jax as lf
from lorafusion_jax.cli.main import run
from lorafusion_jax.config import load_config
from lorafusion_jax.config.data_sources import read_sources
from lorafusion_jax.data import row_blocks, sources
from lorafusion_jax.serve.cli.jobs import job_of
from lorafusion_jax.training import train

pytestmark = pytest.mark.usefixtures("kept_programs")

SOURCE = """
import itertools
from pathlib import Path

import numpy as np

from lorafusion_jax.extend import Source


def counted(argument):
    first, last = map(int, argument.split("-"))
    if last > 90:
        raise LookupError("numbers end at 90")
    for number in range(first, last):
        yield {"prompt": f"after {number} comes", "completion": f" {number + 1}", "note": None}


def ranked(argument):
    return [{"prompt": f"{word}?", "chosen": f" {word}!", "rejected": " no"} for word in argument.split()]


def ids(argument):
    return tuple({"input_ids": np.arange(3, 9) + shift} for shift in range(int(argument)))


def odd(argument):
    yield {"text": "a row"}
    yield {"set": {"text": {1, 2}}, "list": ["text"], "half": {"\\ud800": 1}, "key": {1: "text"}}[argument]


calls = itertools.count()
COUNTED, RANKED, IDS, ODD = Source(rows=counted), Source(rows=ranked), Source(rows=ids), Source(rows=odd)
FILE = Source(rows=lambda argument: ({"text": line} for line in Path(argument).read_text().splitlines()))
RESTLESS = Source(rows=lambda argument: [{"text": f"{next(calls)} rows"}] * 9)
NOT_ONE = len
"""
POINTS = {name.lower(): name for name in ("COUNTED", "RANKED", "IDS", "ODD", "FILE", "RESTLESS", "NOT_ONE")}


QUICK = {"batch": {"global_samples": 1}, "optim": {"lr": 0.01}, "lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}}


@pytest.fixture
def job(install, tmp_path, tiny_base, monkeypatch):
    """job(adapters: {name: settings}, **sections) → job file, with the sources installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    install("toy_sources", SOURCE, {"lorafusion_jax.sources": POINTS})

    def make(adapters: dict[str, dict], **sections) -> Path:
        entries = [{"name": name, **settings} for name, settings in adapters.items()]
        return small_jobs.write_job(tmp_path, tiny_base, entries, **QUICK | sections)

    return make


def test_rows_of_sources_and_files_are_counted_and_weighted(job, tmp_path, capsys):
    mixed = ["counted:0-4", {"source": "counted", "argument": "10-15", "weight": 2}, "rows.jsonl"]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": " b"}\n' * 3, encoding="utf-8")
    path = job({"mixed": {"data": {"train": mixed, "eval": "counted:80-82"}}})
    assert run(["check", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["adapters"]["mixed"]["rows"] == 12
    planned = lf.plan(path)
    assert planned.numbers["adapters"]["mixed"]["steps"] == 4 + 2 * 5 + 3


def test_sources_give_every_kind_of_rows(job):
    path = job(
        {
            "pairs": {
                "data": {"train": "ranked:yes always often", "eval": "ranked:never"},
                "objective": {"name": "dpo"},
            },
            "tokens": {"data": {"train": ["ids:4", "ids:2"], "eval": 0.5}},
        }
    )
    planned = lf.plan(path).numbers["adapters"]
    assert [planned[name]["steps"] for name in ("pairs", "tokens")] == [3, 3]


def test_a_run_resumes_with_the_same_rows_only(job, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("one line\nand another\na third one\n", encoding="utf-8")
    path = job({"lines": {"data": {"train": [f"file:{tmp_path / 'lines.txt'}", "ids:2"]}}}, save={"every_steps": 1})

    def power_cut(event) -> None:
        if event.kind == "step" and event.adapter == "lines" and event.step == 2:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(load_config(path), tmp_path / "run", listeners=[power_cut])
    text = (tmp_path / "lines.txt").read_text(encoding="utf-8")
    (tmp_path / "lines.txt").write_text(text.replace("third", "fourth"), encoding="utf-8")
    assert run(["resume", str(tmp_path / "run")]) != 0
    error = capsys.readouterr().err
    assert "lines" in error
    assert "error[run.data-changed]" in error
    (tmp_path / "lines.txt").write_text(text, encoding="utf-8")
    assert run(["resume", str(tmp_path / "run")]) == 0
    assert lf.open_run(tmp_path / "run").adapters["lines"]["status"] == "done"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("counted:88-95", "counted:88-95, row 0: toy_sources:COUNTED"),
        ("counted:88", "ValueError"),
        ("odd:set", "odd:set, row 1"),
        ("odd:list", "it is a list"),
        ("odd:half", "half a character"),
        ("odd:key", "the key 1 is not a text"),
        ("ids:0", "ids:0 holds no rows"),
        ("not_one:5", "is not of type Source"),
        ("count:0-4", "install the package with the source count; installed are counted, file"),
        ({"source": "count"}, "did you mean 'counted'"),
        ({"source": "counted", "argument": 4}, "a text as the argument"),
        (["counted:0-4", {"source": "counted", "argument": "0-4"}], "twice"),
    ],
)
def test_errors_name_source_and_row(job, capsys, data, said):
    assert run(["check", str(job({"wrong": {"data": {"train": data}}}))]) != 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_large_sources_are_read_again_and_have_to_be_the_same(job, monkeypatch):
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 100)
    path = job({"long": {"data": {"train": "counted:0-40"}}})
    assert lf.plan(path).numbers["adapters"]["long"]["steps"] == 40
    with pytest.raises(lf.LoraFusionError, match="other rows when it was read again"):
        lf.plan(job({"long": {"data": {"train": "restless:"}}}))


def test_nulls_of_a_row_stay_as_in_a_file(job, tmp_path):
    (row,) = sources.read_rows("counted:4-5", tmp_path).values
    assert row == {"prompt": "after 4 comes", "completion": " 5", "note": None}


def test_a_job_of_a_service_uploads_the_rows_of_a_source(job, tmp_path):
    data = {"train": "counted:0-4", "eval": "ranked:never"}
    config = lf.load_job(job({"a": {"data": data, "objective": {"name": "dpo"}}})).config
    sent = job_of(config, config.adapters[0], None)["data"]
    assert {key: sources.read_rows(sent[key]).values for key in data} == {
        key: sources.read_rows(data[key]).values for key in data
    }
    config = lf.load_job(job({"a": {"data": {"train": "rows.jsonl", "eval": 0.5}}})).config
    with pytest.raises(lf.LoraFusionError, match=r"data\.eval: a share"):
        job_of(config, config.adapters[0], None)


def test_rows_from_python_are_sources_beside_others(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{word}:", "completion": f" {word}"} for word in ("to", "be", "or")]
    tokens = ({"input_ids": np.arange(3, 7) + shift} for shift in range(5))
    values = json.loads(job({"list": {}}).read_text())
    values["data"]["eval"] = lambda: iter(rows)
    values["adapters"] = [
        {"name": "list", "data": {"train": rows}},
        {"name": "tokens", "data": {"train": tokens, "eval": None}},
        {"name": "mixed", "data": {"train": ["counted:0-4", {"rows": tuple(rows), "weight": 3}]}},
    ]
    loaded = lf.load_job(values)
    planned = lf.plan(loaded).numbers["adapters"]
    assert [planned[name]["steps"] for name in ("list", "tokens", "mixed")] == [3, 5, 4 + 9]
    first, again = (loaded.config.adapters[number].data.train[-1].path for number in (0, 2))
    assert first == again
    Path(first).unlink()
    with pytest.raises(lf.LoraFusionError, match="from Python again with the same rows"):
        lf.plan(loaded)


@pytest.mark.parametrize(
    ("rows", "said"),
    [([], "files"), (iter(()), "no rows"), ([{"text": {1}}], "row 0"), (lambda: ["a"], "it is a text")],
)
def test_rows_that_are_none(rows, said):
    with pytest.raises(lf.LoraFusionError, match=said):
        lf.load_job({"base": {"model": "m"}, "adapters": [{"name": "a", "data": {"train": rows}}]})


def test_an_argument_may_hold_colons_and_an_own_table_has_a_weight(install):
    install("toy_sources", SOURCE, {"lorafusion_jax.sources": POINTS})
    table = {"source": "ranked", "argument": "a:b", "weight": 0.5}
    (source,) = read_sources(table)
    assert (source.path, source.weight) == ("ranked:a:b", 0.5)
