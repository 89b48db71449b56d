"""What golden models have in common: sizes, and rotary positions as configs of `transformers` write them."""

from __future__ import annotations

SMALL = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# Wavelengths of 8 channels at theta 1e4: 6, 63, 628, 6283 positions. One is kept, one blended, two scaled.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0,
    "beta_slow": 0.5,
}  # fmt: skip


def longrope(pairs: int, original: int) -> dict:
    return {
        "rope_type": "longrope", "rope_theta": 1000.0, "original_max_position_embeddings": original,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)], "long_factor": [2.0 + 1.5 * i for i in range(pairs)],
    }  # fmt: skip


def plain(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}
