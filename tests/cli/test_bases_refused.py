"""check and plan refuse bases that train refuses, and say where they plan from config.json alone."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

import lorafusion_jax as lf
from lorafusion_jax.errors import LoraFusionError

HEAD, NORM = "lm_head.weight", "model.layers.0.input_layernorm.weight"


@pytest.fixture
def folder(job, tmp_path):
    base = tmp_path / "broken"
    shutil.copytree(job.folder / job.values["base"]["model"], base)
    job.values["base"] = {"model": str(base)}
    job.write()
    return base


def rewrite(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


def renamed(folder, name):
    (folder / "model.safetensors").rename(folder / name)


def configured(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def sharded(folder):
    renamed(folder, "model-00001-of-00002.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"model.norm.weight": names[0], HEAD: names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def doubled(folder):
    single, shard = folder / "model.safetensors", folder / "model-00001-of-00001.safetensors"
    shutil.copyfile(single, shard)
    index = {"weight_map": dict.fromkeys(load_file(single), shard.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def emptied(folder):
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()


def cut(folder, share):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])


def unprefixed(tensors):
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


BROKEN = {
    "no config.json": (emptied, "model.not-found"),
    "only a pickle": (lambda folder: renamed(folder, "pytorch_model.bin"), "model.no-weights"),
    "only a gguf": (lambda folder: renamed(folder, "model-q4.gguf"), "model.no-weights"),
    "shards without an index": (lambda folder: renamed(folder, "model-00001-of-00001.safetensors"), "model.no-weights"),
    "a shard is missing": (sharded, "model.missing-file"),
    "two sets of weights": (doubled, "model.two-sets"),
    "names without model.": (lambda folder: rewrite(folder, unprefixed), "model.tensors-differ"),
    "no norm": (
        lambda folder: rewrite(folder, lambda tensors: {n: x for n, x in tensors.items() if n != NORM}),
        "model.tensors-differ",
    ),
    "a norm of whole numbers": (
        lambda folder: rewrite(folder, lambda tensors: tensors | {NORM: tensors[NORM].astype("int32")}),
        "model.tensors-differ",
    ),
    "a bias too many": (
        lambda folder: rewrite(folder, lambda tensors: tensors | {HEAD.replace("weight", "bias"): tensors[NORM]}),
        "model.tensors-differ",
    ),
    "half of a download": (lambda folder: cut(folder, 0.5), "model.broken-file"),
    "a header that is cut": (lambda folder: cut(folder, 1e-5), "model.broken-file"),
    "another vocabulary": (lambda folder: configured(folder, vocab_size=4096), "model.tensors-differ"),
    "a wider MLP": (lambda folder: configured(folder, intermediate_size=72), "model.tensors-differ"),
    "more layers": (lambda folder: configured(folder, num_hidden_layers=9), "model.tensors-differ"),
    "no number": (lambda folder: configured(folder, hidden_size="wide"), "model.bad-config"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_bases_that_cannot_be_loaded_are_refused_before_training(lorafusion, job, folder, case):
    change, code = BROKEN[case]
    change(folder)
    for command in (["check", job.path], ["plan", job.path], ["plan", job.path, "--gpus", "2"]):
        outcome = lorafusion(*command)
        assert outcome.code != 0
        assert code in outcome.errors, (command, outcome.err)
    with pytest.raises(LoraFusionError, match=code.replace(".", r"\.")):
        lf.plan(job.path)


def test_a_base_without_weights_is_planned_and_that_is_said(lorafusion, job, folder):
    (folder / "model.safetensors").unlink()
    for command in ("check", "plan"):
        outcome = lorafusion(command, job.path, "--json")
        assert outcome.code == 0, outcome.err
        assert "base: no weights here: planned from config.json" in json.loads(outcome.out)["warnings"]


def test_dropout_inside_the_base_is_said_to_be_left_out(lorafusion, job, folder):
    (folder / "model.safetensors").unlink()
    configured(folder, architectures=["SeedOssForCausalLM"], model_type="seed_oss", attention_dropout=0.25)
    warnings = json.loads(lorafusion("check", job.path, "--json").out)["warnings"]
    assert any("attention_dropout=0.25, residual_dropout=0.1" in warning for warning in warnings)
