"""Saves and restores checkpoints: `state/<slot>/` with arrays, position and digests. Keeps the newest few."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from lorafusion_jax.checkpoint.array_files import merged, plain_name, stored_count
from lorafusion_jax.checkpoint.new_folder import new_folder
from lorafusion_jax.checkpoint.quiet_orbax import quiet_orbax
from lorafusion_jax.checkpoint.saved_states import POSITION, bad_state, slots_of
from lorafusion_jax.checkpoint.saved_states import read_position as read_position
from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.files import remove_folder

HEADROOM = 1.1  # metadata and block rounding on top of the arrays
ARRAYS = "arrays"


class StateStore:
    """Saves and restores pytrees of arrays with a small JSON position.

    Args:
        directory: `state` folder of a run.
        keep: number of checkpoints to keep.
        slot: checkpoint from which the run continues. Newer ones are damaged, and later saves replace them.
    """

    def __init__(self, directory: Path, keep: int = 3, slot: int | None = None):
        self._directory, self._keep, self._slot = directory.absolute(), keep, slot

    def save(self, slot: int, arrays: Any, position: dict[str, Any]) -> None:
        """Writes one checkpoint. Earlier ones are kept until it is complete.

        Raises:
            RunError: the disk is full (`save.no-space`) or cannot be written (`save.failed`).
        """
        if slot == self._slot:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self.check_space(sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)))
        try:
            with new_folder(self._directory / str(slot), replace=True) as folder, quiet_orbax():
                with plain_name(folder.absolute()) as parent:
                    self._arrays().save(parent / ARRAYS, args=ocp.args.StandardSave(arrays))
                    _check_written(parent / ARRAYS, len(jax.tree.leaves(arrays)))
                (folder / POSITION).parent.mkdir()
                (folder / POSITION).write_text(json.dumps(position), encoding="utf-8")
        except Exception as problem:  # tensorstore reports a full disk as ValueError
            if getattr(problem, "code", "") == "save.no-space" or "No space left" in str(problem):
                raise self._no_space(getattr(problem, "why", "") or str(problem)) from None
            raise RunError(
                "save.failed",
                "the checkpoint could not be written.",
                where=str(self._directory),
                why=getattr(problem, "why", "") or str(problem),
                fix=f"make sure that the disk is writable, then {self._how_to_resume()}",
            ) from problem
        self._slot = slot
        self._prune()

    def restore(self, arrays_like: Any) -> Any:
        """Reads the arrays of the checkpoint from which the run continues, to the host.

        Args:
            arrays_like: their shapes and dtypes.

        Raises:
            CheckpointError: there is none, or it does not fit.
        """
        if self._slot is None:
            raise CheckpointError(
                "run.no-state", f"there is no checkpoint in {self._directory}.", fix="start again with lorafusion train"
            )
        like = jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), arrays_like)
        folder = self._directory / str(self._slot)
        try:
            with plain_name(folder) as parent, merged(parent / ARRAYS) as stored:
                checkpointer = self._arrays()
                if not _has_nested_optimizers(stored):
                    return checkpointer.restore(stored, args=ocp.args.StandardRestore(like))
                return _flat_optimizers(checkpointer.restore(stored), like)
        except Exception as problem:
            raise bad_state(self._directory, self._slot, str(problem).splitlines()[0][:300]) from None

    def check_space(self, size: int) -> None:
        """Checks that a checkpoint of `size` bytes fits on the disk. Also called before a run starts.

        Raises:
            RunError: `save.no-space`.
        """
        needed = size * HEADROOM
        free = shutil.disk_usage(self._directory if self._directory.exists() else self._directory.parent).free
        if free < needed:
            raise self._no_space(f"{needed / 2**20:.0f} MiB are needed and {free / 2**20:.0f} MiB are free")

    def _arrays(self) -> ocp.Checkpointer:
        """Returns a checkpointer without barriers: each process reads separately, and only the first writes."""
        me = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}"
        )
        handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
        return ocp.Checkpointer(handler, multiprocessing_options=alone)

    def _prune(self) -> None:
        """Removes all but the newest checkpoints, and damaged ones of later slots."""
        assert self._slot is not None
        slots = slots_of(self._directory)
        good = [slot for slot in slots if slot <= self._slot][-self._keep :]
        for slot in slots:
            if slot not in good:
                remove_folder(self._directory / str(slot))

    def _no_space(self, why: str) -> RunError:
        return RunError(
            "save.no-space",
            "there is no space for a checkpoint.",
            where=str(self._directory),
            why=why,
            fix=f"free some space, then {self._how_to_resume()}",
        )

    def _how_to_resume(self) -> str:
        slot = max(slots_of(self._directory), default=None)
        command = f"lorafusion resume {self._directory.parent}"
        if slot is None:
            return f"{command} starts again: no checkpoint was written yet"
        return f"{command} continues: the checkpoint of slot {slot} is intact"


def _check_written(folder: Path, count: int) -> None:
    """Raises OSError unless all arrays of a checkpoint can be found, before the checkpoint gets its name."""
    if (stored := stored_count(folder)) != count:
        raise OSError(f"{stored} of {count} arrays can be found in what was written")


def _has_nested_optimizers(folder: Path) -> bool:
    """Whether the state of an optimizer is a tree, as in the first checkpoints of format 2, and no map of paths."""
    paths = json.loads((folder / "_METADATA").read_text(encoding="utf-8"))["tree_metadata"].values()
    keys = [[part["key"] for part in path["key_metadata"]] for path in paths]
    return any(key[0] == "optimizers" and len(key) > 3 for key in keys)


def _flat_optimizers(nested: Any, like: Any) -> Any:
    """Returns arrays of the tree of `like`, whose paths are those of the nested tree.

    Raises:
        ValueError: arrays are missing, have other sizes, or are too many.
    """
    stored = {_joined(path): leaf for path, leaf in jax.tree.leaves_with_path(nested)}
    shapes = {_joined(path): (leaf.shape, leaf.dtype) for path, leaf in jax.tree.leaves_with_path(like)}
    if wrong := [path for path, sizes in shapes.items() if path not in stored or _sizes(stored[path]) != sizes]:
        raise ValueError(f"{wrong[0]} is missing or has another size")
    if others := stored.keys() - shapes.keys():
        raise ValueError(f"{min(others)} is no array of this run")
    return jax.tree.map_with_path(lambda path, _: np.asarray(stored[_joined(path)]), like)


def _joined(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _sizes(leaf: Any) -> tuple[tuple[int, ...], Any]:
    return leaf.shape, leaf.dtype
