"""Training on a base that is stored as fp8, which multiplies as it is, or as nf4, which a layer dequantises."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from more_cases import mostly_nightly, nightly
from safetensors.numpy import load_file, save_file
from small_jobs import exported, largest_difference, store_base_as, two_adapters, write_job, write_rows

from benchmarks.saved_model import load_frozen
from lorafusion_jax.checkpoint import weight_cache
from lorafusion_jax.cli.main import run
from lorafusion_jax.config.load import load_config
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.peft.write_config import config_of
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.report.summary import final_rows
from lorafusion_jax.session.base import load_stages
from lorafusion_jax.training.verify import verify_exports
from lorafusion_jax.weights.table import KINDS

ADAPTERS = ("law", "med")
SPLIT = {"stages": 2, "fsdp": 2}
SPLIT_ALWAYS = [(SPLIT, "nf4")]
# Each kind compiles a run of its own; modules/test_quantized_base.py computes with nf4, and stages store it, below.
TRAINED = pytest.mark.parametrize("kind", ["fp8", nightly("nf4")])
EVERY = pytest.mark.parametrize("kind", ["fp8", nightly("nf4"), nightly("int8")])


@pytest.fixture(scope="module")
def small(tmp_path_factory, make_base, kept_programs, saves_wait):
    """A base of two layers, and job(kind, names, **sections) → a job file on it."""
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_cache, "SPARE_BYTES", 0)  # whatever is free on this disk
        patch.setattr(weight_cache, "user_cache", lambda name: folder / "cache" / name)  # other tests have this base
        yield small_base(folder, make_base)


def small_base(folder, make_base):
    base = make_base(folder / "base", hidden_size=16, num_heads=2, num_kv_heads=1, intermediate_size=32)
    rows = {name: write_rows(folder, name, 8, seed, 12) for seed, name in enumerate(ADAPTERS)}

    def job(kind: str, names=ADAPTERS, model=base, **sections):
        entries = two_adapters(rows, names)
        for entry in entries:
            entry["lora"]["rank"] = 2  # equal ranks share programs
        return store_base_as(kind, write_job(folder, model, entries, **sections))

    def train(name: str, path, *overrides: str):
        assert run(["train", str(path), "--out", str(folder / name), *overrides]) == 0
        return folder / name

    @functools.cache
    def trained(kind: str):
        """A run of both adapters with all its saves."""
        return train(kind, job(kind), "save.every_steps=1", "save.keep=9")

    return SimpleNamespace(folder=folder, base=base, job=job, train=train, trained=trained)


def cached(out) -> list[bool]:
    """Whether each start of a run found the quantised base in the cache."""
    return [row["base_from_cache"] for row in read_rows(out / "events.jsonl") if row["kind"] == "started-up"]


@pytest.mark.parametrize("kind", ["fp8", nightly("nf4"), nightly("int8")])  # fp8 also rounds rows
def test_company_does_not_change_an_adapter(small, kind):
    """The other begins otherwise and has its rows in another order. Both runs share programs."""
    other = small.train(f"{kind}-company", small.job(kind), "adapters.med.seed=7", "save.every_steps=1")
    assert largest_difference(exported(small.trained(kind), "law"), exported(other, "law")) < 1e-5
    assert largest_difference(exported(small.trained(kind), "med"), exported(other, "med")) > 1e-3


@pytest.mark.parametrize("kind", ["fp8", nightly("nf4"), nightly("int8")])
def test_joint_is_alone(small, kind):
    """Alone, the same samples lie in other rows of other microbatches: float32 sums come in another order."""
    alone = small.train(f"{kind}-alone", small.job(kind, ["law"]), "adapters.law.data.eval=null")
    assert largest_difference(exported(small.trained(kind), "law"), exported(alone, "law")) < 1e-5


@EVERY
def test_an_adapter_that_diverges_changes_no_other(small, kind):
    out = small.folder / f"{kind}-diverging"
    assert run(["train", str(small.job(kind)), "--out", str(out), "adapters.med.optim.lr=1e30"]) == 3
    chex.assert_trees_all_equal(exported(out, "law"), exported(small.trained(kind), "law"))


@EVERY
def test_a_run_that_goes_on_never_stopped(small, kind, capsys):
    half = small.folder / f"{kind}-half"
    shutil.copytree(small.trained(kind), half, symlinks=True)
    for slot in sorted(int(slot.name) for slot in (half / "state").iterdir())[1:]:
        shutil.rmtree(half / "state" / str(slot))
    shutil.rmtree(half / "adapters")
    assert run(["resume", str(half)]) == 0, capsys.readouterr().err
    assert cached(half)[-1]  # an earlier start has quantised it
    for name in ADAPTERS:
        chex.assert_trees_all_equal(exported(half, name), exported(small.trained(kind), name))


@TRAINED
def test_exports_say_which_base_they_belong_to(small, kind, tmp_path, capsys):
    assert verify_exports(small.trained(kind))["law"].same  # on the quantised base again
    latest = small.trained(kind) / "adapters" / "law" / "latest"
    assert f"quantised as `{kind}`" in (latest / "README.md").read_text()
    for record in (latest / "adapter_config.json", latest / "run.json", small.trained(kind) / "run.json"):
        assert json.loads(record.read_text())["base_quantize"] == kind
    assert run(["export", str(small.trained(kind)), "law", "--merge", "--to", str(tmp_path / "merged")]) == 0
    assert f"quantised as {kind}; the original weights are merged" in " ".join(capsys.readouterr().out.split())
    merged, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", small.base))
    ours, name = exported(small.trained(kind), "law"), "base_model.model.model.layers.0.mlp.down_proj"
    a_rK, b_Nr = ours[f"{name}.lora_A.weight"], ours[f"{name}.lora_B.weight"]
    wanted = original["model.layers.0.mlp.down_proj.weight"] + 32 / 2 * b_Nr @ a_rK
    np.testing.assert_allclose(merged["model.layers.0.mlp.down_proj.weight"], wanted, atol=1e-6)


@TRAINED
def test_an_adapter_that_goes_on_elsewhere_takes_no_base_along(small, kind, capsys):
    latest = small.trained(kind) / "adapters" / "law" / "latest"
    start = f"adapters.law.lora.init_from={latest}"
    assert run(["check", str(small.job("none", ["law"])), start]) == 0, capsys.readouterr().err
    assert "base_quantize" not in config_of(read_adapter(latest)[0], "base")


def test_a_run_does_not_go_on_with_another_kind(small, capsys):
    assert run(["resume", str(small.trained("fp8")), "base.quantize=int8"]) == 2
    assert "base.quantize" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", [{"fsdp": 2}, nightly({"stages": 2, "fsdp": 2})], ids=str)
def test_neither_mesh_nor_remat_change_the_adapter(small, mesh):
    """Stages and replicas sum in another order.

    AdamW divides a gradient by its own size, so of one near zero even the rounding moves a weight far. With an eps as
    large as most gradients here, a step is proportional to them, and rounding stays as small as it was.
    """
    settings = ("data.eval=null", "optim.eps=0.1", "optim.lr=0.2")
    proportional = [f"adapters.{name}.{setting}" for name in ADAPTERS for setting in settings]
    whole = small.train(f"nf4-beside-{mesh}", small.job("nf4"), *proportional)
    job = small.job("nf4", ADAPTERS[:1], mesh=mesh, train={"remat": "nothing"})  # alone, so this is joint = alone, too
    split = small.train(f"nf4-{mesh}", job, *proportional[: len(settings)])
    assert cached(split) == [True]
    assert largest_difference(exported(split, "law"), exported(whole, "law")) < 1e-5


def test_a_run_whose_cache_is_damaged_and_cannot_be_written_says_so_and_goes_on(small, tmp_path, monkeypatch):
    wanted = small.trained("fp8")
    shutil.copytree(weight_cache.weight_cache(), tmp_path / "quantised")
    for entry in (tmp_path / "quantised").iterdir():
        os.truncate(entry / "weights.bin", 1)
    monkeypatch.setattr(weight_cache, "user_cache", lambda name: tmp_path / name)
    monkeypatch.setattr(weight_cache, "write_entry", raise_full)
    out = small.train("fp8-damaged", small.job("fp8"))
    told = {row["kind"]: row["text"] for row in read_rows(out / "events.jsonl") if "text" in row}
    assert told.keys() == {"damaged", "cache-skipped"}
    assert "quantised again" in told["damaged"]
    assert "No space left" in told["cache-skipped"]
    assert cached(out) == [False]
    for name in ADAPTERS:
        chex.assert_trees_all_equal(exported(out, name), exported(wanted, name))
    assert run(["resume", str(out), "base.cache_quantized=false"]) == 0


def raise_full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [*(({}, kind) for kind in KINDS), *mostly_nightly([(SPLIT, kind) for kind in KINDS], SPLIT_ALWAYS)],
    ids=str,
)
def test_the_plan_counts_the_bytes_that_lie_on_the_devices(small, capsys, kind, mesh):
    plans = {}
    for quantize in ("none", kind):
        path = small.job(quantize, mesh=mesh)
        assert run(["plan", str(path), "--json"]) == 0
        plans[quantize] = json.loads(capsys.readouterr().out)["memory"]
        assert plans[quantize]["quantize"] == quantize
    config = load_config(path)
    for number, stage in enumerate(load_stages(config, prepare(config), adapter_specs(config))):
        weights = stage.weights
        ends = weights.embed, weights.own_inputs, weights.norm, weights.head  # a tied table comes twice
        arrays = {id(leaf): leaf for leaf in jax.tree.leaves((weights.pieces, ends))}
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays.values())
        assert plans[kind]["stages"][number]["frozen"] == held < plans["none"]["stages"][number]["frozen"]
    if kind == "int8" and not mesh:  # a byte instead of four for a weight, and four bytes for a column's scale
        saved = sum(3 * k * n - 4 * n for k, n in ModelConfig.from_hf(small.base).layer(0).linear_shapes().values()) * 2
        assert plans["none"]["stages"][0]["frozen"] == held + saved


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_is_stored_alike_every_time_and_only_its_projections(small, kind):
    plain, stored, again = (
        load_frozen(small.base, dtype=jnp.float32, quantize=quantize) for quantize in ("none", kind, kind)
    )
    chex.assert_trees_all_equal(stored, again)
    dequantise = jax.jit(KINDS[kind].dequantise, static_argnums=1)  # one program instead of one for each operation
    dictionaries = {name for name, weight in stored.items() if isinstance(weight, dict)}
    assert dictionaries == {name for name in plain if name.endswith("proj.kernel")}
    for name in plain.keys() - dictionaries:
        np.testing.assert_array_equal(stored[name], plain[name])
    for name in dictionaries:
        w, read = np.float64(plain[name]), np.float64(dequantise(stored[name], jnp.float32))
        most = np.abs(w).max() * {"int8": 0.5 / 127, "fp8": 2**-4, "fp8_blocks": 2**-4}.get(kind, 0.16)
        assert np.abs(read - w).max() <= most * (1 + 1e-5)  # half a step at the largest weight of the kernel


def test_kernels_that_a_kind_cannot_store_are_refused_before_anything_is_read(small, make_base, tmp_path, capsys):
    odd = make_base(tmp_path / "odd", num_layers=1, intermediate_size=47)
    for command in ("check", "train"):
        assert run([command, str(small.job("nf4", model=odd))]) == 2
        shown = capsys.readouterr().err
        assert "error[base.quantize-shape]" in shown
        assert "mlp.down_proj.kernel [47, 32]" in " ".join(shown.split())


def test_a_checkpoint_that_comes_quantised_is_named_and_trained_on_as_it_is(small, tmp_path, capsys):
    """The stored bytes are those of the same values quantised on load, so is all that follows."""
    folder = tmp_path / "quantised"
    shutil.copytree(small.base, folder)
    tensors = load_file(folder / "model.safetensors")
    stored = load_frozen(small.base, quantize="fp8_blocks")
    for name, arrays in ((name, arrays) for name, arrays in stored.items() if isinstance(arrays, dict)):
        stem = f"model.{name.removesuffix('.kernel')}"
        tensors[f"{stem}.weight"] = np.asarray(arrays["values"])
        tensors[f"{stem}.weight_scale_inv"] = np.asarray(arrays["scales"])
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    for kind in ("none", "fp8"):
        assert run(["check", str(small.job(kind, model=folder))]) == 2
        shown = capsys.readouterr().err
        assert "error[base.quantize-checkpoint]" in shown
        assert "base.quantize: fp8_blocks" in shown
    assert run(["check", str(small.job("fp8_blocks", model=folder))]) == 0
    assert run(["generate", str(folder), "a prompt"]) == 2
    assert "--quantize fp8_blocks of generate" in capsys.readouterr().err
    chex.assert_trees_all_equal(load_frozen(folder, quantize="fp8_blocks"), stored)


def test_the_bases_loss_is_told_before_and_after(small, capsys):
    """Of what is far from float32 on a random model; training data where nothing is held out."""
    path = small.job("fp8", ["law", "med"])
    settings = json.loads(path.read_text())
    del settings["adapters"][1]["data"]["eval"]
    path.write_text(json.dumps(settings))
    assert run(["check", str(path), "--base-loss", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["base_loss"]
    law, med = report["law"], report["med"]
    assert (law["held_out"], med["held_out"]) == (True, False)
    begun = final_rows(small.trained("fp8"))["law"]["before"]  # of an adapter that has not learnt yet
    assert law["after"] == pytest.approx(begun, rel=1e-6)  # packed otherwise
    assert 1e-6 < abs(law["after"] - law["before"]) < 0.1
