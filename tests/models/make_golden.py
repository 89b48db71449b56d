"""Writes small random models of every family with the logits that `transformers` gives, in float32.

    python -m pip install torch transformers safetensors numpy
    python tests/models/make_golden.py

Each folder of golden/ is a Hugging Face model directory plus expected.safetensors (tokens, logits). Weights are drawn
large, biases and norms too, so that every one of them changes the logits.
"""

from __future__ import annotations

import sys
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
TOKENS = 96

SMALL = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
# Wavelengths of 8 channels at theta 1e4: 6, 63, 628, 6283 positions. One is kept, one blended, two scaled.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 8}),
    "llama_tied_theta": (
        "Llama",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    "llama_biased_linear": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
    "mistral": ("Mistral", {"head_dim": 8, "sliding_window": 4096}),
    "qwen2": ("Qwen2", {"rms_norm_eps": 1e-5}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
}


def write_model(family: str, out: Path) -> None:
    """Draws one model, saves it to `out` and its logits beside it."""
    import numpy as np
    import torch
    import transformers
    from safetensors.numpy import save_file

    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SMALL | changes))
    generator = torch.Generator().manual_seed(sum(map(ord, family)))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else 0.5 * noise)
    tokens = torch.randint(0, config.vocab_size, (1, TOKENS), generator=generator)
    with torch.no_grad():
        logits = model(tokens, attention_mask=torch.ones_like(tokens)).logits[0]
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    expected = {"tokens": tokens[0].numpy().astype(np.int32), "logits": logits.numpy().astype(np.float32)}
    save_file(expected, out / "expected.safetensors")


def main() -> None:
    for family in FAMILIES:
        write_model(family, GOLDEN / family)
        print(f"{family}: written", file=sys.stderr)


if __name__ == "__main__":
    main()
