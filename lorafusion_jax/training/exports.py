"""Adapters of a run on their way to its folder: at a pause, or on the side while others train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import jax
import numpy as np

from lorafusion_jax.modules.spec import AdapterSpec
from lorafusion_jax.pipeline.executor import Executor
from lorafusion_jax.pipeline.leaves import Leaves
from lorafusion_jax.pipeline.processes import is_first
from lorafusion_jax.pipeline.state import adapter_arrays
from lorafusion_jax.report.events import AdapterDone, AdapterExported, Listener
from lorafusion_jax.training.behind import Behind
from lorafusion_jax.training.export import AdapterExporter
from lorafusion_jax.training.state import AdapterProgress


class Exports:
    """Reads adapters from the stages and has them written; close it to wait for what is under way."""

    def __init__(self, exporter: AdapterExporter, executor: Executor, specs: Sequence[AdapterSpec], listener: Listener):
        self._exporter, self._executor, self._specs, self._listener = exporter, executor, specs, listener
        self._side = Behind("export")

    def write(self, name: str, step: int) -> None:
        """Writes an adapter's folder as it is now, and waits for it."""
        own = self._weights(name)()
        if is_first():
            self._exporter(name, step, own)

    def begin(self, adapter: AdapterProgress, slots_done: int) -> None:
        """Begins to write the folder of an adapter that trains no more; `tell` says so once it is complete."""
        name, step, done = adapter.name, adapter.step, adapter.status == "done"
        own = self._weights(name)

        def told(path: Path | None) -> None:
            self._listener(AdapterExported(slot=slots_done, adapter=name, step=step, path=str(path)))
            if done:
                self._listener(AdapterDone(slot=slots_done, adapter=name, step=step))

        self._side.begin(lambda: self._exporter(name, step, own()) if is_first() else None, told)

    def tell(self, *, wait: bool = False) -> None:
        """Tells of folders that are complete, or raises what went wrong; waits for all if asked."""
        self._side.tell(wait=wait)

    def close(self) -> None:
        """Waits for folders under way; nobody hears of them any more."""
        self._side.close()

    def _weights(self, name: str) -> Callable[[], dict[str, np.ndarray]]:
        """An adapter's weights as they are now; calling the result waits for them."""
        index = next(i for i, spec in enumerate(self._specs) if spec.name == name)
        parts = self._executor.read(lambda stage: stage.adapter(index))
        collect = partial(_collect, parts)
        if jax.process_count() == 1:
            return collect
        own = collect()  # processes may have to meet for it: in one order, so not on the side
        return lambda: own


def _collect(parts: Sequence[Future[Leaves]]) -> dict[str, np.ndarray]:
    return adapter_arrays([part.result() for part in parts])
