"""Adapter specifications for the modules, from a job."""

from __future__ import annotations

from lorafusion_jax.adapters.spec import AdapterSpec, resolve_targets
from lorafusion_jax.config.schema import AdapterConfig, JobConfig


def adapter_specs(config: JobConfig) -> list[AdapterSpec]:
    """Specifications of all adapters of a job, in order."""
    return [adapter_spec(adapter) for adapter in config.adapters]


def adapter_spec(adapter: AdapterConfig) -> AdapterSpec:
    return AdapterSpec(
        name=adapter.name,
        rank=adapter.lora.rank,
        alpha=adapter.lora.alpha,
        rslora=adapter.lora.rslora,
        dropout=adapter.lora.dropout,
        targets=resolve_targets(adapter.lora.targets),
        kind=adapter.lora.kind,
        seed=adapter.seed,
    )
