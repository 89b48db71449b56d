"""Files that are pipes, devices, folders, gigabytes of zeros, or hold what no reader expects: an error, and at once.

Each is tried by a command in this process. What is not read within its limits would wait or fill the memory.
"""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta

import pyarrow as pa
import pytest
import small_jobs
from pyarrow import parquet
from strange_files import STRANGE

from lorafusion_jax.cli.main import run

LONGEST_MESSAGE = 6000  # characters of all that a command says


@pytest.fixture
def home(tmp_path, tiny_base):
    """A job with its data and base in one folder, and a PEFT folder that is none yet."""
    shutil.copytree(tiny_base, tmp_path / "base")
    small_jobs.write_rows(tmp_path, "law", 4)
    small_jobs.write_job(tmp_path, tmp_path / "base", [{"name": "law", "data": {"train": "law.jsonl"}}])
    return tmp_path


def refused(home, capfd, *arguments):
    """Runs a command, which ends with an error, and returns what it says."""
    code = run([*arguments]) if arguments else run(["check", str(home / "jobs.yaml")])
    output = capfd.readouterr()
    text = output.out + output.err
    assert code == 2, text
    assert "error[" in text
    assert "Traceback" not in text
    assert len(text[text.index("error[") :]) < LONGEST_MESSAGE  # libraries may write before
    return text


FILES = ("jobs.yaml", "law.jsonl", "base/config.json", "base/model.safetensors", "base/tokenizer.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", STRANGE)
def test_a_file_that_is_none_is_refused_at_once(what, name, home, capfd):
    (home / name).unlink()
    STRANGE[what](home / name)
    text = refused(home, capfd)
    assert name.rpartition("/")[2] in text or "model" in text


@pytest.mark.parametrize("what", STRANGE)
def test_a_plan_that_is_none(what, home, capfd):
    STRANGE[what](home / "plan.json")
    refused(home, capfd, "train", str(home / "jobs.yaml"), "--plan", str(home / "plan.json"), "--out", str(home / "r"))
    assert not (home / "r").exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("what", STRANGE)
def test_a_warm_start_that_is_none(what, name, home, capfd):
    (home / "peft").mkdir()
    good = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
    (home / "peft" / "adapter_config.json").write_text(json.dumps(good))
    (home / "peft" / name).unlink(missing_ok=True)
    STRANGE[what](home / "peft" / name)
    job = json.loads((home / "jobs.yaml").read_text())
    job["adapters"][0]["lora"] = {"init_from": "peft"}
    (home / "jobs.yaml").write_text(json.dumps(job))
    refused(home, capfd)


YAML = (
    "!!int ''",
    "!!bool abc",
    "!!timestamp abc",
    "!!float x",
    "!!binary ä",
    "!!set [1]",
    "!!omap 3",
    "!!python/name:os",
)


@pytest.mark.parametrize("value", YAML)
def test_values_that_do_not_suit_their_tag(value, home, capfd):
    (home / "jobs.yaml").write_text(f"adapters: {value}\n")
    assert "config.syntax" in refused(home, capfd) or "config." in refused(home, capfd)


@pytest.mark.parametrize("depth", [30, 3000, 200_000])
def test_deep_keys_of_toml(depth, home, capfd):
    (home / "jobs.toml").write_text(".".join(["a"] * depth) + " = 1\n")
    assert "config.syntax" in refused(home, capfd, "check", str(home / "jobs.toml"))


COLUMNS = {
    "nanoseconds": pa.array([1], pa.timestamp("ns")),
    "a far date": pa.array([10**15], pa.timestamp("ms")),
    "a time": pa.array([1], pa.time64("ns")),
    "a long duration": pa.array([10**17], pa.duration("s")),
    "a far day": pa.array([2**31 - 1], pa.date32()),
    "a duration": pa.array([timedelta(1)], pa.duration("us")),
    "a date": pa.array([datetime(2020, 1, 1)], pa.timestamp("us")),
}


@pytest.mark.parametrize("what", COLUMNS)
def test_times_in_parquet(what, home, capfd):
    table = pa.table({"prompt": COLUMNS[what], "completion": ["yes"]})
    parquet.write_table(table, home / "law.parquet")
    job = (home / "jobs.yaml").read_text().replace("law.jsonl", "law.parquet")
    (home / "jobs.yaml").write_text(job)
    refused(home, capfd)


@pytest.mark.parametrize("row", ['{"prompt": "a", "completion": "b", "\\ud800": 1}', '{"prompt": {"\\udfff": 1}}'])
def test_half_a_character_as_a_key(row, home, capfd):
    (home / "law.jsonl").write_text(row + "\n")
    assert "half a character" in refused(home, capfd)


def test_a_conversation_without_end(home, capfd):
    turns = [{"role": role, "content": "x"} for _ in range(2500) for role in ("user", "assistant")]
    (home / "law.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (home / "base" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "5000 messages" in refused(home, capfd)


@pytest.mark.parametrize("template", ["{{ 1e999 }}", "{{ -1e999 * messages[0].content }}", "x" * 10**6])
def test_a_template_that_cannot_be(template, home, capfd):
    (home / "law.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (home / "base" / "chat_template.jinja").write_text(template)
    assert "template" in refused(home, capfd)


NORMALIZERS = {
    "a long text": {"type": "Prepend", "prepend": "x" * 10**6},
    "a bad map": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "a bad pattern": {"type": "Replace", "pattern": {"Regex": "(?<"}, "content": "x"},
    "a pattern that inserts much": {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 10**6},
}


@pytest.mark.parametrize("what", NORMALIZERS)
def test_a_normalizer_that_cannot_be(what, home, capfd):
    path = home / "base" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] = NORMALIZERS[what]
    path.write_text(json.dumps(tokenizer))
    assert "tokenizer" in refused(home, capfd)


def test_a_hundred_thousand_columns_are_not_all_named(home, capfd):
    (home / "law.jsonl").write_text(json.dumps(dict.fromkeys(map(str, range(100_000)), "x")) + "\n")
    refused(home, capfd)
