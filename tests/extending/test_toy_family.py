"""Model families from another package that are no Llamas: norms before and after, GeGLU, soft caps, scaled embeddings,
windows in turn; a mixture of experts; and other keys and tensor names. transformers' Gemma-2 and Qwen3-MoE compute the
same, under their own names."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_jobs
from drawn import GOLDEN, distances, golden, golden_tokens
from safetensors.numpy import load_file, save_file

from benchmarks.saved_model import load_decoder
from lorafusion_jax.cli.main import run
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.models import ModelConfig, Segments

SOURCE = """
from lorafusion_jax.extend import Family

TOY = Family(
    architectures=("ToyForCausalLM",),
    keys={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "norm_epsilon": "rms_norm_eps",
        "act": "hidden_act",
        "score_cap": "attn_logit_softcapping",
        "word_cap": "final_logit_softcapping",
        "score_divisor": "query_pre_attn_scalar",
        "near": "sliding_window",
    },
    reads={"attention_bias": False, "layer_types": None},
    known=("colour",),
    fields={"norms": "sandwich", "norm_offset": 1.0, "embedding_scale": "sqrt"},
    windows=2,
    modules={
        "model.embed_tokens": "tokens",
        "model.layers": "blocks",
        "model.norm": "last_norm",
        "self_attn.q_proj": "attention.query",
        "mlp.down_proj": "feed.down",
        "post_feedforward_layernorm": "norm_4",
        "lm_head": "words",
    },
)
CROWD = Family(
    architectures=("CrowdForCausalLM",),
    keys={"crowd": "num_experts", "chosen": "num_experts_per_tok", "breadth": "moe_intermediate_size"},
    reads={"head_dim": 8, "attention_bias": False, "norm_topk_prob": True},
    fields={"qk_norm": True},
    experts={},
    expert_names=("crowd.{}.open", "crowd.{}.up", "crowd.{}.close"),
    modules={"mlp.router": "crowd.choice", "self_attn.q_norm": "self_attn.even"},
)
TURNED = Family(architectures=("TurnedForCausalLM",), rope={"interleaved": True})
NOTHING = 5
"""
TENSORS = {
    "model.embed_tokens.": "tokens.",
    "model.layers.": "blocks.",
    "model.norm.": "last_norm.",
    "self_attn.q_proj.": "attention.query.",
    "mlp.down_proj.": "feed.down.",
    "post_feedforward_layernorm.": "norm_4.",
    "lm_head.": "words.",
}
KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "rms_norm_eps": "norm_epsilon",
    "hidden_activation": "act",
    "attn_logit_softcapping": "score_cap",
    "final_logit_softcapping": "word_cap",
    "query_pre_attn_scalar": "score_divisor",
    "sliding_window": "near",
}
CROWD_TENSORS = {
    "mlp.gate.": "crowd.choice.",
    "mlp.experts.": "crowd.",
    ".gate_proj.": ".open.",
    ".up_proj.": ".up.",
    ".down_proj.": ".close.",
    ".q_norm.": ".even.",
}
CROWD_KEYS = {"num_local_experts": "crowd", "num_experts_per_tok": "chosen", "moe_intermediate_size": "breadth"}
GEMMA = "gemma2_untied"


def disguise(source: Path, directory: Path, keys=KEYS, tensor_names=TENSORS, without=(), **changes) -> Path:
    """Writes a folder of transformers under a toy's names, by hand."""
    config = json.loads((source / "config.json").read_text())
    config = {keys.get(key, key): value for key, value in config.items() if key not in without}
    config |= {"architectures": ["ToyForCausalLM"], "model_type": "toy"} | changes
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    for ours, theirs in tensor_names.items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


TWO_STAGES = ("mesh.stages=2", "mesh.layers=[1, 1]")


@pytest.fixture
def toy(install):
    return install(
        "toy_family",
        SOURCE,
        {"lorafusion_jax.families": {"toy": "TOY", "crowd": "CROWD", "turned": "TURNED", "nothing": "NOTHING"}},
    )


@pytest.fixture
def base(toy, make_base, tmp_path):
    """A random toy with a tokenizer, whose samples are longer than its window."""
    rope = Rope(theta=500.0)
    return make_base(
        tmp_path / "toy", family="toy", norms="sandwich", norm_offset=1.0, embedding_scale=32**0.5,
        activation="gelu_tanh", attention_soft_cap=2.0, final_soft_cap=5.0, attention_scale=0.3, norm_eps=1e-3,
        pattern=(LayerType(window=7, rope=rope), LayerType(rope=rope)), num_layers=2,
    )  # fmt: skip


