"""References of adapters that want to join a run, computed between the slots of those that train.

A thread makes stages for the new adapters on the same base and compiles their forward pass. Then one microbatch of it
enters before each slot. The adapters join once all of them are read, and the run folder has them by then.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lorafusion_jax.checkpoint.warm_start import read_warm_starts, warm_start_digests
from lorafusion_jax.config.references import adapters_with_references
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.references import SetReferences
from lorafusion_jax.errors import RunError
from lorafusion_jax.pipeline.failures import is_of_devices
from lorafusion_jax.pipeline.processes import is_alone
from lorafusion_jax.pipeline.references import SetPass, finish, run_passes
from lorafusion_jax.pipeline.session import Session
from lorafusion_jax.report.events import Listener, PhaseBegun, ReferencesComputed

type References = dict[str, SetReferences]


@dataclass(slots=True, kw_only=True)
class _Joining:
    """The adapters of a request.

    Attributes:
        source: digests of their samples and warm starts.
        opened: their compiled passes.
        steps: the passes, once they run.
        began, passes_s: of the passes.
        made: the references.
    """

    names: list[str]
    source: dict[str, Any]
    opened: Future[list[SetPass]]
    steps: Generator[None, None, References] | None = None
    began: float = 0.0
    passes_s: float = 0.0
    made: References | None = None

    @property
    def failed(self) -> BaseException | None:
        return self.opened.exception() if self.opened.done() else None

    @property
    def ended(self) -> bool:
        return self.made is not None or self.failed is not None


class JoiningReferences:
    """Computes references of adapters before they join. In runs of several processes they are computed afterwards."""

    def __init__(self, session: Session, listener: Listener):
        self._session, self._emit = session, listener
        self._thread = ThreadPoolExecutor(1, "references")
        self._joining: dict[str, _Joining] = {}  # by request, oldest first

    def waits(self, request: str) -> bool:
        """Whether the references of a request are not complete."""
        return request in self._joining and not self._joining[request].ended

    def take(self, request: str, new: JobConfig, prepared: Prepared) -> References | None:
        """Returns the references of a request's adapters; None while they are computed.

        The first call starts that. So does one after the samples or a warm start have changed.

        Args:
            new: the adapters that are about to join.

        Raises:
            LoraFusionError: a folder cannot be read; `add.references`, the devices cannot compute them.
        """
        names = adapters_with_references(new) if is_alone() else []
        if not names:
            return {}
        source = {"data": {name: prepared.adapters[name].digest for name in names}, "starts": warm_start_digests(new)}
        joining = self._joining.get(request)
        if joining is None or joining.source != source:
            weights = read_warm_starts(new)
            opened = self._thread.submit(self._session.open_passes, new, prepared, names, weights)
            self._joining[request] = _Joining(names=names, source=source, opened=opened)
            self._emit(PhaseBegun(text=f"preparing the references of {', '.join(names)}"))
            return None
        if joining.failed is not None:
            raise _refusal(joining.failed, names)
        return joining.made

    def drop(self, request: str) -> None:
        """Forgets a request."""
        self._joining.pop(request, None)

    def step(self, slot: int) -> None:
        """Issues a microbatch of the oldest request whose passes are compiled."""
        joining = next((joining for joining in self._joining.values() if not joining.ended), None)
        if joining is None or not joining.opened.done():
            return
        try:
            next(self._steps_of(joining))
        except StopIteration as done:
            self._finish(joining, done.value, slot)

    def complete(self, request: str, slot: int) -> None:
        """Computes the rest of a request's references at once. Waits."""
        joining = self._joining[request]
        if joining.opened.exception() is None and joining.made is None:  # waits
            self._finish(joining, finish(self._steps_of(joining)), slot)

    def close(self) -> None:
        """Waits for what compiles. References that are not complete are computed again when the run is resumed."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _steps_of(self, joining: _Joining) -> Generator[None, None, References]:
        if joining.steps is None:
            joining.began, joining.passes_s = time.perf_counter(), self._session.spans.passes_s
            joining.steps = run_passes(joining.opened.result(), self._session.executor)
        return joining.steps

    def _finish(self, joining: _Joining, made: References, slot: int) -> None:
        tokens = sum(len(opened.samples.tokens) for opened in joining.opened.result())
        joining.made, joining.steps = made, None
        self._emit(
            ReferencesComputed(
                slot=slot,
                adapters=joining.names,
                tokens=tokens,
                seconds=round(self._session.spans.passes_s - joining.passes_s, 3),
                beside_s=round(time.perf_counter() - joining.began, 3),
            )
        )


def _refusal(problem: BaseException, names: Sequence[str]) -> BaseException:
    if not isinstance(problem, Exception) or not is_of_devices(problem):
        return problem
    why = str(problem).partition("\n")[0]
    return RunError("add.references", f"the references of {', '.join(names)} cannot be computed.", why=why)
