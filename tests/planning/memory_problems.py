"""Models, adapters and problems of the memory model, shared by its tests."""

from dataclasses import replace

from shapes import LLAMA_8B

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.memory import (
    MemoryProblem,
)
from lorafusion_jax.planning.stages import split_layers

TINY = ModelConfig(
    family="qwen3",
    vocab_size=96,
    hidden_size=24,
    intermediate_size=40,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    qkv_bias=True,
    o_bias=True,
    tie_embeddings=True,
)
ADAPTERS = (
    AdapterSpec(name="law", rank=4, alpha=8, dropout=0.1),
    AdapterSpec(name="med", rank=2, alpha=8, targets=("q_proj", "down_proj")),
)
FOUR = tuple(AdapterSpec(name=f"a{i}", rank=16, alpha=32, dropout=0.1) for i in range(4))
HOPPER = "pallas_mosaic_gpu"


def problem(model=TINY, adapters=ADAPTERS, stages=1, tokens=64, **changes):
    settings = {"optimizers": ("adamw",) * len(adapters), "item": 2, "remat": "gemm_inputs"} | changes
    layers = split_layers(model.num_layers, stages)
    return MemoryProblem(model=model, adapters=adapters, layers=layers, capacity_tokens=tokens, **settings)


WIDE = replace(LLAMA_8B, hidden_size=1024, intermediate_size=2048, num_heads=8, num_kv_heads=4, qk_norm=True)
