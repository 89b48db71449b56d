"""Two keys of a config.json that say one thing: equal, or an error that names both."""

from __future__ import annotations

import json

import pytest
from published import SERVED
from test_saved_configs import DEFAULTS as SAVED

from benchmarks.saved_model import config_json
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.families.family import Family
from lorafusion_jax.families.multimodal import WRAPPERS
from lorafusion_jax.families.table import FAMILIES
from lorafusion_jax.models import ModelConfig

# Of Ling, which transformers does not have, a published one.
DEFAULTS = SAVED | {"bailing_moe_v2": SERVED["Ling-mini-2.0"] | {"model_type": "bailing_moe_v2"}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
NESTED = {
    "full_attention": YARN | {"rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CONTEXT, DEEP = "original_max_position_embeddings", "qk_nope_head_dim"
OLDER = {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}}


def refusal(raw) -> str:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_hf(raw)
    return caught.value.what


def names_differ(raw) -> bool:
    try:
        ModelConfig.from_hf(raw)
    except CheckpointError as error:
        return "name different models" in error.what
    return False


@pytest.mark.parametrize("model_type", [*FAMILIES, *WRAPPERS, "kimi_k2", "my-llama"])
def test_architectures_and_model_type_name_one_family(model_type):
    for family, row in FAMILIES.items():
        for architecture in row.architectures:
            raw = DEFAULTS[family] | {"architectures": [architecture], "model_type": model_type}
            same = model_type == family or model_type in row.model_types
            same = same or (model_type in FAMILIES and architecture in FAMILIES[model_type].saved_as)
            assert names_differ(raw) is not same, architecture


@pytest.mark.parametrize("family", FAMILIES)
def test_one_of_both_names_is_enough_and_two_architectures_are_too_many(family):
    config, other = DEFAULTS[family], "GemmaForCausalLM" if family != "gemma" else "LlamaForCausalLM"
    for left_out in ("architectures",) if FAMILIES[family].saved_as else ("architectures", "model_type"):
        short = {key: value for key, value in config.items() if key != left_out}
        assert ModelConfig.from_hf(short) == ModelConfig.from_hf(config)
    assert names_differ(config | {"architectures": [*config["architectures"], other]})


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_of_multimodal_models_agree_and_so_do_those_of_their_text(wrapper):
    architecture, families = WRAPPERS[wrapper]
    whole = {"architectures": [architecture], "model_type": wrapper, "text_config": DEFAULTS[families[0]]}
    config = ModelConfig.from_hf(whole)
    assert ModelConfig.from_hf({key: value for key, value in whole.items() if key != "architectures"}) == config
    for other in {*WRAPPERS, *FAMILIES} - {wrapper}:
        assert names_differ(whole | {"model_type": other}), other
    assert names_differ(whole | {"text_config": whole["text_config"] | {"architectures": ["GraniteForCausalLM"]}})


PAIRS = [  # family, keys of which the first two differ
    ("llama", {"dtype": "float16", "torch_dtype": "bfloat16"}),
    ("qwen3_moe", {"num_experts": 128, "num_local_experts": 64}),
    ("qwen2_moe", {"num_experts": 60, "num_local_experts": 64}),
    ("qwen3_next", {"num_local_experts": 64, "num_experts": None}),
    ("glm4_moe", {"n_routed_experts": 128, "num_local_experts": 64}),
    ("deepseek_v3", {"num_nextn_predict_layers": 1, "num_mtp_layers": 2}),
    ("gpt_oss", {"num_experts_per_tok": 4, "experts_per_token": 2}),
    ("gpt_oss", {"experts_per_token": 2, "num_experts_per_tok": None}),
    ("gemma2", {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}),
    ("gemma3_text", {"hidden_act": "silu", "hidden_activation": None}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "silu"}),
    ("deepseek_v3", {"head_dim": 128, "qk_rope_head_dim": 64}),
    ("glm4_moe_lite", {"qk_head_dim": 192, DEEP: 192}),
    ("gemma4_text", {"global_head_dim": 256, "per_layer_config": {str(n): {"head_dim": 512} for n in range(5, 30, 6)}}),
    ("gemma4_text", {
        "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "per_layer_config": {str(n): {"head_dim": 512, "num_key_value_heads": 2} for n in range(5, 30, 6)},
    }),
    ("qwen3", {"rope_scaling": YARN, "rope_parameters": PLAIN}),
    ("smollm3", {"rope_scaling": LINEAR, "rope_parameters": YARN}),
    ("granite", {"rope_scaling": {"rope_type": "default"}, "rope_parameters": LINEAR}),
    ("llama", {"rope_scaling": YARN | {"factor": 8.0}, "rope_parameters": YARN}),
    ("mistral", {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"rope_theta": 5e5}, "rope_theta": None}),
    ("olmo3", {"rope_scaling": LINEAR, "rope_parameters": NESTED}),
    ("qwen2", {"rope_theta": 1e4, "rope_parameters": PLAIN}),
    ("olmo2", {"rope_theta": 1e4, "rope_scaling": LINEAR | {"rope_theta": 1e6}, "rope_parameters": None}),
    ("ministral3", {"rope_theta": 1e4, "rope_parameters": None}),
    ("gemma3_text", {"rope_theta": 1e5, "rope_parameters": NESTED}),
    ("gemma3_text", {"rope_local_base_freq": 1e5, "rope_parameters": NESTED}),
    ("gemma4_text", {"rope_theta": 1e4}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "type": "linear", "factor": 4.0}, "rope_scaling": None}),
    ("qwen3_5_text", {"partial_rotary_factor": 0.5, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}}),
    ("phi3", {CONTEXT: 2048, "rope_parameters": PLAIN | {CONTEXT: 4096}}),
    ("ministral3", {"max_position_embeddings": 4096, "rope_parameters": YARN | {"max_position_embeddings": 8192}}),
    ("nemotron_h", {"hybrid_override_pattern": "ME*M"}),
    ("gpt_oss", {"initial_context_length": 2048, "rope_parameters": None}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "keys"), PAIRS, ids=[f"{family}-{next(iter(keys))}" for family, keys in PAIRS])
