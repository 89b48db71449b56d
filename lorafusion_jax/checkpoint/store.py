"""Saves and restores checkpoints: `state/<slot>/` with the states of adapters, position and digests.

Keeps the newest few. Checkpoints of earlier formats have one tree of arrays, which orbax reads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp

from lorafusion_jax.checkpoint.saved_states import POSITION, bad_state, slots_of
from lorafusion_jax.checkpoint.saved_states import read_position as read_position
from lorafusion_jax.errors import CheckpointError, RunError, quoted
from lorafusion_jax.files import remove_folder
from lorafusion_jax.new_folder import new_folder
from lorafusion_jax.tensor_file import merged, plain_name

HEADROOM = 1.1  # metadata and block rounding on top of the arrays
ARRAYS, ADAPTERS = "arrays", "adapters"


class State(Protocol):
    """The state of an adapter, see `AdapterState`."""

    @property
    def num_bytes(self) -> int: ...

    def write_files(self, folder: Path) -> None: ...


class StateStore:
    """Saves and restores states of adapters with a small JSON position.

    Args:
        directory: `state` folder of a run.
        keep: number of checkpoints to keep.
        slot: checkpoint from which the run continues. Newer ones are damaged, and later saves replace them.
    """

    def __init__(self, directory: Path, keep: int = 3, slot: int | None = None):
        self._directory, self._keep, self._slot = directory.absolute(), keep, slot

    def save(self, slot: int, states: Mapping[str, State], position: dict[str, Any]) -> None:
        """Writes one checkpoint. Earlier ones are kept until it is complete.

        Raises:
            RunError: the disk is full (`save.no-space`) or cannot be written (`save.failed`).
        """
        if slot == self._slot:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self.check_space(sum(state.num_bytes for state in states.values()))
        try:
            with new_folder(self._directory / str(slot), replace=True) as folder:
                for name, state in states.items():
                    (folder / ADAPTERS / name).mkdir(parents=True)
                    state.write_files(folder / ADAPTERS / name)
                (folder / POSITION).parent.mkdir()
                (folder / POSITION).write_text(json.dumps(position), encoding="utf-8")
        except (RunError, OSError) as problem:
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

    def restore[T](
        self, read: Callable[[str, Path], T], read_tree: Callable[[dict[str, Any]], dict[str, T]]
    ) -> dict[str, T]:
        """Reads the states of the checkpoint from which the run continues.

        Args:
            read: reads the state of an adapter from a folder.
            read_tree: takes the states out of the tree of an earlier format.

        Raises:
            CheckpointError: there is none, or it does not fit.
        """
        if self._slot is None:
            raise CheckpointError(
                "run.no-state", f"there is no checkpoint in {self._directory}.", fix="start again with lorafusion train"
            )
        folder = self._directory / str(self._slot)
        try:
            if not (folder / ARRAYS).is_dir():
                return {path.name: read(path.name, path) for path in sorted((folder / ADAPTERS).iterdir())}
            with plain_name(folder) as parent, merged(parent / ARRAYS) as stored:
                return read_tree(_with_flat_optimizers(self._arrays().restore(stored)))
        except Exception as problem:
            raise bad_state(self._directory, self._slot, str(problem).splitlines()[0][:300]) from None

    def check_space(self, size: int) -> None:
        """Checks that a checkpoint of `size` bytes fits on the disk. Also called before a run starts.

        Raises:
            RunError: `save.no-space`.
        """
        required_bytes = size * HEADROOM
        free = shutil.disk_usage(self._directory if self._directory.exists() else self._directory.parent).free
        if free < required_bytes:
            raise self._no_space(f"{required_bytes / 2**20:.0f} MiB are needed and {free / 2**20:.0f} MiB are free")

    def _arrays(self) -> ocp.Checkpointer:
        """Returns a checkpointer without barriers: each process reads separately."""
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
        command = f"lorafusion resume {quoted(self._directory.parent)}"
        if slot is None:
            return f"{command} starts again: no checkpoint was written yet"
        return f"{command} continues: the checkpoint of slot {slot} is intact"


def _with_flat_optimizers(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree whose optimizers are maps of paths. The first checkpoints of format 2 have trees there."""
    arrays = jax.tree.map(np.asarray, tree)
    joined = partial(jax.tree_util.keystr, simple=True, separator="/")
    optimizers = {
        name: {joined(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
        for name, state in arrays.get("optimizers", {}).items()
    }
    return arrays | {"optimizers": optimizers}
