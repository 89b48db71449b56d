"""`adapters: {from: …}`: an adapter of each file that a pattern matches."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

import lorafusion_jax as lf
from lorafusion_jax.config import load_config
from lorafusion_jax.errors import ConfigError, LoraFusionError


@pytest.fixture
def job(tmp_path):
    """job(adapters): a job file with these adapters, beside data of three shops and an evaluation of each."""
    for name in ("data/north.jsonl", "data/south.v2.jsonl.gz", "data/deep/east.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")

    def write(adapters):
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump({"base": {"model": "base"}, "lora": {"rank": 2}, "adapters": adapters}))
        return file

    return write


def test_each_file_is_an_adapter_of_its_name(job):
    shared = {"epochs": 3, "lora": {"alpha": 1}, "data": {"eval": "evals/{stem}.csv", "max_length": 64}}
    adapters = load_config(job({"from": ["data/*", "data/**/*.csv"], **shared})).adapters
    assert [adapter.name for adapter in adapters] == ["north", "south.v2", "east"]
    assert [adapter.data.train[0].path for adapter in adapters] == [
        "data/north.jsonl", "data/south.v2.jsonl.gz", "data/deep/east.csv",
    ]  # fmt: skip
    assert {
        (adapter.epochs, adapter.lora.rank, adapter.lora.alpha, adapter.data.max_length) for adapter in adapters
    } == {(3, 2, 1, 64)}
    assert adapters[1].data.eval[0].path == "evals/south.v2.csv"


def test_names_and_lists_of_settings_are_those_of_every_file(job):
    file = job({"from": "data/*.jsonl*", "name": "shop-{stem}", "optim": {"lr": [1e-4, 2e-4]}})
    names = ["shop-north-lr1e-4", "shop-north-lr2e-4", "shop-south.v2-lr1e-4", "shop-south.v2-lr2e-4"]
    assert [adapter.name for adapter in load_config(file).adapters] == names
    (north, *_) = load_config(file, ["adapters.shop-north.lora.rank=8"]).adapters
    assert north.lora.rank == 8


def test_a_job_of_a_notebook_may_say_so_too(job, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    job([])
    loaded = lf.load_job({"base": {"model": "base"}, "adapters": {"from": "data/*.jsonl*"}})
    assert [adapter.name for adapter in loaded.config.adapters] == ["north", "south.v2"]


@pytest.mark.parametrize(
    ("adapters", "code"),
    [
        ({"from": "data/*.parquet"}, "config.no-files"),
        ({"from": ["data/*", "other/*"]}, "config.no-files"),
        ({"from": []}, "config.type"),
        ({"data": {"train": "data/north.jsonl"}}, "config.type"),
        ({"from": "data/*", "data": {"train": "data/north.jsonl"}}, "config.type"),
        ({"from": "data/*", "ranks": 4}, "config.unknown-key"),
        ({"from": ["data/*", "data/**/*"], "name": "shop"}, "config.duplicate-name"),
    ],
    ids=json.dumps,
)
def test_what_does_not_make_adapters_is_an_error(job, adapters, code):
    with pytest.raises(LoraFusionError) as raised:
        load_config(job(adapters))
    problems = getattr(raised.value, "errors", [raised.value])
    assert {problem.code for problem in problems} == {code}
    assert all(isinstance(problem, ConfigError) and problem.where for problem in problems)


def test_two_files_of_one_name_are_told_with_both(job, tmp_path):
    (tmp_path / "data" / "North.csv").write_text("")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "south.v2.csv").write_text("")
    for adapters, message, fix in (
        ({"from": "data/*"}, "'north': those of data/North.csv and data/north.jsonl", "rename one of the files"),
        (
            {"from": ["data/*.gz", "more/*"], "name": "x-{stem}"},
            "data/south.v2.jsonl.gz and more/south.v2.csv",
            "rename",
        ),
        ({"from": "data/*.*", "name": "shop"}, "'shop': those of", "name: shop-{stem}"),
    ):
        with pytest.raises(ConfigError, match=r"config\.duplicate-name") as raised:
            load_config(job(adapters))
        assert message in raised.value.what
        assert fix in raised.value.fix
    assert load_config(job({"from": "data/*.*l*", "name": "shop-{stem}"})).adapters[0].name == "shop-north"


@pytest.mark.parametrize("folder", ["data", "data/"])
def test_a_folder_is_answered_with_the_pattern_of_its_files(job, folder):
    with pytest.raises(ConfigError, match=r"config\.no-files") as raised:
        load_config(job({"from": folder}))
    assert raised.value.fix.startswith("adapters: {from: data/*}")
    assert len(load_config(job({"from": "data/*"})).adapters) == 2  # as the fix says


@pytest.fixture
def rows(tmp_path, job):
    """rows(values): a file with a row for each value of the column `customer`."""

    def write(*values, name="all.jsonl"):
        lines = [json.dumps({"text": f"text {number}", "customer": value}) for number, value in enumerate(values)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return name

    return write


def test_each_value_of_a_column_is_an_adapter(job, rows):
    file = rows("Acme & Co.", 7, "north", 7, True)
    shared = {"epochs": 2, "data": {"eval": "evals/{stem}.csv", "where": {"lang": "{stem}"}}}
    adapters = load_config(job({"from": file, "split_by": "customer", **shared})).adapters
    assert [adapter.name for adapter in adapters] == ["Acme-Co", "7", "north", "true"]
    assert [adapter.data.where["customer"] for adapter in adapters] == ["Acme & Co.", "7", "north", "true"]
    assert {(adapter.epochs, adapter.data.train[0].path, adapter.data.where["lang"]) for adapter in adapters} == {
        (2, file, "{stem}")
    }
    assert adapters[0].data.eval[0].path == "evals/Acme-Co.csv"


def test_a_value_has_the_files_with_its_rows(job, rows):
    rows("a", "b", name="first.jsonl")
    rows("b", name="second.jsonl")
    a, b = load_config(job({"from": ["first.jsonl", "second.jsonl"], "split_by": "customer"})).adapters
    assert [source.path for source in a.data.train] == ["first.jsonl"]
    assert [source.path for source in b.data.train] == ["first.jsonl", "second.jsonl"]


@pytest.mark.parametrize("name", ["shops.csv", "shops.parquet", "shops.json", "shops.jsonl.gz"])
def test_tables_are_split_too(job, tmp_path, name):
    values = [{"text": "a", "shop": "x"}, {"text": "b", "shop": "y"}]
    if name.endswith(".csv"):
        (tmp_path / name).write_text("text;shop\na;x\nb;y\n")
    elif name.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist(values), tmp_path / name)
    elif name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress("\n".join(map(json.dumps, values)).encode()))
    else:
        (tmp_path / name).write_text(json.dumps(values))
    adapters = load_config(job({"from": name, "split_by": "shop"})).adapters
    assert [(adapter.name, adapter.data.where) for adapter in adapters] == [("x", {"shop": "x"}), ("y", {"shop": "y"})]


@pytest.mark.parametrize(
    ("values", "more", "code", "text"),
    [
        (("a", None, "b", ""), {}, "config.split-by", "all.jsonl, lines 2, 4"),
        (("a", 1.5), {}, "config.split-by", "all.jsonl, line 2"),
        (("Acme Co", "acme_co", "acme-CO"), {}, "config.duplicate-name", "'Acme Co' and 'acme-CO'"),
        (("日本",), {}, "config.name", "日本"),
        (("a",), {"data": {"where": {"customer": "a"}}}, "config.type", "data.where"),
        (("a",), {"split_by": ["customer"]}, "config.type", "split_by"),
        (("a",), {"split_by": "client"}, "config.split-by", "customer, text"),
    ],
)
def test_what_cannot_be_split_is_an_error_with_its_rows(job, rows, values, more, code, text):
    with pytest.raises(ConfigError) as raised:
        load_config(job({"from": rows(*values), "split_by": "customer"} | more))
    assert raised.value.code == code
    assert text in str(raised.value)
