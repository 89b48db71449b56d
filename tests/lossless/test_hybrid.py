"""The promises of training hold where layers differ: a gated delta net in some, gated attention in the others."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from adapter_folders import distance, weights
from more_cases import nightly
from small_jobs import write_job, write_rows

from lorafusion_jax.config import load_config
from lorafusion_jax.families.delta_net import DeltaNet
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.families.table import FAMILIES
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.peft.merge import merge_adapter
from lorafusion_jax.training import RunFolder, train

pytestmark = pytest.mark.usefixtures("kept_programs")
TOLERANCE = 1e-5  # sums of float32 in another order, carried along by a few steps
LINEAR, FULL = LayerType(linear=True), LayerType(rope=Rope(theta=100.0, channels=4))
TARGETS = {  # each program of an adapter compiles kernels for all of its leaves
    "law": ["in_proj_z", "q_proj", "v_proj"],
    "med": ["in_proj_qkv", "in_proj_z", "in_proj_a"],
}
SIZES = {
    "vocab_size": 3072, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
OTHERS = {  # other mechanisms in place of attention, and layers of parallel halves: keys of config.json, targets
    "bamba": (
        {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_n_groups": 2},
        {"law": ["in_proj", "q_proj", "down_proj"], "med": ["in_proj", "out_proj"]},
    ),
    "lfm2": (
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        {"law": ["in_proj", "q_proj", "w2"], "med": ["in_proj", "w1", "out_proj"]},
    ),
    "cohere2": (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "logit_scale": 0.3},
        {"law": ["q_proj", "down_proj"], "med": ["v_proj", "up_proj"]},
    ),
}
_CHOSEN = {  # latents, experts beside an MLP, an indexer that chooses every token
    "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "index_topk": 64,
}  # fmt: skip
_LATENTS = {"law": ["q_b_proj", "o_proj"], "med": ["kv_b_proj", "kv_a_proj_with_mqa"]}
OTHERS |= {
    "deepseek_v32": (_CHOSEN, _LATENTS),
    "glm_moe_dsa": (_CHOSEN, _LATENTS),
    "gpt_neox": (
        {"rotary_pct": 0.5},
        {"law": ["query_key_value", "dense_4h_to_h"], "med": ["dense", "dense_h_to_4h"]},
    ),
    "gpt2": (  # two projections of a layer have one name
        {"n_positions": 64},
        {"law": ["c_attn", "mlp.c_proj"], "med": ["attn.c_proj", "c_fc"]},
    ),
    "bailing_moe_v2": (
        {
            "num_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 2, "moe_intermediate_size": 8,
            "first_k_dense_replace": 1, "use_qk_norm": True, "use_bias": False,
        },
        {"law": ["query_key_value", "down_proj"], "med": ["dense", "up_proj"]},
    ),
    "nemotron_h": (
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "num_hidden_layers": 4,
            "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2,
        },
        {"law": ["in_proj", "q_proj", "down_proj"], "med": ["in_proj", "up_proj"]},
    ),
    "falcon_h1": (
        {
            "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2,
            "key_multiplier": 0.5,
        },
        {"law": ["in_proj", "q_proj", "down_proj"], "med": ["in_proj", "o_proj"]},
    ),
    "lfm2_moe": (
        {
            "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        },
        {"law": ["in_proj", "q_proj", "w2"], "med": ["in_proj", "w1", "out_proj"]},
    ),
    "llama4_text": (
        {
            "intermediate_size": 16, "intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 8,
            "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 3, "floor_scale": 2,
        },
        {"law": ["q_proj", "down_proj"], "med": ["v_proj", "up_proj"]},
    ),
    "olmo_hybrid": (
        {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
        },
        {"law": ["q_proj", "g_proj", "down_proj"], "med": ["o_proj", "a_proj"]},
    ),
}  # fmt: skip
LAYERS = {"law": (0, 1), "med": (0,)}  # where each has tensors


@pytest.fixture(scope="module")
def write_hybrid(make_base, tmp_path_factory):
    """write_hybrid(*types) → a base with layers of these types."""
    return lambda *types: make_base(
        tmp_path_factory.mktemp("base") / "hybrid",
        family="qwen3_5_text", num_layers=len(types), qk_norm=True, norm_offset=1.0, attention_gate=True,
        delta_net=DeltaNet(width=32, key_heads=2, value_heads=4, key_dim=6, value_dim=8),
        pattern=types,
    )  # fmt: skip


@pytest.fixture(scope="module")
def base(write_hybrid):
    """Cut in two, its first stage has no attention."""
    return write_hybrid(LINEAR, FULL)


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """run(names, **sections) → the folder of a run with these adapters; `others` have another seed."""
    runs: dict[str, RunFolder] = {}

    def run(names=tuple(TARGETS), breaking=(), others=(), model=base, targets=TARGETS, **sections):
        key = str((names, breaking, others, model, targets, sections))
        if key not in runs:
            folder = tmp_path_factory.mktemp("job")
            adapters = [
                {
                    "name": name,
                    "data": {"train": write_rows(folder, name, 8, longest=5)},
                    "lora": {"rank": 2 + number, "targets": targets[name], "dropout": 0.1 * (name == "law")},
                    "optim": {
                        "name": "sgd",
                        "lr": 1e30 if name in breaking else 0.02,
                        "clip": 0 if name in breaking else 1,
                    },
                    "batch": {"global_samples": 3},
                    "seed": number + 7 * (name in others),
                }
                for number, name in enumerate(TARGETS)
                if name in names
            ]
            config = load_config(write_job(folder, model, adapters, **sections))
            assert train(config, folder / "run").exit_code == (3 if breaking else 0)
            runs[key] = RunFolder(folder / "run")
        return runs[key]

    return run


MESH = {"stages": 2}


@pytest.mark.parametrize("name", ["law", "med"])
def test_company_does_not_change_an_adapter(run, name):
    """The other begins otherwise and has its rows in another order, so that this one's lie elsewhere in microbatches.

    Both runs share programs.
    """
    joint = weights(run(), name)
    others = tuple(TARGETS.keys() - {name})
    assert distance(joint, weights(run(others=others), name)) < TOLERANCE
    assert all(joint[key].any() for key in joint if key.endswith(" 1")), "B is zero: nothing was learned"


@pytest.mark.parametrize("name", [nightly("law"), nightly("med")])  # test_experts.py has a mesh and two kinds of layers
def test_joint_training_equals_separate_training_on_a_mesh(run, name):
    """Every stage compiles the step of every adapter, so the run on a mesh is that of one adapter."""
    joint = weights(run(), name)
    assert distance(joint, weights(run((name,), mesh=MESH), name)) < TOLERANCE


def test_a_folder_numbers_layers_as_the_model_does(run, base, tmp_path):
    for name, layers in LAYERS.items():
        paths = {key.split(" ")[0] for key in weights(run(), name)}
        assert sorted({int(path.split(".")[1]) for path in paths}) == list(layers)
        assert not any("self_attn" in path for path in paths if not path.startswith("layers.1."))
        report = merge_adapter(base, run().latest(name), tmp_path / name)
        assert report.num_changed == len(paths)
        assert all(change > 0 for change in report.deltas.values())


@pytest.mark.nightly
def test_a_stage_boundary_may_be_within_a_layer(run, write_hybrid):
    three = write_hybrid(LINEAR, FULL, LINEAR)
    cut = run(model=three, mesh={"stages": 2, "layers": [1.5, 1.5]})
    for name in TARGETS:
        assert distance(weights(cut, name), weights(run(model=three), name)) < TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("family", OTHERS)
def test_other_mechanisms_train_jointly_in_two_stages_as_alone(run, make_base, family, tmp_path):
    keys, targets = OTHERS[family]
    sizes = {FAMILIES[family].key_of(key): size for key, size in SIZES.items()}
    config = ModelConfig.from_hf({"model_type": family, **sizes, **keys})
    shape = {field.name: getattr(config, field.name) for field in fields(config)}
    model = make_base(tmp_path / family, **shape)
    cut = run(model=model, targets=targets, mesh=MESH)
    for name in targets:
        joint = weights(cut, name)
        assert all(joint[key].any() for key in joint if key.endswith(" 1")), "B is zero: nothing was learned"
        assert distance(joint, weights(run((name,), model=model, targets=targets), name)) < TOLERANCE
        report = merge_adapter(model, cut.latest(name), tmp_path / name)
        assert report.num_changed == len({key.split(" ")[0] for key in joint})


@pytest.mark.nightly
def test_a_diverging_adapter_leaves_others_bitwise(run):
    broken, healthy = run(breaking=("med",)), run()  # a delta net overflows, an MLP before a norm does not
    from_broken, other = weights(broken, "law"), weights(healthy, "law")
    for key in from_broken:
        np.testing.assert_array_equal(from_broken[key], other[key], err_msg=key)


@pytest.mark.nightly
@pytest.mark.parametrize("remat", ["everything", "nothing"])
def test_a_policy_that_saves_more_or_less_changes_no_result(run, remat):
    other = run(train={"remat": remat})
    for name in TARGETS:
        assert distance(weights(run(train={"remat": "gemm_inputs"}), name), weights(other, name)) < TOLERANCE


@pytest.mark.nightly
def test_an_adapter_continues_from_its_folder(run, base, tmp_path):
    """At a learning rate of nothing it stays as it was."""
    start = run(mesh=MESH).latest("med")
    adapters = [
        {
            "name": "again",
            "data": {"train": write_rows(tmp_path, "again", 6, longest=10)},
            "lora": {"init_from": str(start)},
            "optim": {"name": "sgd", "lr": 1e-30},
            "batch": {"global_samples": 3},
        }
    ]
    train(load_config(write_job(tmp_path, base, adapters, lora={})), tmp_path / "run")
    before, after = weights(run(mesh=MESH), "med"), weights(RunFolder(tmp_path / "run"), "again")
    assert before.keys() == after.keys()
    for key in before:
        np.testing.assert_array_equal(before[key], after[key])
