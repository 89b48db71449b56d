"""Writes the adapter folders of a run: PEFT files, tokenizer, model card and a record of how it was trained."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.config.specs import adapter_spec, model_targets, tokenizer_file
from lorafusion_jax.errors import ErrorList, LoraFusionError
from lorafusion_jax.report.events import AdapterDone, AdapterExported, AdapterFailed, ExportFailed, Listener
from lorafusion_jax.session.export import AdapterExport, Problem, write_adapter
from lorafusion_jax.session.processes import is_first
from lorafusion_jax.session.session import Session
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.state import AdapterProgress, Progress

# A single-threaded background queue. Callbacks run on the caller's thread.


class BackgroundQueue:
    """Runs work on its own thread, in order. After a failure it runs no more work.

    >>> queue = BackgroundQueue("example")
    >>> queue.submit(lambda: 1 + 1, print)
    >>> queue.poll(wait=True)
    2
    >>> queue.close()
    """

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, name)
        self._pending: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()
        self._failed = False

    def submit[T](self, work: Callable[[], T], on_done: Callable[[T], None]) -> None:
        """Queues work. A later `poll` calls `on_done` with its result."""
        self._pending.append((self._thread.submit(self._run, work), on_done))

    def poll(self, *, wait: bool = False) -> None:
        """Runs the callbacks of finished work in order, or raises its exception. With `wait`, waits for all work."""
        while self._pending and (wait or self._pending[0][0].done()):
            future, on_done = self._pending.popleft()
            on_done(future.result())

    def close(self) -> None:
        """Waits for queued work. Pending callbacks are dropped."""
        self._thread.shutdown(wait=True)

    def _run[T](self, work: Callable[[], T]) -> T | None:
        if self._failed:  # `poll` raises the first error
            return None
        try:
            return work()
        except BaseException:
            self._failed = True
            raise


# Exports adapters of a run in the background.
#
# If a folder cannot be written, only its adapter fails. A full disk ends the run.

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

Weights = Callable[[], Mapping[str, np.ndarray]]  # waits for the weights


class ExportQueue:
    """Runs exports of adapters on the thread of `queue`, in order, and reports them."""

    def __init__(self, writer: AdapterWriter, session: Session, listener: Listener, queue: BackgroundQueue):
        self._writer, self._session, self._listener, self._queue = writer, session, listener, queue

    def submit_running(self, adapter: AdapterProgress, slots_done: int, read_weights: Weights | None = None) -> None:
        """Queues the folder of an adapter that still trains. Only errors are reported.

        Args:
            read_weights: reads its weights (None: reads the current weights).
        """
        self._submit_quietly(adapter, slots_done, self._export(adapter, read_weights, failure=adapter.failure))

    def submit(self, adapter: AdapterProgress, slots_done: int) -> None:
        """Queues the folder of an adapter that has ended. `poll` reports when it is complete."""
        name, step = adapter.name, adapter.step
        export = self._export(adapter, failure=adapter.failure, last=adapter.status == "done")

        def on_done(written: Path | Problem | None) -> None:
            if isinstance(written, Problem):
                self._fail_adapter(adapter, slots_done, written)
                return
            self._listener(AdapterExported(slot=slots_done, adapter=name, step=step, path=str(written)))
            if adapter.status == "done":
                self._listener(AdapterDone(slot=slots_done, adapter=name, step=step))

        self._queue.submit(partial(_run, export), on_done)

    def submit_best(self, adapter: AdapterProgress, slots_done: int) -> None:
        """Queues the folder of the current step, to which `best` links then. Only errors are reported."""
        self._submit_quietly(adapter, slots_done, self._export(adapter, best=True))

    def _submit_quietly(self, adapter: AdapterProgress, slots_done: int, export: AdapterExport) -> None:
        name, step = adapter.name, adapter.step

        def on_done(written: Path | Problem | None) -> None:
            if isinstance(written, Problem):
                self._report_failure(name, step, slots_done, written)

        self._queue.submit(partial(_run, export), on_done)

    def _export(
        self, adapter: AdapterProgress, read_weights: Weights | None = None, *, failure: str = "", best: bool = False,
        last: bool = False,
    ) -> AdapterExport[Mapping[str, np.ndarray]]:  # fmt: skip
        name, step = adapter.name, adapter.step

        if read_weights is None:
            read_state = self._session.read(name, optimizer=False)
            read_weights = lambda: read_state().weights  # noqa: E731
        write = partial(self._writer.write, name, step, failure=failure, best=best, last=last)
        return AdapterExport(step, read_weights, write)

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


def _run(export: AdapterExport[Any]) -> Path | Problem | None:
    """Runs it in the first process.

    Raises:
        LoraFusionError, OSError: the disk is full.
    """
    if not is_first():
        return None
    result = export.run()
    if not isinstance(result, Path) and _disk_is_full(result):
        raise result
    return result


def _disk_is_full(problem: Problem) -> bool:
    if isinstance(problem, LoraFusionError):
        return problem.code == "save.no-space"
    return problem.errno in DISK_FULL


def _describe(problem: Problem) -> dict[str, str]:
    if isinstance(problem, OSError):
        return {"code": "save.failed", "what": str(problem)}
    first = problem.errors[0] if isinstance(problem, ErrorList) else problem
    return {"code": first.code, "what": f"{first.what} {first.why}".strip()}


class AdapterWriter:
    """Writes `adapters/<name>/step-…` folders of a run.

    A process that crashed may have left folders of the step at which this one starts, and of later steps. They are
    written again, because on another layout the results differ by rounding.

    Args:
        progress: progress at the start of this process.
    """

    def __init__(self, job: Job, folder: RunFolder, progress: Progress):
        self._job, self._folder = job, folder
        self._since = {name: adapter.step for name, adapter in progress.adapters.items()}
        self._written: set[Path] = set()

    def write(
        self,
        name: str,
        step: int,
        weights: Mapping[str, np.ndarray],
        *,
        failure: str = "",
        best: bool = False,
        last: bool = False,
    ) -> Path:
        """Writes one adapter and returns its folder. Keeps a folder from this process or of an earlier step.

        Args:
            weights: its weights, "layers.self_attn.q_proj.lora_a" → [L, K, r], and other leaves.
            failure: why the adapter failed after this step (empty: it did not); recorded in the folder.
            best: whether `best` links to the folder from here on.
            last: whether the adapter is done at this step; folders of later steps are removed.
        """
        target = self._write(name, step, weights, failure, best)
        if last:
            self._folder.remove_later(name, step)
        return target

    def _write(self, name: str, step: int, weights: Mapping[str, np.ndarray], failure: str, best: bool) -> Path:
        target = self._folder.adapter_step(name, step)
        keep = self._job.config.save.keep
        if target.exists() and not failure and (step < self._since.get(name, 0) or target in self._written):
            if best:
                self._folder.mark_best(name, step, keep)
            return target
        config = self._job.config
        spec = adapter_spec(config.adapter(name), model_targets(config), tokenizer_file(config))
        record = self._folder.read_record()
        record.pop("config", None)  # paths and settings of other adapters
        write_adapter(
            config,
            config.adapter(name),
            spec,
            weights,
            target,
            record | {"step": step, "failed": failure or None, "data": self._job.prepared.adapters[name].digest},
            plan=self._job.plan.digest,
        )
        self._written.add(target)
        if best:
            self._folder.mark_best(name, step, keep)
        else:
            self._folder.mark_latest(name, keep)  # also of one that a killed process left without its link
        return target
