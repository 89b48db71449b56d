"""config.json as transformers writes it at real depth, and with keys left out.

`tests/peers/saved_configs.py` writes the file; `tests/peers/test_configs_in_transformers.py` compares it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from published import SERVED

from benchmarks.saved_model import config_json
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.families.table import FAMILIES
from lorafusion_jax.models import ModelConfig

ROWS = [json.loads(line) for line in (Path(__file__).parent / "saved_configs.jsonl").read_text().splitlines()]
DEFAULTS = {row["name"]: row["config"] for row in ROWS if row["part"] == "defaults"}
NEEDED = {  # keys without a default there
    "dots1": ("n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
    "deepseek_v2": ("num_experts_per_tok",),
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
PUBLISHED = {row["name"]: row["config"] for row in ROWS if row["part"] == "published"}


def test_every_family_is_there():
    in_transformers = FAMILIES.keys() - {"bailing_moe_v2"}
    assert DEFAULTS.keys() == in_transformers
    assert {config["model_type"] for config in PUBLISHED.values()} | {
        "ministral",
        "ministral3",
        "gemma4_unified_text",
        "glm",
        "cohere",
        "lara_mini",
    } == in_transformers


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_that_transformers_saved_again_is_the_same(name):
    assert ModelConfig.from_hf(PUBLISHED[name]) == ModelConfig.from_hf(SERVED[name])


@pytest.mark.parametrize("family", DEFAULTS)
def test_a_key_that_is_missing_has_the_value_of_transformers(family):
    """Or is an error, for a size without which nobody knows the model."""
    saved = DEFAULTS[family]
    config = ModelConfig.from_hf(saved)
    assert ModelConfig.from_hf(config_json(config)) == config
    sizes = {*SIZES} - FAMILIES[family].reads.keys()
    for key in saved.keys() - {"model_type"}:
        without = {name: value for name, value in saved.items() if name != key}
        if key == "n_shared_experts" and key in NEEDED.get(family, ()):
            continue  # transformers fails without it
        if key in NEEDED.get(family, ()):
            with pytest.raises(CheckpointError, match=r"n_routed_experts|num_experts_per_tok is missing"):
                ModelConfig.from_hf(without)
        elif key in sizes:
            with pytest.raises(CheckpointError, match=f"{key} is missing"):
                ModelConfig.from_hf(without)
        else:
            assert ModelConfig.from_hf(without) == config, key


def test_dropout_of_seed_oss_is_known_and_its_rates_are_checked():
    raw = SERVED["Seed-OSS-36B"]
    published = (("attention_dropout", 0.1), ("residual_dropout", 0.1))
    assert ModelConfig.from_hf(raw).dropouts == published
    shorter = {key: value for key, value in raw.items() if not key.endswith("dropout")}
    assert ModelConfig.from_hf(shorter).dropouts == published  # as in transformers
    assert ModelConfig.from_hf(raw | {"residual_dropout": 0}).dropouts == (published[0], ("residual_dropout", 0.0))
    with pytest.raises(CheckpointError, match=r"attention_dropout=1\.5 is not a number from 0 to 1"):
        ModelConfig.from_hf(raw | {"attention_dropout": 1.5})


@pytest.mark.parametrize("name", SERVED)
def test_dropout_inside_a_base_is_left_out_and_kept_in_its_file(name):
    """People fine-tune such bases with PEFT and other rates; a note says that ours are 0."""
    raw = SERVED[name]
    text = raw.get("text_config", raw)
    plain = ModelConfig.from_hf(raw)
    changed = raw | ({"text_config": text | {"resid_pdrop": 0.2}} if text is not raw else {"resid_pdrop": 0.2})
    config = ModelConfig.from_hf(changed)
    assert dict(config.dropouts) == {**dict(plain.dropouts), "resid_pdrop": 0.2}
    assert replace(config, dropouts=plain.dropouts) == plain


GEMMA_4 = {
    "architectures": ["Gemma4ForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size_per_layer_input": 0,
}  # fmt: skip


def gemma_4(types, **changes):
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    layers = {"num_hidden_layers": len(types), "layer_types": [kinds[letter] for letter in types]}
    return ModelConfig.from_hf(GEMMA_4 | layers | changes)


@pytest.mark.parametrize("layers", [3, 12, 104])
def test_numbers_of_layers_are_read_with_and_without_zeros(layers):
    types = "s" * (layers - 1) + "f"
    for number in {str(layers - 1), f"{layers - 1:04d}"}:
        config = gemma_4(types, per_layer_config={number: {"head_dim": 16, "num_key_value_heads": 1}})
        assert config == gemma_4(types, global_head_dim=16, attention_k_eq_v=False, num_global_key_value_heads=1) or (
            config.layers[-1].attention.kv_heads == 1
        )
        assert (config.layers[-1].attention.head_dim, config.layers[0].attention.head_dim) == (16, 8)
    with pytest.raises(CheckpointError, match="other sizes than one for all full layers"):
        gemma_4(types, per_layer_config={"0": {"head_dim": 16}, str(layers - 1): {"head_dim": 16}})


@pytest.mark.parametrize("empty", [{}, {"2": {}}])
def test_a_table_without_differences_says_that_all_layers_have_the_same_heads(empty):
    config = gemma_4("ssf", per_layer_config=empty)
    assert config == gemma_4("ssf", global_head_dim=8)
    assert {layer.attention.head_dim for layer in config.layers} == {8}


@pytest.mark.parametrize(("types", "changes"), [
    ("fff", {"per_layer_config": {str(layer): {"head_dim": 16} for layer in range(3)}}),
    ("fff", {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("f", {"global_head_dim": 8}),
])  # fmt: skip
def test_models_whose_layers_are_all_alike_keep_what_these_have(types, changes):
    config = gemma_4(types, **changes)
    heads = {layer.attention.head_dim for layer in config.layers}
    assert heads == {16 if types == "fff" else 8}
    assert {layer.attention.k_is_v for layer in config.layers} == {changes.get("attention_k_eq_v", False)}
    assert {layer.attention.rope.share for layer in config.layers} == {0.25}
    assert ModelConfig.from_hf(config_json(config)) == config


def test_a_model_of_delta_nets_only_has_no_attention():
    saved = DEFAULTS["qwen3_5_text"] | {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
    config = ModelConfig.from_hf(saved)
    assert [type(layer.attention).__name__ for layer in config.layers] == ["DeltaNet"] * 2
    assert ModelConfig.from_hf(config_json(config)) == config
