"""config.json → ModelConfig."""

import json
import math
import os

import pytest
from drawn import GOLDEN

from benchmarks.saved_model import config_json
from lorafusion_jax.errors import CheckpointError, ConfigError
from lorafusion_jax.extend import Family
from lorafusion_jax.families.multimodal import WRAPPERS
from lorafusion_jax.families.table import FAMILIES
from lorafusion_jax.models import ModelConfig, RopeScaling

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

GROUPS = {
    "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 10, "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
}  # fmt: skip


def read(**changes) -> ModelConfig:
    return ModelConfig.from_hf(LLAMA | changes)


@pytest.mark.parametrize("case", GOLDEN)
def test_parameter_count_matches_the_file(case):
    row = GOLDEN[case]
    assert ModelConfig.from_hf(row["config"]).num_parameters == sum(map(math.prod, row["tensors"].values()))


def test_fields_are_read():
    config = read(rope_theta=500000.0, max_position_embeddings=131072, tie_word_embeddings=True)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.norm_eps, config.rope_theta, config.max_positions) == (1e-5, 500000.0, 131072)
    assert config.tie_embeddings
    assert {config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm} == {False}


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
], ids=["rope_type", "type", "rope_parameters"])  # fmt: skip
def test_spellings_of_rope_scaling_are_equivalent(spelling):
    config = read(**spelling)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(kind="llama3", factor=8.0)


@pytest.mark.parametrize(
    "none", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}]
)
def test_no_scaling(none):
    assert read(**none).rope_scaling is None
    assert read(**none).rope_theta == 10000.0


@pytest.mark.parametrize(("changes", "qkv", "o", "mlp", "norm"), [
    ({}, False, False, False, False),
    ({"attention_bias": True, "mlp_bias": True}, True, True, True, False),
    ({"architectures": ["Qwen2ForCausalLM"]}, True, False, False, False),
    ({"architectures": ["Qwen3ForCausalLM"]}, False, False, False, True),
    ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, True, True, False, True),
    ({"architectures": ["MistralForCausalLM"]}, False, False, False, False),
])  # fmt: skip
def test_families_differ_in_biases_and_norms(changes, qkv, o, mlp, norm):
    config = read(**changes)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (qkv, o, mlp, norm)


def test_qwen3_has_heads_of_128_unless_it_says_otherwise():
    assert read(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert read(architectures=["Qwen3ForCausalLM"], head_dim=32).head_dim == 32


@pytest.mark.parametrize(("changes", "window"), [
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, 4096),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
    ({"architectures": ["MistralForCausalLM"]}, 4096),
    ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False}, None),
    ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
     None),
    ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
     64),
    ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "layer_types": ["full_attention"] * 2}, None),
])  # fmt: skip
def test_sliding_window_is_known_where_it_is_active(changes, window):
    windows = {layer.attention.window for layer in read(**changes).layers}
    assert windows == ({None, window} if changes.get("max_window_layers") == 1 else {window})


def test_every_sixth_layer_of_gemma_3_sees_everything():
    layers = read(architectures=["Gemma3ForCausalLM"], sliding_window=8, num_hidden_layers=13).layers
    assert [n for n, layer in enumerate(layers) if layer.attention.window is None] == [5, 11]


