"""Makes small multimodal models around models of text, and computes logits of bases and adapters; runs where torch is.

python published_bases.py make job.json            wholes: [{text, type, folder}]
python published_bases.py run job.json results.npz  runs: [{name, base, adapter or null, tokens}]

A multimodal model is saved as transformers publishes it. Results are logits by name. `class` says how a base is loaded.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import transformers
from peft import PeftModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

TOWERS = {  # the smallest that transformers makes
    "gemma3": {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 1},
    "gemma4": {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8},
    "gemma4_unified": {},
    "llama4": {
        "image_size": 28,
        "patch_size": 14,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vision_output_dim": 8,
        "projector_input_dim": 8,
        "projector_output_dim": 8,
    },
    "mistral3": {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8},
    "qwen3_5": {"depth": 1, "num_heads": 1, "num_position_embeddings": 16},
    "qwen3_5_moe": {"depth": 1, "num_heads": 1, "num_position_embeddings": 16},
}
WIDTHS = {"hidden_size": 8, "intermediate_size": 8}
# The multimodal Llama 4 of transformers 5.24 reads this of its text part, whose outputs do not have it, and fails.
MoeCausalLMOutputWithPast.image_outputs = None


def make(text_folder: str, model_type: str, folder: str) -> None:
    text = transformers.AutoModelForCausalLM.from_pretrained(text_folder, dtype=torch.float32)
    tower = TOWERS[model_type] | WIDTHS
    if model_type.startswith("qwen3_5"):
        tower["out_hidden_size"] = text.config.hidden_size
    text_config = text.config.to_dict() | {"pad_token_id": 0}  # Gemma 4 has it stand where images are
    settings = {"text_config": text_config, "tie_word_embeddings": text.config.tie_word_embeddings}
    settings |= {"vision_config": tower} if TOWERS[model_type] else {}
    settings |= {"mm_tokens_per_image": 4} if model_type == "gemma3" else {}
    config = transformers.AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(0)
    whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    if model_type == "llama4":
        whole.language_model.load_state_dict(text.state_dict())
    else:
        whole.model.language_model.load_state_dict(text.model.state_dict())
        if not text.config.tie_word_embeddings:
            whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(folder)


def logits(auto_class: str, base: str, adapter: str | None, tokens: list[int]) -> np.ndarray:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = getattr(transformers, auto_class).from_pretrained(base, dtype=torch.float32, **eager).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    inputs = torch.tensor([tokens])
    with torch.no_grad():
        return model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits[0].numpy()


def main() -> None:
    with open(sys.argv[2], encoding="utf-8") as file:
        job = json.load(file)
    if sys.argv[1] == "make":
        for whole in job["wholes"]:
            make(whole["text"], whole["type"], whole["folder"])
        return
    results = {run["name"]: logits(run["class"], run["base"], run["adapter"], run["tokens"]) for run in job["runs"]}
    np.savez(sys.argv[3], **results)


if __name__ == "__main__":
    main()
