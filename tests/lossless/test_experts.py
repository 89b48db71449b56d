"""The promises of training hold for mixtures of experts: joint = alone on meshes, isolation, resume, PEFT folders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from adapter_folders import distance, weights
from more_cases import nightly
from safetensors.numpy import load_file
from small_jobs import write_job, write_rows

from lorafusion_jax.config import load_config
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.families.experts import Experts, Router
from lorafusion_jax.families.mlp import Mlp
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import Interrupted, RunFolder, resume, train
from lorafusion_jax.training.loop import PlanRun
from lorafusion_jax.weights.table import KINDS, check_kernels

pytestmark = pytest.mark.usefixtures("kept_programs")
TOLERANCE = 1e-5  # sums of float32 in another order, carried along by a few steps of Adam
EXPERTS = Experts(
    width=32, inner=20, count=6, active=2, shared=Mlp(width=32, inner=20, module="mlp.shared_experts"),
    router=Router(score="sigmoid", correction=True, groups=3, top_groups=2, scale=1.4),
)  # fmt: skip
PATTERN = (LayerType(rope=Rope(), dense=True), LayerType(rope=Rope()))
TARGETS = {  # each program of an adapter compiles kernels for all of its leaves
    "law": ["experts"],
    "med": ["k_proj", "down_proj", "mlp.experts.down_proj"],  # also of an MLP and of shared experts
}


@pytest.fixture(scope="module")
def base(make_base, tmp_path_factory):
    """A small GLM in which every expert is used; its first layer has an MLP."""
    folder = tmp_path_factory.mktemp("base") / "moe"
    return make_base(folder, family="glm4_moe", qk_norm=True, experts=EXPERTS, pattern=PATTERN)


@pytest.fixture(scope="module")
def job(base, tmp_path_factory):
    """job(names, **sections) → the configuration of a job, and a folder for its run; `others` have another seed."""

    def job(names=tuple(TARGETS), breaking=(), others=(), quantize="none", **sections):
        folder = tmp_path_factory.mktemp("job")
        adapters = [
            {
                "name": name,
                "data": {"train": write_rows(folder, name, 8, longest=10)},
                "lora": {"rank": 2 + number, "targets": TARGETS[name], "dropout": 0},
                "optim": {"name": "sgd"} | ({"lr": 1e30, "clip": 0} if name in breaking else {"lr": 0.1}),
                "batch": {"global_samples": 3 + number},
                "seed": number + 7 * (name in others),
            }
            for number, name in enumerate(TARGETS)
            if name in names
        ]
        overrides = [f"base.quantize={quantize}", "base.cache_quantized=false"]
        return load_config(write_job(folder, base, adapters, **sections), overrides), folder / "run"

    return job


@pytest.fixture(scope="module")
def run(job):
    """run(names, **sections) → the folder of a run with these adapters."""
    runs: dict[str, RunFolder] = {}

    def run(names=tuple(TARGETS), breaking=(), others=(), **sections):
        key = str((names, breaking, others, sections))
        if key not in runs:
            config, folder = job(names, breaking, others, **sections)
            assert train(config, folder).exit_code == (3 if breaking else 0)
            runs[key] = RunFolder(folder)
        return runs[key]

    return run


EVERY_AXIS = {"stages": 2, "data": 2, "fsdp": 2}


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("med", {"mesh": EVERY_AXIS, "train": {"remat": "gemm_inputs"}}),
        *(nightly(name, {}) for name in TARGETS),
        *(nightly("med", {"mesh": mesh}) for mesh in ({"stages": 2}, {"data": 2, "fsdp": 2})),
        nightly("med", {"train": {"remat": "gemm_inputs"}}),
    ],
    ids=str,
)
def test_joint_training_equals_separate_training(run, name, sections):
    """Also where the adapter alone is on a mesh, or saves less: small layers save everything by default.

    Every stage compiles the step of every adapter, so the run on a mesh is that of one, on both kinds of layers.
    """
    joint = weights(run(), name)
    assert distance(joint, weights(run((name,), **sections), name)) < TOLERANCE
    trained = [key for key in joint if key.endswith(" 1")]
    assert all(joint[key].any() for key in trained), "B is zero: nothing was learned"


def test_a_diverging_adapter_leaves_the_experts_of_others_bitwise(run):
    broken, healthy = run(breaking=("law",)), run()
    from_broken, other = weights(broken, "med"), weights(healthy, "med")
    for key in from_broken:
        np.testing.assert_array_equal(from_broken[key], other[key], err_msg=key)


FP8 = {"quantize": "fp8"}


def test_company_does_not_change_an_adapter_on_8_bit_floats(run):
    """Rows are rounded by themselves, so no adapter changes what another's rows become.

    The other begins otherwise and has its rows in another order. Both runs share programs.
    """
    joint, other = weights(run(**FP8), "med"), weights(run(others=("law",), **FP8), "med")
    assert distance(joint, other) < TOLERANCE
    assert distance(weights(run(**FP8), "law"), weights(run(others=("law",), **FP8), "law")) > 1e-3
    assert any(joint[key].any() for key in joint if key.endswith(" 1")), "B is zero: nothing was learned"


@pytest.mark.nightly
@pytest.mark.parametrize("sections", [{}, {"mesh": EVERY_AXIS}], ids=str)
def test_joint_training_equals_separate_training_on_8_bit_floats(run, sections):
    joint = weights(run(**FP8), "med")
    assert distance(joint, weights(run(("med",), **FP8, **sections), "med")) < TOLERANCE
    assert any(joint[key].any() for key in joint if key.endswith(" 1")), "B is zero: nothing was learned"


def test_losses_on_8_bit_floats_are_close_to_those_without(run):
    """Rounding moves an element by at most 2^-4 of its size, in both directions alike, so a sum of products moves by
    about 2^-5 of its norm, and logits and losses of a few layers by a few hundredths of theirs.
    """

    def losses(folder, name):
        rows = read_rows(folder.path / "metrics.jsonl")
        return np.array([row["loss"] for row in rows if row["kind"] == "step" and row["adapter"] == name])

    for name in TARGETS:
        plain, rounded = losses(run(), name), losses(run(**FP8), name)
        assert (plain != rounded).all()
        np.testing.assert_allclose(rounded, plain, rtol=2**-5)


def test_small_layers_save_everything(run):
    started = next(row for row in read_rows(run().path / "events.jsonl") if row["kind"] == "started")
    assert started["remat"] == "everything"


def test_a_folder_names_parameters_as_peft_does(run):
    law, med = (run().latest(name) for name in ("law", "med"))
    keys = load_file(law / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.mlp.experts"
    assert keys[f"{prefix}.base_layer.lora_A.weight"].shape == (6 * 2, 32)
    assert keys[f"{prefix}.base_layer.lora_B.weight"].shape == (40, 2 * 6)
    assert keys[f"{prefix}.lora_A.weight"].shape == (6 * 2, 20)
    keys = load_file(med / "adapter_model.safetensors")  # one parameter: there is no inner wrapper
    assert keys[f"{prefix}.lora_B.weight"].shape == (32, 3 * 6)
    assert not [key for key in keys if "base_layer" in key or "layers.0.mlp.experts" in key]
    paths = {key.split(".lora_")[0].split("layers.")[1] for key in keys}
    assert {"0.mlp.down_proj", "1.mlp.shared_experts.down_proj"} <= paths
    assert not {"1.mlp.down_proj", "0.mlp.shared_experts.down_proj"} & paths


def test_a_resumed_run_equals_one_without_a_break(job, run, monkeypatch):
    """Its checkpoint holds the adapters of all experts."""
    check_resumed(job, run, monkeypatch)


@pytest.mark.nightly
def test_a_resumed_run_on_8_bit_floats_equals_one_without_a_break(job, run, monkeypatch):
    check_resumed(job, run, monkeypatch, **FP8)


def check_resumed(job, run, monkeypatch, **sections):
    original, loops = PlanRun.__init__, []

    def init(self, *arguments, **named):
        original(self, *arguments, **named)
        loops.append(self)

    monkeypatch.setattr(PlanRun, "__init__", init)
    config, folder = job(**sections)
    stop = lambda event: event.kind == "slot" and event.slot == 1 and loops[-1]._stop.set()  # noqa: E731
    with pytest.raises(Interrupted):
        train(config, folder, listeners=[stop])
    resume(folder)
    for name in TARGETS:
        whole, other = weights(run(**sections), name), weights(RunFolder(folder), name)
        for key in whole:
            np.testing.assert_array_equal(whole[key], other[key], err_msg=key)


SMALL = {
    "family": "qwen3_moe", "qk_norm": True, "num_layers": 1, "num_kv_heads": 4,
    "experts": Experts(width=32, inner=32, count=4, active=2, router=Router(normalise=False)),
}  # fmt: skip


def test_experts_are_not_stored_in_a_way_that_their_products_cannot_read(make_base, tmp_path, monkeypatch):
    """Of a kind that multiplies as it is stored, and that knows no experts."""
    monkeypatch.setitem(KINDS, "odd", replace(KINDS["fp8"], of_experts=None))
    config = ModelConfig.from_hf(make_base(tmp_path / "base", **SMALL))
    for name in ("nf4", "fp8", "int8"):
        check_kernels(name, config.layer(0).kernel_shapes())
    with pytest.raises(ConfigError, match="projections of experts cannot be stored as odd"):
        check_kernels("odd", config.layer(0).kernel_shapes())


@pytest.mark.nightly
def test_experts_train_on_a_base_in_four_bits(make_base, tmp_path):
    """Every kernel of another shape compiles its quantisation, so the base has few."""
    base = make_base(tmp_path / "base", **SMALL)
    entry = {
        "name": "law",
        "data": {"train": write_rows(tmp_path, "law", 4, longest=10)},
        "lora": {"rank": 2, "targets": ["experts"], "dropout": 0},
        "batch": {"global_samples": 4},
    }
    config = load_config(write_job(tmp_path, base, [entry]), ["base.quantize=nf4"])
    assert train(config, tmp_path / "run").exit_code == 0
    trained = weights(RunFolder(tmp_path / "run"), "law")
    assert all(trained[key].any() for key in trained if key.endswith(" 1")), "B is zero: nothing was learned"
