"""The model, adapter and rows on which TRL and this package are compared. Needs numpy and safetensors only."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

BATCH, STEPS, ROWS = 4, 20, 20
LR, RANK, ALPHA = 1e-3, 4, 8
TARGETS = ("q_proj", "down_proj")
LAYERS, WIDTH, MLP, VOCAB = 2, 32, 48, 3072
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": MLP,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 1024,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "torch_dtype": "float32",
}  # fmt: skip
WORDS = (
    "adapter", "base", "batch", "cache", "file", "graph", "kernel", "layer", "loss", "mask", "model", "norm", "plan",
    "rank", "row", "scale", "shard", "slot", "tile",
)  # fmt: skip


# name -> what its adapter_config.json says
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "vera": {
        "peft_type": "VERA", "save_projection": True, "projection_prng_key": 5, "d_initial": 0.1, "init_weights": True,
    },
    "fa": {},
    "bias": {"lora_bias": True},
    "patterns": {
        "rank_pattern": {"layers.0.self_attn.q_proj": 2, "down_.*": 6}, "alpha_pattern": {"1.*(q|v)_proj": 20},
        "exclude_modules": r".*\.1\.mlp\.down_proj",
    },
    "dora_layers": {
        "use_dora": True, "layers_to_transform": [1], "exclude_modules": ["self_attn.q_proj"], "use_rslora": True,
    },
    "tokens": {"trainable_token_indices": [2482, 272, 7, 304]},  # three are in the texts; the head is tied
}  # fmt: skip
ROWS_KEY = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
# ranks of projections that differ; 0: none
RANKS = {name: {} for name in KINDS} | {
    "patterns": {"0.self_attn.q_proj": 2, "0.mlp.down_proj": 6, "1.mlp.down_proj": 0},
    "dora_layers": {"0.self_attn.q_proj": 0, "0.mlp.down_proj": 0, "1.self_attn.q_proj": 0},
}


def write_model(folder: Path, tokenizer: Path, *, template: bool) -> Path:
    """Writes a random model, so wide that its log-likelihoods differ from token to token."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(7)

    def tensor(*shape: int) -> np.ndarray:
        return (draw.standard_normal(shape) * (1.5 / np.sqrt(shape[-1]))).astype(np.float32)

    tensors = {"model.embed_tokens.weight": tensor(VOCAB, WIDTH), "model.norm.weight": np.ones(WIDTH, np.float32)}
    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH // 2, WIDTH),
        "self_attn.v_proj": (WIDTH // 2, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (MLP, WIDTH), "mlp.up_proj": (MLP, WIDTH), "mlp.down_proj": (WIDTH, MLP),
    }  # fmt: skip
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = tensor(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = np.ones(WIDTH, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SHAPE))
    shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    if not template:
        settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_adapter(folder: Path, base: Path, *, head: bool = False, kind: str = "lora") -> Path:
    """Writes a PEFT folder whose adapter already changes the model.

    Args:
        head: with a score of texts.
        kind: one of `KINDS`.
    """
    folder.mkdir(parents=True)
    draw, tensors = np.random.default_rng(8), {}

    def normal(*shape: int, size: float) -> np.ndarray:
        return (draw.standard_normal(shape) * size).astype(np.float32)

    for layer in range(LAYERS):
        for projection, k, n in (("self_attn.q_proj", WIDTH, WIDTH), ("mlp.down_proj", MLP, WIDTH)):
            rank = RANKS[kind].get(f"{layer}.{projection}", RANK)
            if not rank:
                continue
            key = f"base_model.model.model.layers.{layer}.{projection}"
            if kind == "vera":
                tensors[f"{key}.vera_lambda_d"] = normal(RANK, size=0.5)
                tensors[f"{key}.vera_lambda_b"] = normal(n, size=0.1)
                continue
            tensors[f"{key}.lora_A.weight"] = normal(rank, k, size=0.2)
            tensors[f"{key}.lora_B.weight"] = normal(n, rank, size=0.05)
            if kind == "bias":
                tensors[f"{key}.lora_B.bias"] = normal(n, size=0.1)
            if kind in ("dora", "dora_layers"):
                tensors[f"{key}.lora_magnitude_vector"] = np.abs(1 + normal(n, size=0.1))
    if kind == "vera":
        tensors["base_model.vera_A"] = normal(RANK, MLP, size=0.4)
        tensors["base_model.vera_B"] = normal(WIDTH, RANK, size=0.8)
    if kind == "tokens":
        with safe_open(base / "model.safetensors", "np") as file:
            table = file.get_tensor("model.embed_tokens.weight")
        rows = table[KINDS[kind]["trainable_token_indices"]]
        tensors[ROWS_KEY] = rows + normal(*rows.shape, size=0.1)
    if head:
        tensors["base_model.model.score.weight"] = (draw.standard_normal((1, WIDTH)) * 0.3).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0,
        "target_modules": list(TARGETS), "bias": "none", "base_model_name_or_path": str(base),
    }  # fmt: skip
    settings |= KINDS[kind]
    settings |= {"task_type": "SEQ_CLS", "modules_to_save": ["score"]} if head else {}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def _text(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(2, most)))


