"""Checkpoints of a run: `state/<slot>/` with arrays and position, atomic, the newest few kept."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from lorafusion_jax.checkpoint.told_once import told_once
from lorafusion_jax.errors import CheckpointError, RunError

HEADROOM = 1.1  # metadata and block rounding on top of the arrays


class StateStore:
    """Saves and restores pytrees of arrays with a small JSON position.

    Args:
        directory: `state` folder of a run.
        keep: newest checkpoints that stay.
    """

    def __init__(self, directory: Path, keep: int = 3):
        self._directory = directory.absolute()
        self._keep = keep
        self._opened: ocp.CheckpointManager | None = None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        if self._opened is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            # Each process reads by itself and the first one writes whole arrays: nobody waits for anybody in here.
            me = jax.process_index()
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._keep,
                enable_async_checkpointing=False,
                create=False,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}"
                ),
            )
            self._opened = ocp.CheckpointManager(self._directory, options=options)
        return self._opened

    def latest(self) -> int | None:
        """Slot of the newest complete checkpoint."""
        return self._manager.latest_step() if self._directory.is_dir() else None

    def save(self, slot: int, arrays: Any, position: dict[str, Any]) -> None:
        """Writes one checkpoint; earlier ones stay until it is complete.

        Raises:
            RunError: the disk is full (`save.no-space`) or cannot be written (`save.failed`).
        """
        if self._manager.latest_step() == slot:
            return
        self.check_space(sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)))
        kinds = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), position=ocp.args.JsonSave(position))
        try:
            with told_once():
                self._manager.save(slot, args=kinds)
        except Exception as problem:  # tensorstore reports a full disk as ValueError
            if getattr(problem, "errno", None) == errno.ENOSPC or "No space left" in str(problem):
                raise self._no_space(str(problem)) from None
            raise RunError(
                "save.failed",
                "the checkpoint could not be written.",
                where=str(self._directory),
                why=str(problem),
                fix=f"see that the disk takes files there, then {self._goes_on()}",
            ) from problem

    def position(self) -> dict[str, Any]:
        """Reads the small JSON of the newest checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        found = read_position(self._directory)
        if found is None:
            raise self._no_state()
        return found

    def restore(self, arrays_like: Any) -> Any:
        """Reads the arrays of the newest checkpoint to the host.

        Args:
            arrays_like: their shapes and dtypes.

        Raises:
            CheckpointError: there is none, or it does not fit.
        """
        slot = self.latest()
        if slot is None:
            raise self._no_state()
        like = jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), arrays_like)
        try:
            found: Any = self._manager.restore(slot, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(like)))
        except Exception as problem:
            raise _bad_state(self._directory, slot, str(problem).splitlines()[0][:300]) from None
        return found.arrays

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def check_space(self, size: int) -> None:
        """Makes sure that a checkpoint of `size` bytes fits on the disk; asked before a run starts, too.

        Raises:
            RunError: `save.no-space`.
        """
        needed = size * HEADROOM
        free = shutil.disk_usage(self._directory if self._directory.exists() else self._directory.parent).free
        if free < needed:
            raise self._no_space(f"{needed / 2**20:.0f} MiB are needed and {free / 2**20:.0f} MiB are free")

    def _no_state(self) -> CheckpointError:
        return CheckpointError(
            "run.no-state", f"there is no checkpoint in {self._directory}.", fix="start again with lorafusion train"
        )

    def _no_space(self, why: str) -> RunError:
        return RunError(
            "save.no-space",
            "there is no space for a checkpoint.",
            where=str(self._directory),
            why=why,
            fix=f"free some space, then {self._goes_on()}",
        )

    def _goes_on(self) -> str:
        slot, command = self.latest(), f"lorafusion resume {self._directory.parent}"
        if slot is None:
            return f"{command} begins anew: no checkpoint was written yet"
        return f"{command} goes on: the checkpoint of slot {slot} is intact"


def read_position(directory: Path) -> dict[str, Any] | None:
    """Reads the position of the newest checkpoint without touching arrays or devices; None: there is none.

    Raises:
        CheckpointError: `run.bad-state`.
    """
    slots = _slots(directory)
    if not slots:
        return None
    slot = max(slots)
    try:
        found = json.loads((directory / str(slot) / "position" / "metadata").read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise _bad_state(directory, slot, f"its position cannot be read: {problem}") from None
    if not isinstance(found, dict) or "slot" not in found:
        raise _bad_state(directory, slot, "its position names no slot")
    return found


def _slots(directory: Path) -> list[int]:
    return [int(child.name) for child in directory.iterdir() if child.name.isdigit()] if directory.is_dir() else []


def _bad_state(directory: Path, slot: int, why: str) -> CheckpointError:
    earlier = min(_slots(directory), default=slot) < slot
    goes_on = "to go on from the checkpoint before" if earlier else "to begin anew: there is no checkpoint before"
    return CheckpointError(
        "run.bad-state",
        f"checkpoint {slot} does not fit this run or is damaged.",
        where=str(directory / str(slot)),
        why=why,
        fix=f"remove {directory / str(slot)} {goes_on}",
    )
