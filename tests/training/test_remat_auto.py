"""`train.remat: auto` counts what this machine's ops keep."""

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
from lorafusion_jax.planning.memory import memory_problem, stage_memory
from lorafusion_jax.session import base

MODEL = ModelConfig(
    family="llama", vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=16,
    num_kv_heads=4, head_dim=128,
)  # fmt: skip


CONFIG = JobConfig(
    base=BaseSettings(model="base", dtype="bfloat16"),
    adapters=(AdapterConfig(name="law", data=DataSettings(train="law.jsonl"), lora=LoraSettings(rank=16, alpha=16)),),
    batch=BatchSettings(capacity_tokens=8192),
)


def device_of(monkeypatch, size: float | None):
    device = SimpleNamespace(memory_stats=lambda: None if size is None else {"bytes_limit": int(size)})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(base, "is_hopper", lambda: True)


@pytest.mark.parametrize("hopper", [True, False])
def test_a_card_without_the_kernels_has_less_room(monkeypatch, hopper):
    (with_kernels,) = stage_memory(memory_problem(CONFIG, MODEL))
    # enough for everything but silu(gate) · up
    device_of(monkeypatch, with_kernels.total / base.ALLOCATOR_USABLE + 2**20)
    monkeypatch.setattr(base, "is_hopper", lambda: hopper)
    assert base.fitting_remat(CONFIG, MODEL) == ("everything" if hopper else "gemm_inputs")


def test_too_little_memory_is_told_before_training(monkeypatch):
    (needed,) = stage_memory(memory_problem(CONFIG, MODEL))
    device_of(monkeypatch, needed.total)  # of which CUDA has its part
    warning = base.memory_warning(CONFIG, MODEL, "everything")
    assert warning is not None
    assert f"stage 0 needs {needed.total / 1e9:.1f} GB by count" in warning
    assert "batch.capacity_tokens: " in warning
    assert "train.remat: gemm_inputs" in warning
    assert base.memory_warning(CONFIG, MODEL, "gemm_inputs") is None
    device_of(monkeypatch, None)  # a CPU does not tell
    assert base.memory_warning(CONFIG, MODEL, "everything") is None
