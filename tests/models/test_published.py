"""Published models are served, or refused by the one key that is not. A key changed alone is followed or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from drawn import GOLDEN
from published import REFUSED, SERVED
from test_drawn_families import ROWS

from benchmarks.saved_model import config_json
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.families.hf_config import HARMLESS
from lorafusion_jax.families.refused import REFUSED as REFUSED_FAMILIES
from lorafusion_jax.families.table import FAMILIES
from lorafusion_jax.models import ModelConfig

BILLION = {
    "Llama-3.1-8B": 8.03,
    "gpt2": 0.1244,
    "Ling-mini-2.0": 16.26,
    "Ling-flash-2.0": 102.9,
    "gpt2-xl": 1.5576,
    "gemma-2-9b": 9.24,
    "phi-4": 14.66,
    "OLMo-2-7B": 7.3,
    "Qwen3-8B": 8.19,
    "gemma-3-1b": 1.0,
    "Mixtral-8x7B": 46.7,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "Qwen3.5-9B": 8.95,
    "Qwen3-Next-80B-A3B": 79.7,
    "DeepSeek-V3 in bfloat16": 671.0,
    "Kimi-K2 in bfloat16": 1026.0,
    "gemma-4-31B": 30.7,
    "gemma-4-26B-A4B": 25.2,
    "GLM-4.7-Flash": 29.9,
    "Qwen3.5-35B-A3B": 34.7,
    "Qwen3.5-27B": 26.9,
    "Qwen1.5-MoE-A2.7B": 14.3,
    "GLM-4.5-Air": 106.9,
    "GLM-4.5": 353,
    "EXAONE-3.0-7.8B": 7.82,
    "EXAONE-3.5-2.4B": 2.41,
    "Sarvam-30B": 32.15,
    "Sarvam-105B": 106.0,
    "Apertus-1.5-8B": 8.61,
}


@pytest.mark.parametrize("name", SERVED)
def test_published_models_are_read_and_written(name):
    config = ModelConfig.from_hf(SERVED[name])
    raw = SERVED[name]
    assert len(config.layers) == next(raw[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in raw)
    if name in BILLION:
        assert config.num_parameters / 1e9 == pytest.approx(BILLION[name], rel=0.01)
    assert ModelConfig.from_hf(config_json(config)) == replace(config, packed=None)  # it is written plain


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_the_key_that_is_not_served(name):
    config, key = REFUSED[name]
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_hf(config)
    assert caught.value.code == "model.unsupported"
    assert key in caught.value.what
    if "unknown architecture" not in caught.value.what:
        assert ";" not in caught.value.what, "more than one reason"


def test_every_family_says_what_the_page_of_models_shows():
    assert all(row.models and row.beyond and "|" not in row.models + row.beyond for row in FAMILIES.values())


@pytest.mark.parametrize("family", REFUSED_FAMILIES, ids=lambda family: family.models)
def test_families_are_refused_by_name_with_the_reason(family):
    """By architecture, by model_type alone, and without the problems of keys that only such a family has."""
    sizes = {"hidden_size": 15, "num_attention_heads": 5, "hidden_act": "of its own", "attention_chunk_size": 8}
    for name in family.names:
        assert not any(name in (key, *row.architectures, *row.model_types) for key, row in FAMILIES.items())
        names = {"model_type": name} if name.islower() else {"architectures": [name], "model_type": family.names[0]}
        with pytest.raises(CheckpointError) as caught:
            ModelConfig.from_hf(names | sizes)
        assert caught.value.code == "model.unsupported"
        assert caught.value.what == f"this model is not supported: {name} ({family.models}): {family.reason}."


def changed(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 2, 2 * value + 2]
    if isinstance(value, float):
        return [value * 1.5 + 0.25]
    if isinstance(value, dict):
        # Where a model has the original context outside of it, too, that one counts.
        keys = [key for key in value if key != "original_max_position_embeddings"]
        return [value | {key: other} for key in keys for other in changed(value[key])[:1]]
    if value == "sliding_attention":
        return ["full_attention"]
    if isinstance(value, str):
        return ["other"]
    if isinstance(value, list) and value and all(item in (0, 1) for item in value):
        return [[1 - value[0], *value[1:]]]
    if isinstance(value, list) and value:
        return [[changed(value[0])[0], *value[1:]]]
    return [[1]] if value == [] else [3]


def only_idle(value: dict[str, Any], other: dict[str, Any], family: str) -> bool:
    """Whether ropes differ in what has no effect on text, or only after the last position."""
    idle = {*FAMILIES[family].known_of_rope} - {"alpha"} | (
        {"factor"} if value.get("rope_type") == "dynamic" else set()
    )
    return {key for key in value if value[key] != other[key]} <= idle


def config_of_case(case: str) -> dict[str, Any]:
    raw = (GOLDEN | ROWS)[case]["config"]
    return raw.get("text_config", raw)


@pytest.mark.parametrize("case", [*GOLDEN, *ROWS])
def test_every_key_that_changes_alone_is_followed_or_refused(case):
    raw = config_of_case(case)
    plain = ModelConfig.from_hf(raw)
    known = HARMLESS | {*FAMILIES[plain.family].known}
    silent = []
    for key, value in raw.items():
        for other in changed(value):
            try:
                same = ModelConfig.from_hf(raw | {key: other}) == plain
            except CheckpointError:
                continue
            if same and key not in known and not (key == "rope_parameters" and only_idle(value, other, plain.family)):
                silent.append(f"{key}={other}")
    # What transformers does not use in this state of the others.
    idle = {
        "use_sliding_window", "sliding_window", "max_window_layers", "no_rope_layer_interval",
        "original_max_position_embeddings", "first_k_dense_replace", "sliding_window_pattern",
    }  # fmt: skip
    if raw.get("num_local_experts") == 0:
        idle |= {"intermediate_size", "num_experts_per_tok"}
    if raw.get("block_auto_adjust_ff_dim") is False:
        idle |= {"block_ffn_dim_multiplier", "block_multiple_of"}
    if raw["model_type"] == "granitemoehybrid" and raw["position_embedding_type"] != "rope":
        idle |= {"rope_parameters"}
    if raw["model_type"] == "nemotron_h" and "moe" not in raw["layers_block_type"]:
        idle |= {key for key in raw if "expert" in key or "moe" in key or "topk" in key or key == "n_group"}
        idle |= {"norm_topk_prob", "routed_scaling_factor"}
    if "moe_layers" in raw:  # which says the layers themselves
        idle |= {"interleave_moe_layer_step"}
    if raw.get("attn_temperature_tuning") is False:
        idle |= {"attn_scale", "floor_scale"}
    if raw.get("mamba_d_ssm") is not None:
        idle |= {"mamba_expand"}
    if raw.get("mamba_rms_norm") is False:
        idle |= {"mamba_norm_before_gate"}
    if raw.get("topk_method") == "greedy":
        idle |= {"n_group", "topk_group"}
    if raw.get("enable_moe_block") is False:
        idle |= {"num_experts", "top_k_experts", "moe_intermediate_size"}
    if not raw.get("hidden_size_per_layer_input"):
        idle |= {"vocab_size_per_layer_input"}
    if not raw.get("num_kv_shared_layers"):  # only layers that read keys have a wider MLP
        idle |= {"use_double_wide_mlp"}
    types = raw.get("layer_types") or []
    unrotated = FAMILIES[plain.family].rotated == "windows" and {*types} == {"full_attention"}
    if len({*types}) == 1 and (
        unrotated or "full_attention" in raw.get("rope_parameters", {})
    ):  # nor ropes of no layer
        idle |= {"rope_parameters"}
    assert [warning for warning in silent if warning.partition("=")[0] not in idle] == []