def test_spellings_of_one_thing_that_differ_are_refused_by_name(family, keys):
    message = refusal(DEFAULTS[family] | keys)
    assert next(iter(keys)) in message
    assert "differ" in message


EQUAL = [
    ("llama", {"dtype": "bfloat16", "torch_dtype": "torch.bfloat16"}, {}),
    ("qwen3_moe", {"num_experts": 16, "num_local_experts": 16}, {"num_experts": 16, "num_local_experts": None}),
    ("gpt_oss", {"experts_per_token": 4}, {}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, {}),
    ("deepseek_v3", {"head_dim": 64, "qk_head_dim": 192}, {}),
    ("gpt_oss", {"initial_context_length": 4096, "rope_parameters": None}, {}),
    ("qwen3", {"rope_scaling": YARN | {"type": "yarn"}, "rope_parameters": YARN}, {"rope_parameters": YARN}),
    ("llama", {"rope_scaling": LINEAR | {"factor": 2}, "rope_parameters": LINEAR}, {"rope_parameters": LINEAR}),
    ("gemma3_text", {"rope_scaling": YARN, "rope_parameters": NESTED, "rope_theta": 1e6}, {"rope_parameters": NESTED}),
    ("olmo3", {"rope_scaling": YARN, "rope_parameters": None, "rope_theta": 1e6}, {
        "rope_parameters": {"full_attention": YARN | {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 5e5}},
    }),
]  # fmt: skip


@pytest.mark.parametrize(("family", "twice", "once"), EQUAL, ids=[f"{row[0]}-{next(iter(row[1]))}" for row in EQUAL])
def test_equal_spellings_are_read_as_one(family, twice, once):
    assert ModelConfig.from_hf(DEFAULTS[family] | twice) == ModelConfig.from_hf(DEFAULTS[family] | once)


