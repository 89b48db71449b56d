"""Shapes of published models, for counts without running them."""

from dataclasses import replace

from lorafusion_jax.config.model import ModelConfig

LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
LLAMA_70B = replace(LLAMA_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)
