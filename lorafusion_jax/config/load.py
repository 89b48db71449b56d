"""Loads a job file into a `JobConfig`: read, merge, expand, validate. All errors are reported together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lorafusion_jax.config import schema
from lorafusion_jax.config.auto import take_auto
from lorafusion_jax.config.from_files import expand_files
from lorafusion_jax.config.merge import merge_entries
from lorafusion_jax.config.other_programs import MANY, of_another_program
from lorafusion_jax.config.overrides import overridden
from lorafusion_jax.config.read import Source, read_source
from lorafusion_jax.config.sweep import expand_entries
from lorafusion_jax.config.validate import validate_job
from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all, unique


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