LOCAL, OF_N, BLOCKS, TIED = "num_local_experts", "n_routed_experts", "layers_block_type", "tie_word_embeddings"
SECOND = {  # family → second spellings that transformers 5.23 reads there
    "mixtral": {"num_experts": LOCAL}, "gpt_oss": {"num_experts": LOCAL}, "qwen3_moe": {"num_experts": LOCAL},
    "minimax_m2": {"num_experts": LOCAL}, "olmoe": {LOCAL: "num_experts"}, "lfm2_moe": {"tie_embedding": TIED},
    "lfm2": {"tie_embedding": TIED, "block_ff_dim": "intermediate_size"}, "granitemoehybrid": {BLOCKS: "layer_types"},
    "nemotron_h": {
        "layer_types": BLOCKS, LOCAL: OF_N, "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand", "mamba_conv_bias": "use_conv_bias", "mamba_dt_min": "time_step_min",
    },
    "deepseek_v2": {"num_experts": OF_N, LOCAL: OF_N}, "deepseek_v3": {LOCAL: OF_N, "num_experts": OF_N},
    "deepseek_v32": {LOCAL: OF_N, "num_experts": OF_N}, "glm_moe_dsa": {LOCAL: OF_N, "num_experts": OF_N},
    "glm4_moe": {LOCAL: OF_N, "num_experts": OF_N}, "glm4_moe_lite": {LOCAL: OF_N, "head_dim": "qk_rope_head_dim"},
    "dots1": {LOCAL: OF_N}, "mistral4": {LOCAL: OF_N},
}  # fmt: skip


@pytest.mark.parametrize("family", SECOND)
def test_a_second_spelling_is_the_first_or_refused(family):
    saved = DEFAULTS[family]
    config = ModelConfig.from_hf(saved)
    for key, first in SECOND[family].items():
        value = saved[first]
        other = not value if isinstance(value, bool) else 2 * value if isinstance(value, int | float) else value[::-1]
        without = {name: kept for name, kept in saved.items() if name != first}
        assert reading(saved | {key: value}) in (config, None), key
        assert reading(without | {key: value}) in (config, None), key
        assert reading(saved | {key: other}) is None, key
        assert reading(without | {key: other}) in (reading(saved | {first: other}), None), key


def reading(raw) -> ModelConfig | None:
    try:
        return ModelConfig.from_hf(raw)
    except CheckpointError:
        return None


@pytest.mark.parametrize(("family", "keys", "words"), [
    ("gemma3_text", {"rope_parameters": PLAIN}, "rope_parameters of all layers together"),
    ("olmo3", {"rope_parameters": YARN}, "rope_parameters of all layers together"),
    ("gemma4_text", {"rope_parameters": PLAIN}, "rope_parameters of all layers together"),
    ("gemma4_unified_text", {"rope_parameters": None, "rope_scaling": LINEAR}, "rope_scaling of all layers together"),
    ("gemma3_text", OLDER, "rope_scaling.rope_type"),
])  # fmt: skip
def test_ropes_that_transformers_does_not_read_are_refused(family, keys, words):
    assert words in refusal(DEFAULTS[family] | keys)


def test_ropes_by_type_of_layer_are_read_where_transformers_reads_them():
    """Its other families look for one rope in this table, and fail or compute with a default of theirs."""
    by_type = {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN | {"rope_theta": 2e4}}}
    rotating = [family for family in DEFAULTS if "rope_parameters" in FAMILIES[family].meanings]
    families = {family for family in rotating if reading(DEFAULTS[family] | by_type) is not None}
    assert families == {"gemma3_text", "gemma4_text", "gemma4_unified_text", "olmo3"}


