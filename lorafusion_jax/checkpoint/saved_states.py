"""Finds the checkpoints on disk, checks their files and reads their positions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafusion_jax import digests
from lorafusion_jax.digests import Damage
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.readable import RECORD, read_text

POSITION = "position/metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """The newest good checkpoint of a run.

    Attributes:
        slot, position: of that checkpoint; None and empty if the run has no checkpoint yet.
        damaged: damage of newer checkpoints.
    """

    slot: int | None = None
    position: dict[str, Any]
    damaged: tuple[Damage, ...] = ()


def find_checkpoint(directory: Path, agree: Callable[[bool], bool] = bool) -> FoundCheckpoint:
    """Finds the newest undamaged checkpoint and reads its position.

    Args:
        directory: `state` folder of a run.
        agree: combines the answers of all processes: True if any finds damage. A checkpoint must be good for all.

    Raises:
        CheckpointError: `run.bad-state`, there are checkpoints and none is good.
    """
    damaged: list[Damage] = []
    slots = slots_of(directory)
    for slot in reversed(slots):
        damage = checkpoint_damage(directory / str(slot))
        if not agree(bool(damage)):
            folder = directory / str(slot)
            return FoundCheckpoint(slot=slot, position=_position(folder), damaged=tuple(damaged))
        damaged += damage or [Damage(file=directory / str(slot), why="another process of this run finds it damaged")]
    if damaged:
        raise CheckpointError(
            "run.bad-state",
            "all checkpoints of this run are damaged.",
            where=str(directory),
            why="; ".join(map(str, damaged[:4])),
            fix=f"restore one from a copy, or remove {directory} to start again",
        )
    return FoundCheckpoint(position={})


def checkpoint_damage(folder: Path) -> list[Damage]:
    """Finds damaged files of a checkpoint."""
    if not digests.has_digests(folder):
        return [Damage(file=folder / digests.FILE, why="it is missing")]
    if damage := digests.find_damage(folder):
        return damage
    try:
        _position(folder)
    except (OSError, ValueError) as problem:
        return [Damage(file=folder / POSITION, why=f"it cannot be read: {problem}")]
    return []


def read_position(directory: Path) -> dict[str, Any] | None:
    """Reads the position of the newest good checkpoint, without arrays or devices. Returns None if there is none.

    Raises:
        CheckpointError: `run.bad-state`.
    """
    return find_checkpoint(directory).position or None


def slots_of(directory: Path) -> list[int]:
    """Returns the slots of the checkpoints in a `state` folder, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(int(child.name) for child in directory.iterdir() if child.name.isdecimal() and child.is_dir())


def _position(folder: Path) -> dict[str, Any]:
    position = json.loads(read_text(folder / POSITION, RECORD))
    if not isinstance(position, dict) or position.get("slot") != int(folder.name):
        raise ValueError(f"it does not name slot {folder.name}")
    if not isinstance(position.get("adapters"), dict) or not isinstance(position.get("stage_devices", 1), int):
        raise ValueError("it lacks adapters or stage_devices")
    return position


def bad_state(directory: Path, slot: int, why: str) -> CheckpointError:
    """A checkpoint whose files are as they were written, and whose arrays are not those of this run."""
    return CheckpointError(
        "run.bad-state",
        f"checkpoint {slot} does not fit this run.",
        where=str(directory / str(slot)),
        why=why,
        fix="resume the run with the version of lorafusion-jax that wrote it; its files are as they were written",
    )
