"""References of a run's adapters: computed at their start, then always read from the run folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorafusion_jax.checkpoint.references import KEY, read_reference, write_references
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.references import adapters_with_references, reference_sources
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.references import SetReferences, reference_shapes, sets_of, with_references
from lorafusion_jax.errors import CheckpointError, LoraFusionError, raise_all
from lorafusion_jax.report.events import Listener, PhaseBegun, ReferencesComputed, RunEvent
from lorafusion_jax.session.assembler import teacher_state
from lorafusion_jax.session.references import References
from lorafusion_jax.session.session import Session


def read_references(
    run: Path, record: Mapping[str, Any], config: JobConfig, prepared: Prepared, names: Sequence[str]
) -> Prepared:
    """Returns the data with the stored references of these adapters.

    Raises:
        CheckpointError, ErrorList: `reference.missing`, `reference.damaged`.
    """
    references: dict[str, SetReferences] = {}
    errors: list[LoraFusionError] = []
    for name in names:
        try:
            state = teacher_state(select_adapters(config, [name]))
            references[name] = read_reference(run, record, name, reference_shapes(prepared.adapters[name], state))
        except CheckpointError as problem:
            errors.append(problem)
    raise_all(errors)
    return with_references(prepared, references)


def compute_references(
    session: Session, prepared: Prepared, names: Sequence[str], emit: Listener, slot: int = 0
) -> tuple[References, list[RunEvent]]:
    """Computes the references of adapters at their first step; see `Session.compute_references`.

    Returns:
        (references, an event about it; none without adapters)
    """
    if not names:
        return {}, []
    began = time.perf_counter()
    made = session.compute_references(prepared, names, lambda text: emit(PhaseBegun(slot=slot, text=text)))
    seconds = round(time.perf_counter() - began, 3)
    tokens = sum(len(samples.tokens) for name in names for samples in sets_of(prepared.adapters[name]).values())
    return made, [ReferencesComputed(slot=slot, adapters=list(names), tokens=tokens, seconds=seconds)]


def store_references(run: Path, record: dict, made: Mapping[str, SetReferences], config: JobConfig) -> dict:
    """Writes references into a run folder. Returns run.json's record with their digests."""
    if not made:
        return record
    return record | {KEY: record.get(KEY, {}) | write_references(run, made, reference_sources(config))}


def split_stored(config: JobConfig, record: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the adapters whose references the run has, and those whose references must be computed."""
    wanted, stored = adapters_with_references(config), record.get(KEY, {})
    return [name for name in wanted if name in stored], [name for name in wanted if name not in stored]
