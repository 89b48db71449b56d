"""Exports adapters of a run in the background.

If a folder cannot be written, only its adapter fails. A full disk ends the run.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from lorafusion_jax.errors import ErrorList, LoraFusionError
from lorafusion_jax.report.events import AdapterDone, AdapterExported, AdapterFailed, ExportFailed, Listener
from lorafusion_jax.session.processes import is_first
from lorafusion_jax.session.session import Session
from lorafusion_jax.training.adapter_writer import AdapterWriter
from lorafusion_jax.training.background import BackgroundQueue
from lorafusion_jax.training.state import AdapterProgress

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

Problem = LoraFusionError | OSError
Weights = Callable[[], Mapping[str, np.ndarray]]  # waits for the weights


class ExportQueue:
    """Writes folders of adapters on the thread of `queue`, in order."""

    def __init__(self, writer: AdapterWriter, session: Session, listener: Listener, queue: BackgroundQueue):
        self._writer, self._session, self._listener, self._queue = writer, session, listener, queue

    def submit_running(self, adapter: AdapterProgress, slots_done: int, read_weights: Weights | None = None) -> None:
        """Queues the folder of an adapter that still trains. Only errors are reported.

        Args:
            read_weights: reads its weights (None: reads the current weights).
        """
        name, step, failure = adapter.name, adapter.step, adapter.failure
        read = self._read(name) if read_weights is None else read_weights

        def on_done(written: Path | Problem | None) -> None:
            if isinstance(written, Problem):
                self._report_failure(name, step, slots_done, written)

        self._queue.submit(lambda: self._try_write(name, step, read, failure), on_done)

    def submit(self, adapter: AdapterProgress, slots_done: int) -> None:
        """Queues the folder of an adapter that has ended. `poll` reports when it is complete."""
        name, step, failure, done = adapter.name, adapter.step, adapter.failure, adapter.status == "done"
        read_weights = self._read(name)

        def on_done(written: Path | Problem | None) -> None:
            if isinstance(written, Problem):
                self._fail_adapter(adapter, slots_done, written)
                return
            self._listener(AdapterExported(slot=slots_done, adapter=name, step=step, path=str(written)))
            if adapter.status == "done":
                self._listener(AdapterDone(slot=slots_done, adapter=name, step=step))

        self._queue.submit(lambda: self._try_write(name, step, read_weights, failure, last=done), on_done)

    def submit_best(self, adapter: AdapterProgress, slots_done: int) -> None:
        """Queues the folder of the current step, to which `best` links then. Only errors are reported."""
        name, step = adapter.name, adapter.step
        read_weights = self._read(name)

        def on_done(written: Path | Problem | None) -> None:
            if isinstance(written, Problem):
                self._report_failure(name, step, slots_done, written)

        self._queue.submit(lambda: self._try_write(name, step, read_weights, "", best=True), on_done)

    def _read(self, name: str) -> Weights:
        read = self._session.read(name, optimizer=False)
        return lambda: read().weights

    def _try_write(
        self, name: str, step: int, read_weights: Weights, failure: str, *, best: bool = False, last: bool = False
    ) -> Path | Problem | None:
        if not is_first():
            return None
        try:
            return self._writer.write(name, step, read_weights(), failure=failure, best=best, last=last)
        except (LoraFusionError, OSError) as problem:
            if _disk_is_full(problem):
                raise
            return problem

    def _fail_adapter(self, adapter: AdapterProgress, slots_done: int, problem: Problem) -> None:
        self._report_failure(adapter.name, adapter.step, slots_done, problem)
        if adapter.status == "done":  # the checkpoint has its last weights: resume writes the folder again
            adapter.fail(f"its folder could not be written: {_describe(problem)['what']}")
            self._listener(
                AdapterFailed(
                    slot=slots_done,
                    adapter=adapter.name,
                    step=adapter.step,
                    reason=adapter.reason,
                    kept_step=adapter.step,
                )
            )

    def _report_failure(self, name: str, step: int, slots_done: int, problem: Problem) -> None:
        self._listener(ExportFailed(slot=slots_done, adapter=name, step=step, **_describe(problem)))


def _disk_is_full(problem: Problem) -> bool:
    if isinstance(problem, LoraFusionError):
        return problem.code == "save.no-space"
    return problem.errno in DISK_FULL


def _describe(problem: Problem) -> dict[str, str]:
    if isinstance(problem, OSError):
        return {"code": "save.failed", "what": str(problem)}
    first = problem.errors[0] if isinstance(problem, ErrorList) else problem
    return {"code": first.code, "what": f"{first.what} {first.why}".strip()}
