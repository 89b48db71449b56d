"""Writes checkpoints of a run in the background. Training waits only for the copy of the state and for the last save.

The adapters' folders follow each checkpoint in order, so one thread writes both.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from lorafusion_jax.checkpoint.store import StateStore
from lorafusion_jax.report.events import Listener, PhaseBegun, StateSaved
from lorafusion_jax.session.adapter_state import AdapterState, check_optimizer
from lorafusion_jax.session.processes import barrier, is_first
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.state import states_of
from lorafusion_jax.training.exports import BackgroundQueue, ExportQueue
from lorafusion_jax.training.state import Progress


def read_states(store: StateStore, session: Session, progress: Progress) -> dict[str, AdapterState]:
    """Reads the states of a checkpoint, of this or an earlier format.

    Raises:
        CheckpointError: see `StateStore.restore`.
    """
    tasks = session.tasks
    described = {name: (progress.adapters[name].step, task.source.digest) for name, task in tasks.items()}

    def read(name: str, folder: Path) -> AdapterState:
        return AdapterState.read_files(folder, tasks[name].adapter)

    def read_tree(arrays: dict[str, Any]) -> dict[str, AdapterState]:
        totals = {"loss": arrays["loss"], **arrays.get("metrics", {})}
        states = states_of(arrays | {"totals": totals}, session.index, described)
        for name, state in states.items():
            check_optimizer(tasks[name].adapter, state, name)
        return states

    return store.restore(read, read_tree)


class Saver:
    """Saves the state of a session and the folders of its running adapters.

    Args:
        directory: `state` folder, for events.
        queue: queue that writes in order. `poll` it for events and errors of running saves.

    Attributes:
        paused_s: total time in which training waited for saves.
    """

    def __init__(
        self,
        store: StateStore,
        session: Session,
        exports: ExportQueue,
        queue: BackgroundQueue,
        directory: Path,
        listener: Listener,
    ):
        self._store, self._session, self._exports = store, session, exports
        self._queue, self._directory, self._listener = queue, directory, listener
        self.paused_s = 0.0

    def save(self, progress: Progress, *, wait: bool) -> None:
        """Starts a checkpoint of a drained session. Collective over processes.

        Args:
            wait: wait until it is on disk.

        Raises:
            RunError: `save.no-space` or `save.failed`, from the previous save or, with `wait`, from this one. Without
                `wait`, a later `poll` of the queue raises the error of this save.
        """
        self._listener(PhaseBegun(text="saving"))
        began = time.perf_counter()
        with self._session.spans.pause("saving"):
            self._queue.poll(wait=True)  # at most one save runs, and the folder of a done adapter exists
            self._start_save(progress, began)
            if wait:
                self._queue.poll(wait=True)
                barrier()
        self.paused_s += time.perf_counter() - began

    def _start_save(self, progress: Progress, began: float) -> None:
        running = {
            adapter.name: adapter
            for adapter in progress.adapters.values()
            if adapter.status == "running" and adapter.step
        }
        snapshot = self._session.snapshot()
        slot, position, pause_s = progress.slot, progress.position(), time.perf_counter() - began

        def write() -> None:
            if is_first():
                self._store.save(slot, snapshot.states(), position)

        def on_done(_: None) -> None:
            self._listener(
                StateSaved(
                    slot=slot,
                    path=str(self._directory / str(slot)),
                    seconds=round(time.perf_counter() - began, 3),
                    paused_s=round(pause_s, 3),
                )
            )

        self._queue.submit(write, on_done)
        for name, adapter in running.items():
            self._exports.submit_running(adapter, slot, partial(snapshot.adapter, name))
