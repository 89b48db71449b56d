"""Loads a job file into a `JobConfig`: overrides, defaults, sweeps and validation. All errors are reported together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from lorafusion_jax.config import schema
from lorafusion_jax.config.entries import adapter_entries, expand_batch, expand_sweep, validate_adapter
from lorafusion_jax.config.explain import explain, unknown_key
from lorafusion_jax.config.job_checks import (
    lengths_fit,
    mesh_fits,
    names_differ,
    references_exist,
    targets_exist,
)
from lorafusion_jax.config.other_programs import MANY, of_another_program
from lorafusion_jax.config.overrides import overridden
from lorafusion_jax.config.read import Keys, Source, read_source
from lorafusion_jax.config.sections import DEFAULTS, SHARED, SINGLE_DEFAULTS
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
    return parse_config(read_source(Path(path)), overrides)


def examine_config(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[schema.JobConfig | None, list[LoraFusionError]]:
    """Like `load_config`, but returns the errors with the valid part of the job, so that more can be checked."""
    return _validate(read_source(Path(path)), overrides)


def parse_config(source: Source, overrides: Sequence[str] = ()) -> schema.JobConfig:
    """Validates a parsed job file; see `load_config`."""
    config, errors = _validate(source, overrides)
    raise_all(errors)
    assert config is not None
    return config


def _validate(source: Source, overrides: Sequence[str]) -> tuple[schema.JobConfig | None, list[LoraFusionError]]:
    if "adapters" not in source.values and (foreign := of_another_program(source.values)):
        return None, [_other_program(source, foreign)]
    errors: list[LoraFusionError] = list(source.problems)
    source, values = overridden(source, overrides, errors)
    errors += [
        unknown_key(source, (key,), [*SHARED, *DEFAULTS, *SINGLE_DEFAULTS, "adapters"])
        for key in values
        if key not in (*SHARED, *DEFAULTS, *SINGLE_DEFAULTS, "adapters")
    ]
    shared: dict[str, Any] = {
        key: _section(source, (key,), model, _given(values, key), errors)
        for key, model in SHARED.items()
        if key != "batch"
    } | {"batch": None}
    batch = None
    for single in expand_batch(_given(values, "batch"), source, errors):
        batch = shared["batch"] = _section(source, ("batch",), schema.BatchSettings, single, errors)
    for key, model in DEFAULTS.items():
        for single in expand_sweep({key: _given(values, key)}, source, errors):
            _section(source, (key,), model, single[key], errors, partial=True)
    for single in expand_sweep({key: values[key] for key in SINGLE_DEFAULTS if key in values}, source, errors):
        own = {key: single[key] for key in SINGLE_DEFAULTS if key in single}
        _section(source, (), schema.AdapterConfig, own, errors, partial=True)
    entries = adapter_entries(source, values, errors)
    valid = [(entry, adapter) for entry in entries if (adapter := validate_adapter(source, entry, errors)) is not None]
    adapters = [adapter for _, adapter in valid]
    if batch is not None:
        errors += lengths_fit(batch, adapters, source)
    if shared["mesh"] is not None:
        errors += mesh_fits(shared["mesh"], source)
    errors += names_differ(entries, source) + targets_exist(valid, source) + references_exist(valid, source)
    config = None
    if adapters and None not in shared.values():
        config = schema.JobConfig(**shared, adapters=tuple(adapters), directory=str(source.path.parent.absolute()))
    return config, unique(errors)


def _other_program(source: Source, foreign: Sequence[str]) -> ConfigError:
    return ConfigError(
        "config.other-program",
        f"{source.path} is a file of another program.",
        why=f"it has no adapters, but {', '.join(foreign[:MANY])}" + (" …" if len(foreign) > MANY else ""),
        fix=f"lorafusion init --from {source.path} > jobs.yaml",
    )


def _given(values: dict, key: str) -> Any:
    """A section of the file; `lora:` without a value is an empty one. In a list, a null is a mistake."""
    return {} if values.get(key) is None else values[key]


def _section[M: BaseModel](
    source: Source, keys: Keys, model: type[M], values: Any, errors: list, *, partial: bool = False
) -> M | None:
    try:
        return model.model_validate(values)
    except ValidationError as problem:
        errors += [
            explain(source, keys, model, detail)
            for detail in problem.errors()
            if not (partial and detail["type"] == "missing")
        ]
        return None
