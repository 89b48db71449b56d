"""Adapter specifications for the modules, from a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from lorafusion_jax.adapters.patterns import matches
from lorafusion_jax.adapters.spec import AdapterSpec, resolve_targets
from lorafusion_jax.config.merge import base_file, model_of
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.errors import ConfigError, LoraFusionError, did_you_mean, raise_all
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.token_rows import token_rows, unusable_rows
from lorafusion_jax.layout.layer import TARGETS, saved_path


def adapter_specs(config: JobConfig) -> list[AdapterSpec]:
    """Specifications of all adapters of a job, in order.

    Raises:
        ConfigError: `lora.unknown-target`, the base model has no such projection; `lora.pattern`, a pattern matches
            none; `lora.trainable-tokens`, the base has no such token.
    """
    targets = model_targets(config)
    tokenizer = tokenizer_file(config)
    specs = [adapter_spec(adapter, targets, tokenizer) for adapter in config.adapters]
    selective = any(spec.patterns is not None or spec.tokens is not None for spec in specs)
    if selective and (model := _model(config)) is not None:
        raise_all([error for spec in specs for error in _unmatched(spec, model)])
        rows = [(spec.name, spec.tokens) for spec in specs if spec.tokens is not None]
        raise_all([error for name, tokens in rows for error in unusable_rows(name, tokens, model)])
    return specs


def adapter_spec(
    adapter: AdapterConfig, available: Sequence[str] = TARGETS, tokenizer: Path | None = None
) -> AdapterSpec:
    """The specification of one adapter.

    Args:
        available: projections of the base model; "all-linear" is all of them.
        tokenizer: tokenizer.json of the base model, for trainable tokens that are texts.
    """
    patterns = adapter.lora.patterns
    return AdapterSpec(
        name=adapter.name,
        rank=adapter.lora.rank if patterns is None else patterns.largest_rank,
        alpha=adapter.lora.alpha,
        rslora=adapter.lora.rslora,
        dropout=adapter.lora.dropout,
        targets=resolve_targets(adapter.lora.targets, available),
        kind=adapter.lora.adapter_kind,
        patterns=patterns,
        head=adapter.objective.chosen.head,
        tokens=token_rows(adapter.name, adapter.lora.trainable_tokens, tokenizer),
        seed=adapter.seed,
    )


def _unmatched(spec: AdapterSpec, model: ModelConfig) -> Iterator[LoraFusionError]:
    """Yields an error for everything in an adapter's patterns that has no effect on a model."""
    patterns, num_layers = spec.patterns, model.num_layers
    if patterns is None:
        return
    numbers = range(num_layers) if patterns.layers is None else patterns.layers
    if beyond := [number for number in numbers if number >= num_layers]:
        message = f"{spec.name}: layers_to_transform has {beyond[0]}, and the model has layers 0 to {num_layers - 1}."
        yield ConfigError("lora.pattern", message)
        return
    layers = [(number, model.layer(number)) for number in numbers]
    paths = [
        f"layers.{number}.{saved_path(linear.path)}"
        for number, layer in layers
        for linear in layer.linears
        if linear.name in spec.targets
    ]
    present = [path for path in paths if patterns.has(path)]
    if not present:
        yield ConfigError("lora.pattern", f"{spec.name}: lora.exclude leaves no projection to train.")
        return
    if patterns.exclude and len(present) == len(paths):
        yield ConfigError("lora.pattern", f"{spec.name}: lora.exclude={patterns.exclude} matches no projection.")
    for key, entries in (("rank_pattern", patterns.ranks), ("alpha_pattern", patterns.alphas)):
        for pattern, _ in entries:
            if not any(matches(pattern, path) for path in present):
                near = did_you_mean(pattern, list(model.targets))
                message = f"{spec.name}: '{pattern}' of lora.{key} matches none of its projections"
                why = "PEFT matches the end of a path such as model.layers.0.self_attn.q_proj"
                yield ConfigError("lora.pattern", f"{message}; {near}" if near else f"{message}.", why=why)


def _model(config: JobConfig) -> ModelConfig | None:
    return model_of(config.base.model, config.base.revision, Path(config.directory))


def model_targets(config: JobConfig) -> tuple[str, ...]:
    """Names of the projections of a job's base model; those of a Llama if it cannot be read, which its readers say."""
    file = _base_file(config, "config.json")
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


def tokenizer_file(config: JobConfig) -> Path | None:
    """The tokenizer.json of the base."""
    return _base_file(config, "tokenizer.json")


def _base_file(config: JobConfig, file_name: str) -> Path | None:
    return base_file(file_name, config.base.model, config.base.revision, Path(config.directory))
