"""Shapes of published models, for counts without running them."""

from dataclasses import replace

from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope

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
_GLOBAL = {"rope": Rope(theta=1e6, channels=512, share=0.25), "head_dim": 512}
_LOCAL = {"rope": Rope(), "window": 512}
GEMMA_4_E2B = ModelConfig(
    family="gemma4_text", vocab_size=262144, hidden_size=1536, intermediate_size=6144, num_layers=35, num_heads=8,
    num_kv_heads=1, head_dim=256, norms="sandwich", embedding_scale=1536**0.5, qk_norm=True, v_norm=True,
    layer_scalar=True, attention_scale=1.0, activation="gelu_tanh", tie_embeddings=True, final_soft_cap=30.0,
    max_positions=131072, input_width=256, input_vocab=262144,
    pattern=tuple(
        LayerType(
            sharing="reads" if number >= 15 else "gives" if number in (13, 14) else "none",
            wide=number >= 15,
            **(_LOCAL if (number + 1) % 5 else _GLOBAL),
        )
        for number in range(35)
    ),
)  # fmt: skip
