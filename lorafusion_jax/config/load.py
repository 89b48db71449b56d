"""Loads a job file into a `JobConfig`: read, merge, expand, validate; and the `config.yaml` of a run folder.

All errors are reported together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from lorafusion_jax.config import schema
from lorafusion_jax.config.auto import take_auto
from lorafusion_jax.config.explain import explain
from lorafusion_jax.config.from_files import expand_files
from lorafusion_jax.config.merge import merge_entries
from lorafusion_jax.config.other_programs import MANY, of_another_program
from lorafusion_jax.config.overrides import overridden
from lorafusion_jax.config.read import Source, read_source
from lorafusion_jax.config.sweep import expand_entries
from lorafusion_jax.config.validate import validate_job
from lorafusion_jax.config.values import BEGUN
from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all, unique
from lorafusion_jax.readable import SETTINGS, read_text


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> schema.JobConfig:
    """Reads a job file, applies `key=value` overrides and validates everything.

    Args:
        path: YAML or TOML file.
        overrides: dotted settings, e.g. `train.max_steps=20`, `adapters.law.lora.rank=8`. `optim.lr=1e-4` is the shared
            default, for adapters without their own value, as in the file.

    Raises:
        ConfigError, ErrorList: all errors of the file, with their lines.
    """
    return parse_config(read_job_file(Path(path)), overrides)


def read_job_file(path: Path) -> Source:
    """A job file with an adapter for each file that `adapters.from` matches."""
    return expand_files(read_source(path))


def examine_config(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[schema.JobConfig | None, list[LoraFusionError]]:
    """Like `load_config`, but returns the errors with the valid part of the job, so that more can be checked."""
    return examine_source(read_job_file(Path(path)), overrides)


def examine_source(
    source: Source, overrides: Sequence[str] = ()
) -> tuple[schema.JobConfig | None, list[LoraFusionError]]:
    """`examine_config` of a parsed job file."""
    return _validate(source, overrides)


def parse_config(source: Source, overrides: Sequence[str] = ()) -> schema.JobConfig:
    """Validates a parsed job file; see `load_config`."""
    config, errors = _validate(source, overrides)
    raise_all(errors)
    assert config is not None
    return config


def _validate(source: Source, overrides: Sequence[str]) -> tuple[schema.JobConfig | None, list[LoraFusionError]]:
    """Overrides, then merge, expand and validate: each step adds its errors and goes on with what is left."""
    if "adapters" not in source.values and (foreign := of_another_program(source.values)):
        return None, [_other_program(source, foreign)]
    errors: list[LoraFusionError] = list(source.problems)
    source, values = overridden(source, overrides, errors)
    auto = take_auto(values)
    entries = merge_entries(source, values, errors)
    adapters = expand_entries(entries, source, errors)
    config = validate_job(source, values, adapters, errors, auto)
    return config, unique(errors)


def _other_program(source: Source, foreign: Sequence[str]) -> ConfigError:
    return ConfigError(
        "config.other-program",
        f"{source.path} is a file of another program.",
        why=f"it has no adapters, but {', '.join(foreign[:MANY])}" + (" …" if len(foreign) > MANY else ""),
        fix=f"lorafusion init --from {source.path} > jobs.yaml",
    )


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