def pairs() -> list[dict]:
    """Texts; answers begin with a space, so no token spans their begin."""
    draw = random.Random("pairs")
    return [
        {"prompt": _text(draw, 8), "chosen": f" {_text(draw, 10)}", "rejected": f" {_text(draw, 10)} no"}
        for _ in range(ROWS)
    ]


def conversations() -> list[dict]:
    """The same as messages."""
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"].strip()}],
            "rejected": [{"role": "assistant", "content": row["rejected"].strip()}],
        }
        for row in pairs()
    ]


def implicit() -> list[dict]:
    """The same without a prompt of its own."""
    return [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in pairs()]


def labelled() -> list[dict]:
    """Conversations with a label."""
    draw = random.Random("labels")
    labels = [True, False, *(draw.random() < 0.6 for _ in range(ROWS - 2))]
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if label else "rejected"], "label": label}
        for row, label in zip(conversations(), labels, strict=True)
    ]


def sampled() -> list[dict]:
    """Token ids with an advantage, and how likely each token was."""
    draw = random.Random("sampled")
    return [
        {
            "prompt_ids": [draw.randrange(5, VOCAB) for _ in range(draw.randint(2, 6))],
            "completion_ids": (ids := [draw.randrange(5, VOCAB) for _ in range(draw.randint(2, 9))]),
            "advantage": round(draw.gauss(0, 1), 3),
            "old_logprobs": [round(-draw.uniform(4, 12), 3) for _ in ids],
        }
        for _ in range(ROWS)
    ]


def margins() -> list[dict]:
    """Conversations with how much better the chosen answer is."""
    draw = random.Random("margins")
    return [row | {"margin": round(draw.random(), 2)} for row in conversations()]


def answers() -> list[dict]:
    """Texts for supervised fine-tuning."""
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs()]


def order(samples: int, batch: int) -> list[int]:
    """The order in which an adapter of seed 0 takes its samples: a permutation for each epoch."""
    wanted = STEPS * batch
    epochs = [np.random.default_rng((0, epoch)).permutation(samples) for epoch in range(-(-wanted // samples))]
    return np.concatenate(epochs)[:wanted].tolist()


# name of a case -> (rows, whether the model has a chat template, the objective of the job file)
CASES = {
    "dpo": (conversations, True, {"name": "dpo", "reference": "base"}),
    "dpo_start": (conversations, True, {"name": "dpo", "beta": 0.3}),
    "dpo_text": (pairs, False, {"name": "dpo", "reference": "base"}),
    "dpo_implicit": (implicit, False, {"name": "dpo", "reference": "base"}),
    "hinge": (conversations, True, {"name": "dpo", "reference": "base", "loss": "hinge"}),
    "ipo": (conversations, True, {"name": "ipo", "reference": "base"}),
    "robust": (conversations, True, {"name": "dpo", "reference": "base", "loss": "robust", "label_smoothing": 0.2}),
    "sigmoid_norm": (conversations, True, {"name": "dpo", "reference": "base", "loss": "sigmoid_norm", "beta": 2.0}),
    "apo_zero": (conversations, True, {"name": "dpo", "reference": "base", "loss": "apo_zero"}),
    "apo_down": (conversations, True, {"name": "dpo", "reference": "base", "loss": "apo_down"}),
    "bco_pair": (conversations, True, {"name": "dpo", "reference": "base", "loss": "bco_pair", "beta": 0.3}),
    "mpo": (
        conversations, True,
        {"name": "dpo", "reference": "base", "loss": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 0.5]},
    ),
    "cpo": (pairs, False, {"name": "cpo"}),
    "simpo": (pairs, False, {"name": "simpo", "beta": 2.0, "gamma": 0.5}),
    "orpo": (pairs, False, {"name": "orpo"}),
    "kto": (labelled, True, {"name": "kto", "reference": "base", "desirable_weight": 1.2}),
    "grpo": (sampled, True, {"name": "grpo"}),
    "grpo_sequence": (sampled, True, {"name": "grpo", "loss": "grpo", "ratio": "sequence"}),
    "cispo": (sampled, True, {"name": "cispo"}),
    "dft": (answers, False, {"name": "dft"}),
    **{kind: (answers, False, {"name": "sft"}) for kind in (*KINDS, "pissa") if kind != "lora"},
    "reward": (conversations, True, {"name": "reward"}),
    "reward_margin": (margins, True, {"name": "reward", "center": 0.05}),
}  # fmt: skip
