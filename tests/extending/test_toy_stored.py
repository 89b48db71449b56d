"""Stored frozen weights from another package (int8 with a scale per output channel), and the built-in kind."""

from __future__ import annotations

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lorafusion_jax.cli.main import run
from lorafusion_jax.config.load import load_config
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.layout.layer import LAYER
from lorafusion_jax.models import ModelConfig, load_frozen
from lorafusion_jax.pipeline.base import load_stages
from lorafusion_jax.training.verify import verify_exports

SOURCE = """
import jax.numpy as jnp

from lorafusion_jax.weights.table import ArraySpec, StoredKind


def arrays(k, n):
    return {"rounded": ArraySpec(shape=(k, n), dtype="int8"), "unit": ArraySpec(shape=(n,), dtype="float32")}


def quantise(kernel):
    unit = jnp.maximum(jnp.abs(kernel).max(0), 1e-30) * jnp.float32(1 / 127)
    return {"rounded": jnp.round(kernel / unit).astype(jnp.int8), "unit": unit}


def dequantise(stored, dtype):
    return (stored["rounded"] * stored["unit"]).astype(dtype)


EIGHT = StoredKind(arrays=arrays, quantise=quantise, dequantise=dequantise)
NOTHING = 5
"""
POINTS = {"lorafusion_jax.stored_weights": {"eight": "EIGHT", "nothing": "NOTHING"}}
KINDS = pytest.mark.parametrize("kind", ["eight", "int8"])


@pytest.fixture(autouse=True)
def _installed(install, kept_programs):
    install("toy_stored", SOURCE, POINTS)


@pytest.fixture
def job(write_rows, write_job, tiny_base):
    rows = {name: write_rows(f"{name}.jsonl", 12, seed, 20) for seed, name in enumerate(("law", "med"))}

    def make(kind: str, names=("law", "med"), base=tiny_base, **sections):
        adapters = [
            {
                "name": name,
                "data": {"train": rows[name], "eval": rows[name]},
                "batch": {"global_samples": 4},
                "lora": {"rank": 2 + 2 * (name == "med"), "dropout": 0.1},
                "optim": {"lr": 0.02, "schedule": "constant"},
            }
            for name in names
        ]
        path = write_job(adapters, **sections)
        base_settings = {"model": str(base), "dtype": "float32", "quantize": kind}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base": base_settings}))
        return path

    return make


@pytest.fixture
def train(tmp_path, capsys):
    def to(name: str, path, *overrides: str):
        code = run(["train", str(path), "--out", str(tmp_path / name), *overrides])
        assert code == 0, capsys.readouterr().err
        return tmp_path / name

    return to


def weights(folder, name="law"):
    return load_file(folder / "adapters" / name / "latest" / "adapter_model.safetensors")


def largest_difference(ours, theirs) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[key] - theirs[key]).max() / np.abs(theirs[key]).max()) for key in theirs)


def rounded_base(base, to):
    """A copy of a base whose projections have 255 values per output channel, written out in float32."""
    shutil.copytree(base, to)
    tensors = load_file(to / "model.safetensors")
    for name, w_NK in tensors.items():
        if name.endswith("_proj.weight"):
            unit = np.abs(w_NK).max(1, keepdims=True) * np.float32(1 / 127)
            tensors[name] = (np.round(w_NK / unit) * unit).astype(np.float32)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@KINDS
def test_trains_to_the_adapter_that_the_dequantised_base_gives(job, train, tiny_base, tmp_path, kind):
    stored = train("stored", job(kind))
    explicit = train("explicit", job("none", base=rounded_base(tiny_base, tmp_path / "rounded")))
    plain = train("plain", job("none"))
    for name in ("law", "med"):
        ours = weights(stored, name)
        assert largest_difference(ours, weights(explicit, name)) < 1e-5  # rounding, carried through optimizer steps
        assert largest_difference(ours, weights(plain, name)) > 1e-3  # it is another base


@pytest.mark.parametrize("mesh", [{}, {"stages": 2, "data": 2}, {"fsdp": 2}], ids=str)
def test_joint_equals_separate_training_on_every_mesh(job, train, mesh):
    """Another packing and other devices, so sums come in another order."""
    joint = train("joint", job("eight", mesh=mesh))
    alone = train("alone", job("eight", names=["law"]))
    assert largest_difference(weights(joint), weights(alone)) < 1e-5


@pytest.mark.parametrize("remat", ["everything", "gemm_inputs", "nothing"])
def test_remat_policies_do_not_change_the_adapter(job, train, remat):
    path = job("eight", names=["law"])
    ours = weights(train(remat, path, f"train.remat={remat}"))
    assert largest_difference(ours, weights(train("auto", path))) < 1e-5


