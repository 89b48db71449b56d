"""References of a run's adapters: computed at their start, then always read from the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorafusion_jax.checkpoint.references import KEY, read_reference, write_references
from lorafusion_jax.config.references import adapters_with_references, reference_sources
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.references import SetReferences, reference_shapes, with_references
from lorafusion_jax.errors import CheckpointError, LoraFusionError, raise_all


def read_references(run: Path, record: Mapping[str, Any], prepared: Prepared, names: Sequence[str]) -> Prepared:
    """Returns the data with the stored references of these adapters.

    Raises:
        CheckpointError, ErrorList: `reference.missing`, `reference.damaged`.
    """
    found: dict[str, SetReferences] = {}
    errors: list[LoraFusionError] = []
    for name in names:
        try:
            found[name] = read_reference(run, record, name, reference_shapes(prepared.adapters[name]))
        except CheckpointError as problem:
            errors.append(problem)
    raise_all(errors)
    return with_references(prepared, found)


def store_references(run: Path, record: dict, made: Mapping[str, SetReferences], config: JobConfig) -> dict:
    """Writes references into a run folder. Returns run.json's record with their digests."""
    if not made:
        return record
    return record | {KEY: record.get(KEY, {}) | write_references(run, made, reference_sources(config))}


def split_stored(config: JobConfig, record: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the adapters whose references the run has, and those whose references must be computed."""
    wanted, stored = adapters_with_references(config), record.get(KEY, {})
    return [name for name in wanted if name in stored], [name for name in wanted if name not in stored]
