"""Unusable job files, settings and model folders: exit code 2, one clear error, no traceback, quickly."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import make_job
from safetensors.numpy import load_file, save_file

import lorafusion_jax as lf
from lorafusion_jax.config import load_config
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.training import resume, train

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
FILES = {
    "aliases": BOMB,
    "a list that holds itself": "x: &a [*a]\n",
    "a table that holds itself": "x: &a {b: *a}\n",
    "deep lists": "x: " + "[" * 3000 + "]" * 3000 + "\n",
    "deep tables": "x: " + "{a: " * 2000 + "}" * 2000 + "\n",
    "a date that is none": "x: 2024-13-45\n",
    "a time that is none": "x: 2024-01-01 10:00:61\n",
    "thousands of digits": "x: " + "9" * 5000 + "\n",
    "too large": "x: " + "a" * (1 << 21) + "\n",
    "half a character": '{"optim": {"name": "\\ud83d"}}',
    "half a character in a key": '{"\\ud83d": 1}',
    "a tag": "x: !!python/object/apply:os.system [true]\n",
}
TOML_FILES = {
    "deep lists": "x = " + "[" * 3000 + "]" * 3000 + "\n",
    "a date that is none": "x = 2024-13-45\n",
    "thousands of digits": "x = " + "9" * 5000 + "\n",
}
SETTINGS = {
    "epochs=1000000000": "config.too-many-samples",
    "epochs=10" + "0" * 30: "config.override",
    "optim.lr=1e300": "config.override",
    "optim.lr=1e-50": "config.override",
    "optim.eps=1e-50": "config.override",
    "lora.alpha=1e308": "config.override",
    "weight=1e308": "config.override",
    "weight=1e-320": "config.override",
    "batch.global_samples=10000000000000000000": "config.override",
    "batch.capacity_tokens=1000000000000": "config.override",
    "batch.capacity_tokens=1" + "0" * 30: "config.override",
    "batch.capacity_tokens=[256, 256]": "config.override",
    "batch.capacity_tokens=[1, 2, 3, 4, 5]": "config.override",
    "batch.capacity_tokens=[128, 1000]": "config.capacity",
    "train.plan_seconds=1e308": "config.override",
    "mesh.data=1000000000": "config.mesh",
    "mesh={stages: 100000, data: 100000, fsdp: 100000}": "config.mesh",
    "lora.rank=[" + ",".join(map(str, range(1, 1001))) + "]": "",  # with the seeds below: a million adapters
    "base.model=" + "m" * 4000: "model.missing",
    "base.model=" + "m" * 5000: "config.override",
    "base.model=a/" + "m" * 4000: "model",
    "adapters.law.data.train=" + "d" * 4000 + ".jsonl": "data.missing-file",
    "train.max_steps=": "config.override",
    "train.max_steps=2024-13-45": "config.override",
    "train.max_steps=" + "[" * 3000: "config.override",
    "train.max_steps=" + "9" * 5000: "config.override",
    "seed=" + "9" * 60: "config.override",
    "seed=&a [*a]": "config.override",
}


def refuses(lorafusion, *arguments, code: str = "") -> None:
    start = time.process_time()
    outcome = lorafusion(*arguments)
    assert outcome.code == 2, outcome.err[-500:]
    assert outcome.errors
    assert any(error.startswith(code) for error in outcome.errors), outcome.errors
    assert "Traceback" not in outcome.err
    assert len(outcome.err) < 5000 + 3 * max(len(str(argument)) for argument in arguments)
    assert time.process_time() - start < 10


@pytest.mark.parametrize("name", FILES)
def test_yaml_that_cannot_be_used(lorafusion, tmp_path, name):
    (tmp_path / "jobs.yaml").write_text(FILES[name])
    refuses(lorafusion, "check", tmp_path / "jobs.yaml", code="config.")


@pytest.mark.parametrize("name", TOML_FILES)
def test_toml_that_cannot_be_used(lorafusion, tmp_path, name):
    (tmp_path / "jobs.toml").write_text(TOML_FILES[name])
    refuses(lorafusion, "check", tmp_path / "jobs.toml", code="config.syntax")


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting[:40])
def test_extreme_settings(lorafusion, job, setting):
    more = ["seed=[" + ",".join(map(str, range(1000))) + "]"] if setting.startswith("lora.rank") else []
    code = SETTINGS[setting] or "config.too-many-adapters"
    refuses(lorafusion, "plan", job.path, setting, *more, code=code)


def test_unused_epochs_cost_nothing(lorafusion, job):
    start = time.process_time()
    assert lorafusion("plan", job.path, "epochs=1000000000", "train.max_steps=2").code == 0
    assert time.process_time() - start < 10


def test_ordinary_aliases_work(lorafusion, job):
    values = json.dumps(job.values)
    job.path.write_text(values[:-1] + ', "optim": {"lr": &lr 1e-3, "eps": *lr}}')
    assert lorafusion("check", job.path).code == 0


@pytest.mark.parametrize(("names", "code"), [(("Law", "law"), "config.duplicate-name"), (("a=b", "c"), "config.name")])
def test_names_that_collide_elsewhere(lorafusion, job, names, code):
    for adapter, name in zip(job.values["adapters"], names, strict=True):
        adapter["name"] = name
    job.write()
    refuses(lorafusion, "check", job.path, code=code)


def test_global_samples_of_all_adapters_can_be_swept(lorafusion, job):
    job.values["batch"]["global_samples"] = [2, 3]
    for adapter in job.values["adapters"]:
        adapter.pop("batch", None)
    job.write()
    outcome = lorafusion("check", job.path, "--json")
    assert list(json.loads(outcome.out)["adapters"]) == [
        f"{name}-global_samples{size}" for name in ("law", "med") for size in (2, 3)
    ]
    job.values["batch"]["global_samples"] = [2, 0]
    job.write()
    outcome = lorafusion("check", job.path)
    assert (outcome.code, outcome.errors) == (2, ["config.value"])
    assert "'batch.global_samples' must be 1 or more" in outcome.err


MODEL_FILES = {
    "deep config": ("config.json", "[" * 100_000),
    "deep tokenizer config": ("tokenizer_config.json", "[" * 100_000),
    "tokenizer config of thousands of digits": ("tokenizer_config.json", '{"a": ' + "9" * 5000 + "}"),
    "deep index of the weights": ("model.safetensors.index.json", "[" * 100_000),
    "an unknown family": ("config.json", '{"architectures": ["OPTForCausalLM"], "model_type": "opt"}'),
    "weights cut short": ("model.safetensors", b"\x40\0\0\0\0\0\0\0{"),
    "deep tokenizer": ("tokenizer.json", "[" * 100_000),
    "binary tokenizer config": ("tokenizer_config.json", b"\xff\xfe\x00"),
    "a template without end": (
        "chat_template.jinja",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    ),
    "a template of a long text": ("chat_template.jinja", "{{ 'a' * 10 ** 11 }}"),
    "a template of a wide format": ("chat_template.jinja", "{{ '%100000000000d' % 1 }}"),
    "a deep template": ("chat_template.jinja", "{{ " + "(" * 3000 + ")" * 3000 + " }}"),
}


@pytest.mark.parametrize("name", MODEL_FILES)
def test_model_folders_that_cannot_be_used(lorafusion, tmp_path, tiny_base, name):
    base = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    file, content = MODEL_FILES[name]
    (base / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    refuses(lorafusion, "check", make_job(tmp_path, base).path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_base_weights_that_are_not_finite(lorafusion, tmp_path, tiny_base, value):
    base = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    name = sorted(tensors)[3]
    tensors[name].reshape(-1)[7] = value
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    outcome = lorafusion("check", make_job(tmp_path, base).path)
    assert (outcome.code, outcome.errors) == (2, ["model.not-finite"])
    assert name in outcome.err


def test_one_row_of_a_hundred_megabytes(lorafusion, job):
    with (job.folder / "law.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a", "completion": "b c " * (25 << 20)}) + "\n")
    began = time.process_time()
    assert lorafusion("check", job.path).code == 0
    assert time.process_time() - began < 10
    refuses(lorafusion, "check", job.path, "data.on_long=error", code="data.large-row")


@pytest.mark.parametrize("arguments", [("--out", ""), ("--out=",), ("--out", "  ")], ids=str)
def test_an_empty_folder_is_not_the_current_one(lorafusion, job, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    refuses(lorafusion, "train", job.path, *arguments, code="command.empty")
    assert sorted(tmp_path.rglob("*")) == before


EMPTY = {
    "train": lambda job: train(load_config(job), ""),
    "resume": lambda job: resume(" "),
    "lf.train": lambda job: lf.train(job, ""),
    "lf.resume": lambda job: lf.resume(""),
    "lf.open_run": lambda job: lf.open_run(""),
}


@pytest.mark.parametrize("call", EMPTY)
def test_an_empty_folder_is_not_the_current_one_in_python(call, job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"run\.no-folder"):
        EMPTY[call](job.path)


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (["optim.warmup=2147483647"], "optim.warmup=2 147 483 647 steps, and it takes"),
        (["adapters.law.batch.global_samples=2147483647"], "law: batch.global_samples=2 147 483 647, and there are"),
        (["train.max_steps=2147483647"], "train.max_steps=2 147 483 647 has no effect: no adapter takes more than"),
        (["train.block_layers=1000000000"], "train.block_layers=1000000000, and the model has"),
        (["save.every_steps=1000000", "save.every_minutes=null"], "only the end is saved"),
    ],
)
def test_settings_beyond_the_end_are_stated(lorafusion, job, settings, note):
    outcome = lorafusion("check", job.path, "--json", *settings)
    assert outcome.code == 0
    assert [warning for warning in json.loads(outcome.out)["warnings"] if note in warning]
