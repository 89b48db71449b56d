"""A job in a worker: what it has there, and how its data, its newest whole state and its references are read.

The answers of a reference are in the job's folder, so that a move does not compute them again.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lorafusion_jax.checkpoint.references import KEY, read_reference
from lorafusion_jax.checkpoint.references import write_references as write_arrays
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import source_of
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.data.references import SetReferences, reference_shapes
from lorafusion_jax.errors import CheckpointError, LoraFusionError
from lorafusion_jax.files import replace_text
from lorafusion_jax.serve.state_folders import check_home, states_replaced_by
from lorafusion_jax.session import AdapterState, Task
from lorafusion_jax.session.assembler import teacher_state
from lorafusion_jax.session.export import AdapterExport
from lorafusion_jax.session.places import PlaceWeights

NAME, NOTE = "reference", "references.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was read of a job.

    Args:
        path: of its state (None: it starts from the beginning).
        damage: what is wrong with the state that it should have started from.
        first: weights that it starts from, if there is no state.
    """

    task: Task
    state: AdapterState | None
    path: Path | None
    damage: str = ""
    first: PlaceWeights | None = None


def load(job: str, values: dict[str, Any], state: Path | None, folder: Path) -> Loaded:
    """Reads data, state and references of a job. In the session it is named by its id.

    A state that is damaged is replaced by the newest one before it that is whole, and of no later step.
    """
    config = parse_config(source_of(values))
    prepared = prepare(config)
    task = Task.of(config, prepared, read_references(folder, config, prepared))
    assert task.name == job
    if state is None:
        return Loaded(task=task, state=None, path=None)
    damage = ""
    for path in (state, *states_replaced_by(state)):
        try:
            return Loaded(task=task, state=AdapterState.read(path, task.adapter), path=path, damage=damage)
        except CheckpointError as problem:
            if problem.code != "state.damaged":
                raise
            damage = damage or str(problem)
    return Loaded(task=task, state=None, path=None, damage=damage)


def write_references(folder: Path, references: SetReferences) -> None:
    """Writes what a reference says, and its digest. A full disk only means that they are computed again."""
    try:
        check_home(folder)
        digests = write_arrays(folder, {NAME: references}, {NAME: NAME})
        replace_text(folder / NOTE, json.dumps({KEY: digests}))
    except (OSError, LoraFusionError) as problem:
        print(f"references were not kept: {problem}", flush=True)


def read_references(folder: Path, config: JobConfig, prepared: Prepared) -> SetReferences | None:
    """Reads what a reference says; None if there are none for these samples, or if they are damaged."""
    (adapter,) = config.adapters
    try:
        digests = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        shapes = reference_shapes(prepared.adapters[adapter.name], teacher_state(config))
        return read_reference(folder, digests, NAME, shapes)
    except (OSError, ValueError, LoraFusionError):
        return None


@dataclass(slots=True, kw_only=True)
class Held:
    """A job in the session, or on its way into it.

    Attributes:
        state: newest state on the disk, of step `kept`.
        loading: None once it has started, because what was read takes memory.
        saved: last step whose state was read; it may not be on the disk yet.
        place: None until it has started, and once it has left.
        saving: the newest save of its state, which may be under way.
        reading: the adapter of a job that leaves, which is under way.
        export: of a job that is done, or the state of one that is stopped. It has no place any more once it is read.
        ends_as: the event of its end, if it has an export.
        leaves: whether the server has asked for it back.
        read_at: when its state was last read, or when it started.
        announced: whether it trains; until then its reference is computed.
        new_references: they are not in its folder yet.
    """

    job: str
    epoch: int
    name: str
    folder: Path
    wanted_place: int
    state: Path | None
    loading: Future[Loaded] | None
    saving: Future[None] | None = None
    reading: Future[AdapterState] | None = None
    export: AdapterExport[AdapterState] | None = None
    ends_as: Literal["finished", "stopped"] = "finished"
    leaves: bool = False
    kept: int = 0
    saved: int = 0
    place: int | None = None
    read_at: float = 0.0
    announced: bool = False
    new_references: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A state that is being read, while its job trains on."""

    held: Held
    state: Future[AdapterState]
