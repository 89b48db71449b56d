"""Exports adapters of a run: reads their weights from the stages and writes their folders, at a save or in the
background. A folder that cannot be written costs its own adapter only; a full disk ends the run.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lorafusion_jax.errors import ErrorList, LoraFusionError
from lorafusion_jax.pipeline.processes import is_first
from lorafusion_jax.report.events import AdapterDone, AdapterExported, AdapterFailed, ExportFailed, Listener
from lorafusion_jax.training.adapter_writer import AdapterWriter
from lorafusion_jax.training.background import BackgroundQueue
from lorafusion_jax.training.state import AdapterProgress

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

Problem = LoraFusionError | OSError
Read = Callable[[str], Callable[[], dict[str, np.ndarray]]]  # `Session.read`


class ExportQueue:
    """Writes adapters of a run; close it to wait for folders under way."""

    def __init__(self, writer: AdapterWriter, read: Read, listener: Listener):
        self._writer, self._read, self._listener = writer, read, listener
        self._queue = BackgroundQueue("export")

    def write(self, adapter: AdapterProgress, slots_done: int) -> None:
        """Writes the folder of an adapter as it is now, and waits for it."""
        own = self._read(adapter.name)()
        found = self._attempt(adapter.name, adapter.step, own, adapter.failure) if is_first() else None
        if isinstance(found, Problem):
            self._tell_refusal(adapter, slots_done, found)

    def submit(self, adapter: AdapterProgress, slots_done: int) -> None:
        """Queues the folder of an adapter that trains no more; `poll` tells when it is complete."""
        name, step, failure = adapter.name, adapter.step, adapter.failure
        own = self._read(name)

        def on_done(found: Path | Problem | None) -> None:
            if isinstance(found, Problem):
                self._refused(adapter, slots_done, found)
                return
            self._listener(AdapterExported(slot=slots_done, adapter=name, step=step, path=str(found)))
            if adapter.status == "done":
                self._listener(AdapterDone(slot=slots_done, adapter=name, step=step))

        self._queue.submit(lambda: self._attempt(name, step, own(), failure) if is_first() else None, on_done)

    def poll(self, *, wait: bool = False) -> None:
        """Tells of folders that are complete or could not be written; waits for all if asked.

        Raises:
            RunError: `save.no-space`.
        """
        self._queue.poll(wait=wait)

    def close(self) -> None:
        """Waits for folders under way; nothing is told of them any more."""
        self._queue.close()

    def _attempt(self, name: str, step: int, own: dict[str, np.ndarray], failure: str) -> Path | Problem:
        try:
            return self._writer.write(name, step, own, failure=failure)
        except (LoraFusionError, OSError) as problem:
            if _disk_is_full(problem):
                raise
            return problem

    def _refused(self, adapter: AdapterProgress, slots_done: int, problem: Problem) -> None:
        self._tell_refusal(adapter, slots_done, problem)
        if adapter.status == "done":  # its last weights are in the checkpoint: resume writes the folder
            adapter.status, adapter.reason = "failed", f"its folder could not be written: {_described(problem)['what']}"
            self._listener(
                AdapterFailed(
                    slot=slots_done,
                    adapter=adapter.name,
                    step=adapter.step,
                    reason=adapter.reason,
                    kept_step=adapter.step,
                )
            )

    def _tell_refusal(self, adapter: AdapterProgress, slots_done: int, problem: Problem) -> None:
        self._listener(ExportFailed(slot=slots_done, adapter=adapter.name, step=adapter.step, **_described(problem)))


def _disk_is_full(problem: Problem) -> bool:
    if isinstance(problem, LoraFusionError):
        return problem.code == "save.no-space"
    return problem.errno in DISK_FULL


def _described(problem: Problem) -> dict[str, str]:
    if isinstance(problem, OSError):
        return {"code": "save.failed", "what": str(problem)}
    first = problem.errors[0] if isinstance(problem, ErrorList) else problem
    return {"code": first.code, "what": f"{first.what} {first.why}".strip()}
