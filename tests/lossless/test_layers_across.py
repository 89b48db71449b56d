"""The promises of training hold where layers have inputs of their own and read keys and values of earlier layers."""

from __future__ import annotations

import json

import pytest
from adapter_folders import distance, weights
from safetensors.numpy import load_file
from small_jobs import write_job, write_rows

from lorafusion_jax.config import load_config
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.errors import ConfigError, ErrorList
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.peft.merge import merge_adapter
from lorafusion_jax.training import RunFolder, train

TOLERANCE = 1e-5  # sums of float32 in another order, carried along by a few steps
FULL = LayerType(rope=Rope(theta=50.0, channels=12, share=0.5), head_dim=12, sharing="gives")
READER = LayerType(rope=FULL.rope, head_dim=12, sharing="reads", wide=True)
TARGETS = {
    "law": ["k_proj", "per_layer_input_gate"],  # k_proj is trained through the layer that reads it, too
    "med": ["q_proj", "up_proj", "down_proj"],
    "val": ["per_layer_projection", "v_proj"],
}


@pytest.fixture(scope="module")
def base(make_base, tmp_path_factory):
    return make_base(
        tmp_path_factory.mktemp("base") / "across",
        family="gemma4_text", num_layers=2, qk_norm=True, v_norm=True, layer_scalar=True, norms="sandwich",
        attention_scale=1.0, embedding_scale=32**0.5, activation="gelu_tanh", tie_embeddings=True, norm_offset=0.0,
        input_width=6, input_vocab=3072, pattern=(FULL, READER),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """run(names, **sections) → the folder of a run with these adapters."""
    runs: dict[str, RunFolder] = {}

    def run(names=tuple(TARGETS), **sections):
        key = str((names, sections))
        if key not in runs:
            folder = tmp_path_factory.mktemp("job")
            assert train(load_config(job(folder, base, names, **sections)), folder / "run").exit_code == 0
            runs[key] = RunFolder(folder / "run")
        return runs[key]

    return run


def job(folder, base, names=tuple(TARGETS), lora=None, **sections):
    adapters = [
        {
            "name": name,
            "data": {"train": write_rows(folder, name, 6, longest=10)},
            "lora": {"rank": 2 + number, "targets": TARGETS[name], "dropout": 0.0} | (lora or {}),
            "optim": {"name": "sgd", "lr": 0.02},
            "batch": {"global_samples": 3},
            "seed": number,
        }
        for number, name in enumerate(TARGETS)
        if name in names
    ]
    return write_job(folder, base, adapters, **sections)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "alone",
    [{}, {"mesh": {"fsdp": 2}}, {"mesh": {"data": 2}}, {"train": {"block_layers": 2}}],
    ids=["one device", "fsdp", "data", "one program"],
)
def test_joint_training_equals_separate_training(run, alone):
    joint = weights(run(), "law")
    assert distance(joint, weights(run(("law",), **alone), "law")) < TOLERANCE
    assert all(joint[key].any() for key in joint if key.endswith(" 1")), "B is zero: nothing was learned"


@pytest.mark.nightly
@pytest.mark.parametrize("remat", ["nothing", "gemm_inputs"])
def test_what_backward_computes_again_is_the_same(run, remat):
    assert distance(weights(run(), "law"), weights(run(train={"remat": remat}), "law")) < TOLERANCE


@pytest.mark.nightly
def test_a_folder_has_the_names_and_widths_of_peft(run, base, tmp_path):
    shapes = {key: array.shape for key, array in weights(run(), "med").items()}
    assert shapes["layers.1.mlp.up_proj 1"][1] == 2 * shapes["layers.0.mlp.up_proj 1"][1]
    assert {key.split(" ")[0] for key in weights(run(), "law")} == {
        "layers.0.self_attn.k_proj", "layers.0.per_layer_input_gate", "layers.1.per_layer_input_gate"
    }  # fmt: skip
    folder = run().latest("val")
    assert {*json.loads((folder / "adapter_config.json").read_text())["target_modules"]} >= {"per_layer_projection"}
    assert "base_model.model.model.layers.1.per_layer_projection.lora_A.weight" in load_file(
        folder / "adapter_model.safetensors"
    )
    for name in TARGETS:
        report = merge_adapter(base, run().latest(name), tmp_path / name)
        assert all(change > 0 for change in report.deltas.values())


@pytest.mark.parametrize(
    ("sections", "code"),
    [({"mesh": {"stages": 2}}, r"mesh\.stages\].*keys of earlier layers and inputs of their own"),
     ({"mesh": {"tensor": 2}}, r"mesh\.tensor\].*inputs of their own")],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(tmp_path, base, sections, code):
    with pytest.raises((ConfigError, ErrorList), match=code):
        train(load_config(job(tmp_path, base, **sections)), tmp_path / "run")


def test_rows_of_the_embedding_are_not_trained(tmp_path, base):
    with pytest.raises((ConfigError, ErrorList), match="inputs of their own"):
        adapter_specs(load_config(job(tmp_path, base, lora={"trainable_tokens": [3]})))
