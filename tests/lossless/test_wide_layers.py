"""The promises of training hold where some layers have wider heads, keys that are their values, and experts beside
their MLP.
"""

from __future__ import annotations

import json

import pytest
from adapter_folders import distance, weights
from more_cases import nightly
from safetensors.numpy import load_file
from small_jobs import write_job, write_rows

from lorafusion_jax.config import load_config
from lorafusion_jax.families.experts import ParallelExperts, Router
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.peft.merge import merge_adapter
from lorafusion_jax.training import RunFolder, train

TOLERANCE = 1e-5  # sums of float32 in another order, carried along by a few steps
NARROW = LayerType(window=5, rope=Rope(theta=100.0))
WIDE = LayerType(rope=Rope(theta=50.0, channels=12, share=0.5), head_dim=12, kv_heads=1, k_is_v=True)
TARGETS = {"law": ["k_proj"], "med": ["q_proj", "v_proj"], "val": ["v_proj"]}  # val has no wide layer
EXPERTS = ParallelExperts(width=32, inner=12, count=4, active=2, router=Router(scaled=True), activation="gelu_tanh")
PATTERN = {"rank_pattern": {"1.self_attn.q_proj": 1}}


@pytest.fixture(scope="module", params=["an MLP", nightly("experts beside it")])
def experts(request):
    return None if request.param == "an MLP" else EXPERTS


@pytest.fixture(scope="module")
def base(experts, make_base, tmp_path_factory):
    """The layers of a Gemma 4, one with experts in the nightly run; the second stage has no values."""
    return make_base(
        tmp_path_factory.mktemp("base") / "wide",
        family="gemma4_text", num_layers=2, qk_norm=True, v_norm=True, layer_scalar=True, norms="sandwich",
        attention_scale=1.0, embedding_scale=32**0.5, activation="gelu_tanh", tie_embeddings=True, norm_offset=0.0,
        pattern=(NARROW, WIDE), experts=experts,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(base, experts, tmp_path_factory):
    """run(names, **sections) → the folder of a run with these adapters."""
    runs: dict[str, RunFolder] = {}
    targets = TARGETS if experts is None else TARGETS | {"law": ["up_proj", "experts"]}

    def run(names=tuple(TARGETS), **sections):
        key = str((names, sections))
        if key not in runs:
            folder = tmp_path_factory.mktemp("job")
            adapters = [
                {
                    "name": name,
                    "data": {"train": write_rows(folder, name, 6, longest=10)},
                    "lora": {"rank": 2 + number, "targets": targets[name], "dropout": 0.0}
                    | (PATTERN if name == "med" else {}),
                    "optim": {"name": "sgd", "lr": 0.02},
                    "batch": {"global_samples": 3},
                    "seed": number,
                }
                for number, name in enumerate(TARGETS)
                if name in names
            ]
            assert train(load_config(write_job(folder, base, adapters, **sections)), folder / "run").exit_code == 0
            runs[key] = RunFolder(folder / "run")
        return runs[key]

    return run


@pytest.mark.parametrize("name", [nightly("law"), "med", "val"])
def test_joint_training_equals_separate_training_on_stages(run, name):
    """Every stage compiles the step of every adapter, so the run on stages is that of one adapter."""
    joint = weights(run(), name)
    assert distance(joint, weights(run((name,), mesh={"stages": 2}), name)) < TOLERANCE
    assert all(joint[key].any() for key in joint if key.endswith(" 1")), "B is zero: nothing was learned"


def test_a_folder_has_the_names_and_widths_of_peft(run, base, tmp_path):
    shapes = {key: array.shape for key, array in weights(run(), "med").items()}
    assert {key.split(" ")[0] for key in shapes} == {
        *(f"layers.{layer}.self_attn.q_proj" for layer in range(2)), "layers.0.self_attn.v_proj"
    }  # fmt: skip
    assert {key.split(" ")[0] for key in weights(run(), "val")} == {"layers.0.self_attn.v_proj"}
    ranks = [3, 1]
    for layer, outputs in enumerate([4 * 8, 4 * 12]):
        assert shapes[f"layers.{layer}.self_attn.q_proj 1"] == (ranks[layer], outputs)
    for name in ("med", "val"):
        report = merge_adapter(base, run().latest(name), tmp_path / name)
        assert all(change > 0 for change in report.deltas.values())


@pytest.mark.parametrize("experts", [nightly("experts beside it")], indirect=True)
def test_experts_beside_an_mlp_have_the_names_of_peft(run):
    keys = {key.split(" ")[0] for key in weights(run(), "law")}
    assert keys == {
        f"layers.{layer}.{path}"
        for layer in range(2)
        for path in ("mlp.up_proj", "parallel.experts_gate_up_proj", "parallel.experts_down_proj")
    }
    folder = run().latest("law")
    assert json.loads((folder / "adapter_config.json").read_text())["target_parameters"] == [
        "experts.gate_up_proj",
        "experts.down_proj",
    ]
    stored = load_file(folder / "adapter_model.safetensors")
    assert "base_model.model.model.layers.1.experts.base_layer.lora_A.weight" in stored
