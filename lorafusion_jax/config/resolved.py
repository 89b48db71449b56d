"""Resolved configurations: the `config.yaml` of a run folder, and changes of its settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from lorafusion_jax.config import schema
from lorafusion_jax.config.explain import explain
from lorafusion_jax.config.overrides import overridden
from lorafusion_jax.config.read import Source
from lorafusion_jax.config.values import BEGUN
from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all, unique
from lorafusion_jax.readable import SETTINGS, read_text


def dump_config(config: schema.JobConfig) -> str:
    """Writes a resolved configuration as YAML that `read_resolved` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_resolved(path: Path) -> schema.JobConfig:
    """Reads the `config.yaml` of a run folder.

    Raises:
        ConfigError: `run.config`.
    """
    try:
        values = yaml.safe_load(read_text(path, SETTINGS))
        return schema.JobConfig.model_validate(values, context=BEGUN)
    except (
        OSError,
        yaml.YAMLError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as problem:  # invalid dates are ValueErrors
        raise ConfigError(
            "run.config",
            f"{path} is not the configuration of a run.",
            why=str(problem),
            fix="restore it from a copy; run.json also has the settings, under config",
        ) from None


def override_resolved(config: schema.JobConfig, overrides: Sequence[str]) -> schema.JobConfig:
    """Applies `key=value` settings to a configuration that is already resolved.

    Raises:
        ConfigError, ErrorList: a setting does not exist, or its value is invalid.
    """
    errors: list[LoraFusionError] = []
    source, values = overridden(
        Source(path=Path("config.yaml"), values=config.model_dump(mode="json")), overrides, errors
    )
    raise_all(errors)
    try:
        return schema.JobConfig.model_validate(values, context=BEGUN)
    except ValidationError as problem:
        raise_all(unique([explain(source, (), schema.JobConfig, detail) for detail in problem.errors()]))
        raise
