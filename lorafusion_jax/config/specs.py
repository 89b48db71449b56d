"""Adapter specifications for the modules, from a job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from lorafusion_jax.adapters.spec import AdapterSpec, resolve_targets
from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.layout.layer import TARGETS


def adapter_specs(config: JobConfig) -> list[AdapterSpec]:
    """Specifications of all adapters of a job, in order.

    Raises:
        ConfigError: `lora.unknown-target`, the base model has no such projection.
    """
    targets = model_targets(config)
    return [adapter_spec(adapter, targets) for adapter in config.adapters]


def adapter_spec(adapter: AdapterConfig, available: Sequence[str] = TARGETS) -> AdapterSpec:
    """The specification of one adapter.

    Args:
        available: projections of the base model; "all-linear" is all of them.
    """
    return AdapterSpec(
        name=adapter.name,
        rank=adapter.lora.rank,
        alpha=adapter.lora.alpha,
        rslora=adapter.lora.rslora,
        dropout=adapter.lora.dropout,
        targets=resolve_targets(adapter.lora.targets, available),
        kind=adapter.lora.kind,
        head=adapter.objective.chosen.head,
        seed=adapter.seed,
    )


def model_targets(config: JobConfig) -> tuple[str, ...]:
    """Names of the projections of a job's base model; those of a Llama if it cannot be read, which its readers say."""
    file = _config_file(config)
    if file is None:
        return TARGETS
    try:
        return _targets_of(file, file.stat().st_mtime_ns)
    except (LoraFusionError, OSError, ValueError):
        return TARGETS


@lru_cache(maxsize=16)
def _targets_of(file: Path, changed: int) -> tuple[str, ...]:
    del changed  # a key of the cache
    return ModelConfig.from_hf(file).targets


def _config_file(config: JobConfig) -> Path | None:
    """The config.json of the base: in its folder, or in the hub's cache, where a run finds it, too."""
    name = config.base.model
    try:
        file = Path(config.directory) / name / "config.json"
        if file.is_file():
            return file
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json", revision=config.base.revision)
    except (ImportError, OSError, ValueError):
        return None
    return Path(cached) if isinstance(cached, str) else None
