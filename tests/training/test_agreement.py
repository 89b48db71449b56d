"""Hosts that would not train the same are named, in every fact, before the first step."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import small_jobs
from safetensors.numpy import load_file, save_file

from lorafusion_jax.checkpoint.base_files import base_digests
from lorafusion_jax.config import load_config
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.training import agreement
from lorafusion_jax.training.agreement import check_agreement, job_facts, run_facts


@pytest.fixture
def host(tmp_path, tiny_base):
    """A folder with all that a process reads: base, data, held-out data, a job, and an adapter to start from."""
    home = tmp_path / "host"
    shutil.copytree(tiny_base, home / "base")
    for name, count in {"law": 5, "held": 3}.items():
        small_jobs.write_rows(home, name, count)
    entry = {"name": "law", "data": {"train": "law.jsonl", "eval": "held.jsonl"}, "seed": 3}
    small_jobs.write_job(home, home / "base", [entry], mesh={"data": 2})
    return home


def facts_of(host):
    config = load_config(host / "jobs.yaml")
    return job_facts(config, prepare(config), base_digests(host / "base"))


def edit_job(*path, value):
    def edit(host, monkeypatch):
        job = json.loads((host / "jobs.yaml").read_text())
        *sections, key = path
        inner = job
        for section in sections:
            inner = inner[section] if isinstance(section, int) else inner.setdefault(section, {})
        inner[key] = value
        (host / "jobs.yaml").write_text(json.dumps(job))

    return edit


def edit_text(file, old, new):
    def edit(host, monkeypatch):
        text = (host / file).read_text()
        assert old in text
        (host / file).write_text(text.replace(old, new, 1))

    return edit


def other_weights(host, monkeypatch):
    tensors = load_file(host / "base" / "model.safetensors")
    name = next(iter(tensors))
    tensors[name] = np.nextafter(tensors[name], np.inf)  # as small a change as there is
    save_file(tensors, host / "base" / "model.safetensors", {"format": "pt"})


def other_version(host, monkeypatch):
    versions = agreement.versions()
    monkeypatch.setattr(agreement, "versions", lambda: versions | {"jaxlib": "0.0.1"})


def row_less(host, monkeypatch):
    lines = (host / "law.jsonl").read_text().splitlines(keepends=True)
    (host / "law.jsonl").write_text("".join(lines[:-1]))


def other_precision(host, monkeypatch):
    settings = dict.fromkeys(agreement.NUMERICS, "float32")
    monkeypatch.setattr(agreement, "jax", SimpleNamespace(config=SimpleNamespace(**settings)))


WORD = '"prompt": "'
DIFFERENCES = {
    "base weights": (other_weights, "model.safetensors of the base model differs"),
    "base settings": (
        edit_text("base/config.json", '"rms_norm_eps": 1', '"rms_norm_eps": 2'),
        "config.json of the base",
    ),
    "words": (edit_text("law.jsonl", WORD, f"{WORD}model "), "the data of law differs"),
    "rows": (row_less, "the data of law differs"),
    "held-out words": (edit_text("held.jsonl", WORD, f"{WORD}model "), "the held-out data of law differs"),
    "learning rate": (edit_job("optim", "lr", value=0.5), "adapters.law.optim.lr is 0.0002 on process 0 and 0.5"),
    "seed": (edit_job("adapters", 0, "seed", value=4), "adapters.law.seed is 3 on process 0 and 4 on process 1"),
    "rank": (edit_job("lora", "rank", value=3), "adapters.law.lora.rank is 16 on process 0 and 3 on process 1"),
    "mesh": (edit_job("mesh", "fsdp", value=2), "mesh.fsdp is 1 on process 0 and 2 on process 1"),
    "saves": (edit_job("save", "every_steps", value=9), "save.every_steps is"),
    "versions": (other_version, "the version of jaxlib is"),
    "precision": (other_precision, "jax_default_matmul_precision is None on process 0 and float32 on process 1"),
}


@pytest.fixture
def as_process_1(monkeypatch):
    """as_process_1(facts of process 0): this process is the second of two."""

    def become(first):
        monkeypatch.setattr(agreement, "is_alone", lambda: False)
        monkeypatch.setattr(agreement, "same_on_all", lambda answer: answer == agreement._digest(first))
        monkeypatch.setattr(agreement, "answers_of_all", lambda answer: [json.dumps(first), answer])

    return become


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_host_that_differs_is_named(what, host, as_process_1, monkeypatch):
    edit, expected = DIFFERENCES[what]
    as_process_1(facts_of(host))
    check_agreement(facts_of(host))
    edit(host, monkeypatch)
    with pytest.raises(CheckpointError, match=r"processes\.differ") as raised:
        check_agreement(facts_of(host))
    assert expected in raised.value.why
    assert "process 1" in raised.value.where


def test_paths_may_differ(host, tmp_path, as_process_1):
    as_process_1(facts_of(host))
    elsewhere = host.rename(tmp_path / "elsewhere")
    edit_job("base", "model", value=str(elsewhere / "base"))(elsewhere, None)
    (elsewhere / "law.jsonl").rename(elsewhere / "rows.jsonl")
    edit_job("adapters", 0, "data", "train", value="rows.jsonl")(elsewhere, None)
    check_agreement(facts_of(elsewhere))


@pytest.mark.parametrize("what", ["plan.json", "run.json", "state/", "--drop"])
def test_a_run_that_continues_elsewhere_is_named(what, as_process_1):
    record, plan = {"schema": 2}, SimpleNamespace(digest="0123456789abcdef")
    first = {"record": record, "plan": plan, "slots": [2, 4], "drop": []}
    other = {"run.json": {"record": {}}, "plan.json": {"plan": SimpleNamespace(digest="f" * 16)}}
    other |= {"state/": {"slots": [2]}, "--drop": {"drop": ["law"]}}
    as_process_1(run_facts(**first))
    check_agreement(run_facts(**first))
    with pytest.raises(CheckpointError) as raised:
        check_agreement(run_facts(**(first | other[what])))
    assert raised.value.why.startswith(what)