@pytest.mark.parametrize(("changes", "positions"), [
    ({"max_position_embeddings": 256}, 256),
    ({}, 2048),
    ({"architectures": ["Qwen2ForCausalLM"]}, 32768),
    ({"max_position_embeddings": 256, "rope_scaling": {"type": "linear", "factor": 4}}, 1024),
    ({"max_position_embeddings": 256, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 256),
    ({"max_position_embeddings": 256, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 256),
])  # fmt: skip
def test_samples_beyond_the_positions_are_refused(changes, positions):
    config = read(**changes)
    config.check_length(positions)
    with pytest.raises(CheckpointError, match=f"{positions + 1} tokens.*knows {positions} positions") as caught:
        config.check_length(positions + 1)
    assert caught.value.fix == f"data.max_length: {positions}"


@pytest.mark.parametrize("changes", [
    {"architectures": [["LlamaForCausalLM"]]},
    {"architectures": 5},
    {"architectures": None, "model_type": ["llama"]},
    {"num_hidden_layers": 10**9},
    {"vocab_size": 10**12},
    {"vocab_size": True},
    {"hidden_size": 2},
    *({"rms_norm_eps": value} for value in ("abc", math.nan, [1], 0, -1.0)),
    {"max_position_embeddings": "x"},
    *({"rope_theta": value} for value in ("x", math.nan, -5)),
    {"rope_scaling": {"type": ["linear"], "factor": 2}},
    {"rope_scaling": {"type": "linear", "factor": 0}},
    {"rope_scaling": {"type": "linear"}},
    {"quantization_config": "gptq"},
    {"architectures": ["MistralForCausalLM"], "sliding_window": "x"},
    {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "layer_types": 3},
    {"tie_word_embeddings": "no"},
])  # fmt: skip
def test_values_of_wrong_types_and_ranges_are_refused(changes):
    with pytest.raises(CheckpointError) as caught:
        read(**changes)
    assert caught.value.code == "model.bad-config"
    assert next(key for key in reversed(changes)) in caught.value.what or "rope" in str(changes)


@pytest.mark.parametrize("text", ['{"a": ' * 5000, '{"vocab_size": ' + "9" * 5000 + "}"])
def test_unreadable_files_are_errors(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.bad-config"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize(("changes", "message"), [
    ({"architectures": ["GPTJForCausalLM"]}, "unknown architecture GPTJForCausalLM"),
    ({"architectures": None, "model_type": "bert"}, "model_type 'bert'"),
    ({"rope_scaling": {"rope_type": "twisted", "factor": 4.0}}, "rope_type 'twisted'"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "alpha": 9.0}}, "rope parameter 'alpha' of dynamic"),
    ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [2, 3, 3]}}, "mrope"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta_fast": 2}}, "rope parameter 'beta_fast' of linear"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor, high_freq_factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_act": "gelu_fast"}, "hidden_act 'gelu_fast'"),
    ({"attention_dropout": -0.1}, "attention_dropout=-0.1 is not a number from 0 to 1"),
    ({"resid_pdrop": True}, "resid_pdrop=True is not a number from 0 to 1"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: this key is not read"),
    ({"sliding_window": 64}, "sliding_window=64"),
    ({"rope_twist": "left"}, "rope_twist='left'"),
    ({"quantization_config": {"quant_method": "hqq"}}, "quantised weights (hqq)"),
    ({"num_local_experts": 8}, "mixture of experts"),
    ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
    ({"head_dim": 7}, "head_dim=7 is odd"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"hidden_size": "64"}, "hidden_size='64' is not a positive integer"),
    (GROUPS | {"n_group": 4}, "n_group=4 does not cut 10 experts into equal groups of two or more"),
    (GROUPS | {"n_group": 10}, "n_group=10 does not cut 10 experts into equal groups of two or more"),
    (GROUPS | {"n_group": 5, "topk_group": 1}, "topk_group=1 groups of 5 cannot have num_experts_per_tok=3 experts"),
    (GROUPS | {"n_group": 2, "topk_group": 3}, "topk_group=3 groups of 2"),
])  # fmt: skip
def test_unsupported_settings_are_errors(changes, message):
    with pytest.raises(CheckpointError) as caught:
        read(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(("family", "activation"), [("gemma", "gelu_tanh"), ("llama", "gelu")])
def test_a_gemma_that_says_gelu_means_its_approximation(family, activation):
    """As in the first files of Gemma, and as transformers reads them."""
    raw = GOLDEN["gemma" if family == "gemma" else "llama2"]["config"]
    assert ModelConfig.from_hf(raw | {"hidden_act": "gelu"}).activation == activation


def test_all_problems_come_in_one_message():
    with pytest.raises(CheckpointError) as caught:
        read(architectures=["MambaForCausalLM"], hidden_act="elu", vocab_size=0, rope_scaling={"type": "twisted"})
    for message in ("MambaForCausalLM", "elu", "vocab_size=0", "twisted"):
        assert message in str(caught.value)


def test_absent_and_broken_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="no model here") as caught:
        ModelConfig.from_hf(tmp_path)
    assert caught.value.where == str(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        ModelConfig.from_hf(os.fspath(tmp_path))


@pytest.mark.parametrize("changes", [
    {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "attention_bias": True, "mlp_bias": True},
    {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    {"rope_scaling": {"type": "linear", "factor": 2}},
    {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
    {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
    {"architectures": ["MistralForCausalLM"], "sliding_window": None},
])  # fmt: skip
def test_config_round_trip(changes, tmp_path):
    config = read(**changes)
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    assert ModelConfig.from_hf(tmp_path) == config
    for spelling in ("rope_scaling", "rope_parameters"):
        assert ModelConfig.from_hf({k: v for k, v in config_json(config).items() if k != spelling}) == config


def test_a_dynamic_rope_is_a_plain_one_up_to_the_last_position():
    """transformers begins to stretch it after `max_position_embeddings`, and longer samples are refused."""
    assert read(rope_scaling={"rope_type": "dynamic", "factor": 4.0}) == read()


@pytest.mark.parametrize("wrapper", ["qwen2_vl", "qwen2_5_vl"])
def test_published_qwen_vl_have_the_keys_of_their_text_beside_those_of_images(wrapper):
    architecture = WRAPPERS[wrapper][0]
    text = {key: value for key, value in LLAMA.items() if key != "architectures"} | {
        "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    images = {"vision_config": {"depth": 2}, "image_token_id": 9, "vision_start_token_id": 3}
    flat = ModelConfig.from_hf({"architectures": [architecture], "model_type": wrapper} | text | images)
    nested = {"architectures": [architecture], "model_type": wrapper, "text_config": text} | images
    assert flat == ModelConfig.from_hf(nested)
    assert (flat.wrapper, flat.family, flat.qkv_bias) == (wrapper, f"{wrapper}_text", True)
    with pytest.raises(CheckpointError, match="twist=2"):
        ModelConfig.from_hf({"architectures": [architecture], "twist": 2} | text | images)


def test_number_of_parameters_of_a_known_model():
    llama_8b = read(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                    num_attention_heads=32, num_key_value_heads=8)  # fmt: skip
    assert llama_8b.num_parameters == 8_030_261_248


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CHANNELS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def compressed(**weights):
    return COMPRESSED | {"config_groups": {"group_0": {"weights": CHANNELS | weights}}}


@pytest.mark.parametrize(("quantization", "name"), [
    (NF4 | {"bnb_4bit_use_double_quant": True}, "bitsandbytes-nf4"),
    (NF4, "bitsandbytes-nf4-single"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes-int8"),
    (compressed(), "compressed-tensors-fp8"),
    (compressed(strategy="block", block_structure=[128, 128]), "compressed-tensors-fp8-blocks"),
    (compressed(type="int") | {"format": "int-quantized"}, "compressed-tensors-int8"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-blocks"),
    ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, "fp8-tensors"),
])  # fmt: skip
def test_quantised_checkpoints_have_a_format(quantization, name):
    assert read(quantization_config=quantization).checkpoint_format == name


@pytest.mark.parametrize(("quantization", "shown"), [
    (NF4 | {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4'"),
    (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage='bfloat16'"),
    ({"quant_method": "bitsandbytes"}, "load_in_4bit=None"),
    (compressed(strategy="group"), "strategy='group'"),
    (compressed(num_bits=4), "num_bits=4"),
    (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config="),
    (COMPRESSED, "without exactly one group"),
    (COMPRESSED | {"config_groups": {"a": 5}}, "without exactly one group"),
    ({"quant_method": "fp8"}, "weight_block_size=None"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8 with weight_block_size=[64, 64]"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "(modelopt, NVFP4)"),
    ({"group_size": 64, "bits": 4}, "(MLX, 4 bits)"),
    ({"quant_method": ["fp8"]}, "without quant_method"),
    ({}, "without quant_method"),
])  # fmt: skip
def test_other_quantised_checkpoints_are_refused_by_name(quantization, shown):
    with pytest.raises(CheckpointError) as caught:
        read(quantization_config=quantization)
    assert caught.value.code == "model.unsupported"
    assert shown in str(caught.value)


def test_what_other_programs_write_elsewhere_of_quantised_weights_is_found(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GOLDEN["llama2"]["config"]))
    of_modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(of_modelopt))
    with pytest.raises(CheckpointError, match=r"quantised weights \(modelopt, NVFP4\)"):
        ModelConfig.from_hf(tmp_path)
    of_caches = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}  # weights are as they were
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(of_caches))
    assert ModelConfig.from_hf(tmp_path).checkpoint_format is None
    with pytest.raises(CheckpointError, match=r"quantised weights \(MLX, 4 bits\).*fp8, int8 or nf4\.\n"):
        read(quantization={"group_size": 64, "bits": 4})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reads": {"layer_norm_eps": 1e-5}}, "did you mean 'rms_norm_eps'"),
        ({"keys": {"spin": "partial_rotary_factors"}}, "did you mean 'partial_rotary_factor'"),
        ({"reads": {"twist": 0}}, "'twist', which means nothing here"),
    ],
)
def test_a_family_reads_no_key_that_would_change_nothing(options, says):
    with pytest.raises(ValueError, match=says):
        Family(architectures=("ToyForCausalLM",), **options)


def test_fields_that_no_model_has_are_named(monkeypatch):
    raw = GOLDEN["llama2"]["config"]
    monkeypatch.setitem(FAMILIES, "twisted", Family(architectures=("TwistedForCausalLM",), fields={"twist": 1}))
    with pytest.raises(ConfigError, match=r"plugin\.broken.*twisted has fields that no model has: twist"):
        ModelConfig.from_hf(raw | {"architectures": ["TwistedForCausalLM"], "model_type": "twisted"})