@pytest.mark.parametrize("keys", [
    {"rope_parameters": {"rope_type": ["yarn"], "type": {}}},
    {"rope_scaling": [1], "rope_parameters": {"a": {"b": []}}},
    {"dtype": {}, "torch_dtype": []}, {"model_type": {"llama": 1}},
    {"rope_theta": "x", "rope_scaling": {"rope_theta": []}},
    {"text_config": [], "architectures": ["Gemma3ForConditionalGeneration"]}, {"model_type": []},
])  # fmt: skip
def test_values_of_wrong_types_end_in_a_named_error(keys):
    assert refusal(DEFAULTS["llama"] | keys)


@pytest.mark.parametrize(("keys", "words"), [
    ({"hidden_size": 64}, "hidden_size=64 and text_config.hidden_size=2304 differ"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings=False and text_config.tie_word_embeddings=True differ"),
    ({"attention_bias": True}, "attention_bias=True and text_config.attention_bias=False differ"),
    ({"rope_scaling": LINEAR}, "belongs into text_config"),
])  # fmt: skip
def test_keys_beside_the_text_part_are_refused_unless_they_are_equal(keys, words):
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": DEFAULTS["gemma3_text"]}
    assert words in refusal(whole | keys)
    equal = {"hidden_size": 2304, "tie_word_embeddings": True, "boi_token_index": 5, "dtype": "float32"}
    assert ModelConfig.from_hf(whole | equal) == ModelConfig.from_hf(whole)


def test_a_cap_that_the_whole_model_does_not_apply_is_not_applied():
    """Measured with transformers 5.23: a cap of 0.01 leaves logits of 0.24 as they are."""
    text = DEFAULTS["gemma3_text"] | {"final_logit_softcapping": 7.5}
    config = ModelConfig.from_hf({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert config.final_soft_cap is None
    assert config.dropouts[-1] == ("text_config.final_logit_softcapping", 7.5)
    assert ModelConfig.from_hf(text).final_soft_cap == 7.5


def test_a_key_that_is_there_twice_has_one_value(tmp_path):
    text = json.dumps(DEFAULTS["llama"])
    (tmp_path / "config.json").write_text(text[:-1] + ', "vocab_size": 32000}')
    ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text(text[:-1] + ', "model_type": "gemma"}')
    with pytest.raises(CheckpointError, match="'model_type' is there twice"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize(("keys", "spelled"), [
    ({"spin": "partial_rotary_factor"}, {"spin": 0.5}), ({"kinds": "layer_types"}, {"kinds": ["full_attention"] * 2}),
    ({"bare": "no_rope_layers"}, {"bare": [1, 0]}),
])  # fmt: skip
def test_keys_that_a_family_renames_are_read_without_a_default(keys, spelled, monkeypatch):
    row = Family(architectures=("SpinForCausalLM",), keys=keys, windows="unrotated" if "bare" in keys else "never")
    monkeypatch.setitem(FAMILIES, "spin", row)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ModelConfig.from_hf({"model_type": "spin", "vocab_size": 64, **sizes, **spelled})
    assert ModelConfig.from_hf(config_json(config)) == config
    assert config.rope_channels == (4 if "spin" in keys else None)
    assert [layer.attention.rope is None for layer in config.layers] == [False, "bare" in keys]
    with pytest.raises(CheckpointError, match="is spin here" if "spin" in keys else "entries|layers of type|not"):
        ModelConfig.from_hf({"model_type": "spin", "vocab_size": 64, **sizes, next(iter(keys)): 7})


def test_a_window_that_is_null_is_refused_where_the_family_has_layers_with_one():
    """transformers 5.23 loads such a file and fails in its first pass; where all layers may do without, it computes."""
    for family, row in FAMILIES.items():
        raw = DEFAULTS[family] | {"sliding_window": None, "layer_types": None}
        if isinstance(row.windows, int) or row.period:
            assert "sliding_window is missing, and the family has layers of" in refusal(raw)
        elif "sliding_window" in row.meanings:
            config = ModelConfig.from_hf(raw)
            assert not any([config.sliding_window, *(layer.window for layer in config.pattern or ())])