def test_resumed_run_equals_uninterrupted_run_bitwise(job, train, tmp_path, capsys):
    whole = train("whole", job("int8"), "save.every_steps=1", "save.keep=9")
    half = tmp_path / "half"
    shutil.copytree(whole, half, symlinks=True)
    slots = sorted(int(slot.name) for slot in (half / "state").iterdir())
    for slot in slots[2:]:
        shutil.rmtree(half / "state" / str(slot))
    shutil.rmtree(half / "adapters")
    assert run(["resume", str(half)]) == 0, capsys.readouterr().err
    for name in ("law", "med"):
        chex.assert_trees_all_equal(weights(half, name), weights(whole, name))


def test_a_run_does_not_go_on_with_another_kind(job, train, capsys):
    folder = train("run", job("int8", names=["law"]))
    assert run(["resume", str(folder), "base.quantize=eight"]) == 2
    assert "base.quantize" in capsys.readouterr().err


@KINDS
@pytest.mark.parametrize("mesh", [{}, {"stages": 2}, {"fsdp": 2}], ids=str)
def test_the_plan_counts_the_bytes_that_lie_on_the_devices(job, capsys, tiny_base, kind, mesh):
    """On each device of a stage: a byte instead of four for a weight, and four bytes for a column's scale."""
    plans = {}
    for quantize in ("none", kind):
        path = job(quantize, mesh=mesh)
        assert run(["plan", str(path), "--json"]) == 0
        plans[quantize] = json.loads(capsys.readouterr().out)["memory"]
        assert plans[quantize]["quantize"] == quantize
    config = load_config(path)
    shapes = LAYER.linear_shapes(ModelConfig.from_hf(tiny_base)).values()
    saved = sum(3 * k * n // mesh.get("fsdp", 1) - 4 * n for k, n in shapes) * 2 // mesh.get("stages", 1)
    for number, stage in enumerate(load_stages(config, prepare(config), adapter_specs(config))):
        arrays = {id(leaf): leaf for leaf in jax.tree.leaves(stage.weights.arrays())}  # a tied table comes twice
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays.values())
        assert plans[kind]["stages"][number]["frozen"] == held
        assert plans["none"]["stages"][number]["frozen"] == held + saved


def test_only_projections_of_layers_are_stored(tiny_base):
    plain, stored = (load_frozen(tiny_base, dtype=jnp.float32, quantize=kind) for kind in ("none", "int8"))
    dictionaries = {name for name, weight in stored.items() if isinstance(weight, dict)}
    assert dictionaries == {name for name in plain if name.endswith("proj.kernel")}
    for name in plain.keys() - dictionaries:
        np.testing.assert_array_equal(stored[name], plain[name])
    for name in dictionaries:
        w, own = np.float64(plain[name]), stored[name]
        scales = np.float64(own["scales"])
        assert own["values"].dtype == np.int8
        assert np.abs(np.float64(own["values"]) * scales - w).max() <= 0.5 * scales.max() * (1 + 1e-5)


def test_exports_say_which_base_they_belong_to(job, train, tmp_path, capsys):
    folder = train("run", job("int8", names=["law"]), "base.dtype=bfloat16")
    assert verify_exports(folder)["law"].same  # on the quantised base again
    latest = folder / "adapters" / "law" / "latest"
    assert json.loads((latest / "adapter_config.json").read_text())["base_quantize"] == "int8"
    assert "quantised as `int8`" in (latest / "README.md").read_text()
    for record in (latest / "run.json", folder / "run.json"):
        assert json.loads(record.read_text())["base_quantize"] == "int8"
    capsys.readouterr()
    assert run(["export", str(folder), "law", "--merge", "--to", str(tmp_path / "merged")]) == 0
    assert "quantised as int8" in " ".join(capsys.readouterr().out.split())
    again = job("none", names=["law"])
    start = f"adapters.law.lora.init_from={latest}"
    assert run(["train", str(again), "--out", str(tmp_path / "second"), start]) == 0, capsys.readouterr().err
    own = json.loads((tmp_path / "second" / "adapters" / "law" / "latest" / "adapter_config.json").read_text())
    assert "base_quantize" not in own


@pytest.mark.parametrize(("kind", "says"), [("eigth", "did you mean 'eight'"), ("nothing", "toy_stored")])
def test_what_does_not_exist_or_load_is_refused(job, capsys, kind, says):
    assert run(["check", str(job(kind))]) == 2
    shown = capsys.readouterr().err
    assert "error[" in shown
    assert says in shown
    assert "Traceback" not in shown
