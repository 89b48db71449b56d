"""`train.keep: auto` counts what this machine's ops keep."""

from types import SimpleNamespace

import jax
import pytest

from lorafusion_jax.config.schema import (
    AdapterConfig,
    BaseSettings,
    BatchSettings,
    DataSettings,
    JobConfig,
    LoraSettings,
)
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.pipeline.memory import memory_problem, stage_memory
from lorafusion_jax.training import base

MODEL = ModelConfig(
    family="llama", vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=16,
    num_kv_heads=4, head_dim=128,
)  # fmt: skip


@pytest.mark.parametrize("hopper", [True, False])
def test_a_card_without_the_kernels_has_less_room(monkeypatch, hopper):
    adapter = AdapterConfig(name="law", data=DataSettings(train="law.jsonl"), lora=LoraSettings(rank=16, alpha=16))
    config = JobConfig(
        base=BaseSettings(model="base", dtype="bfloat16"),
        adapters=(adapter,),
        batch=BatchSettings(capacity_tokens=8192),
    )
    (with_kernels,) = stage_memory(memory_problem(config, MODEL))
    size = with_kernels.total / base.ALLOCATOR_USABLE + 2**20  # enough for everything but silu(gate) · up
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": size})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(base, "is_hopper", lambda: hopper)
    assert base.fitting_keep(config, MODEL) == ("everything" if hopper else "gemm_inputs")