@pytest.fixture
def job(base, tmp_path, write_rows):
    adapter = {
        "name": "law", "data": {"train": write_rows("law.jsonl", 8, 0, 20)}, "batch": {"global_samples": 4},
        "lora": {"rank": 2, "dropout": 0.1},
    }  # fmt: skip
    return str(small_jobs.write_job(tmp_path, base, [adapter]))


def assert_logits(folder: Path, case: str) -> None:
    """Those of a golden model."""
    model, tokens = load_decoder(folder, dtype=jnp.float32), golden_tokens(case)
    rows = np.arange(len(tokens))
    logits = jax.jit(lambda tokens: model(tokens, rows, Segments.from_lengths([len(rows)], len(rows))))
    assert distances(GOLDEN[case], {"logits": logits(tokens)})["logits"] <= 1e-5


def test_it_computes_what_transformers_does(toy, tmp_path):
    assert_logits(disguise(golden(GEMMA), tmp_path / "toy", colour="blue"), GEMMA)


def test_experts_compute_what_transformers_does(toy, tmp_path):
    unread = ("decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef", "sliding_window", "use_sliding_window")
    names = {"architectures": ["CrowdForCausalLM"], "model_type": "crowd"}
    source, without = golden("qwen3_moe"), (*unread, "max_position_embeddings")
    assert_logits(disguise(source, tmp_path / "crowd", CROWD_KEYS, CROWD_TENSORS, without, **names), "qwen3_moe")


def test_neighbouring_channels_turn_as_halves_do_with_reordered_weights(toy, tmp_path):
    names = {"architectures": ["TurnedForCausalLM"], "model_type": "turned"}
    folder = disguise(golden("llama2"), tmp_path / "turned", {}, {}, **names)
    tensors = load_file(folder / "model.safetensors")
    with pytest.raises(AssertionError):
        assert_logits(folder, "llama2")
    head_dim = ModelConfig.from_hf(folder).head_dim
    for name, tensor in tensors.items():
        if ".q_proj." in name or ".k_proj." in name:
            halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
            tensors[name] = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
    save_file(tensors, folder / "model.safetensors")
    assert_logits(folder, "llama2")


def trained(job, out, capsys, *changes) -> dict[str, np.ndarray]:
    assert run(["train", job, *changes, "--out", str(out)]) == 0, capsys.readouterr().err
    return load_file(out / "adapters" / "law" / "latest" / "adapter_model.safetensors")


def test_it_trains_on_several_devices_to_a_peft_folder(job, tmp_path, capsys):
    several = trained(job, tmp_path / "several", capsys, *TWO_STAGES)
    assert {name.split(".")[-3] for name in several} >= {"q_proj", "down_proj"}  # saved under Llama's names
    assert any(np.any(tensor) for name, tensor in several.items() if "lora_B" in name)


def test_one_device_and_several_train_to_the_same_peft_folder(job, tmp_path, capsys):
    single = trained(job, tmp_path / "single", capsys)
    several = trained(job, tmp_path / "several", capsys, *TWO_STAGES)
    for name, tensor in single.items():
        assert np.linalg.norm(several[name] - tensor) <= 1e-5 * np.linalg.norm(tensor), name


def test_a_family_that_is_not_installed_is_refused(tmp_path):
    folder = disguise(golden(GEMMA), tmp_path / "toy")
    with pytest.raises(Exception, match="unknown architecture ToyForCausalLM"):
        ModelConfig.from_hf(folder)


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"model_type": "nothing", "architectures": None}, "plugin.broken", "toy_family"),
        ({"architectures": ["ToyForTokenClassification"]}, "model.unsupported", "ToyForTokenClassification"),
        ({"n_embd": -1}, "model.bad-config", "hidden_size=-1"),
        ({"n_layer": None}, "model.bad-config", "n_layer is missing"),
        ({"attn_logit_softcapping": 50.0}, "model.unsupported", "attn_logit_softcapping=50.0: this key is not read"),
        ({"twist": 0}, "model.unsupported", "twist=0: this key is not read"),
        ({"act": "gelu_fast"}, "model.unsupported", "gelu_fast"),
        ({"layer_types": ["chunked_attention"] * 2}, "model.unsupported", "chunked_attention"),
        ({"near": None}, "model.bad-config", "sliding_window is missing"),
    ],
)
def test_files_that_do_not_fit_are_refused(base, job, capsys, changes, code, says):
    file = base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert run(["train", job, "--out", "unused"]) == 2
    shown = capsys.readouterr().err
    assert f"error[{code}]" in shown
    assert says in " ".join(shown.split())
    assert "Traceback" not in shown
