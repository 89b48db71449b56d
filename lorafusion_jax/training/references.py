"""References of adapters that want to join a run, computed between the slots of those that train.

A thread makes stages for the new adapters on the same base and compiles their forward pass. Then the session's queue of
references enters one microbatch of it before each slot. The adapters join once all of them are read, and the run folder
has them by then. In runs of several processes all make these stages at one drained slot, because a thread's collectives
would have no order among those of the training steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lorafusion_jax.checkpoint.references import KEY, read_reference, write_references
from lorafusion_jax.checkpoint.warm_start import read_warm_starts, warm_start_digests
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.references import adapters_with_references, reference_sources
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.config.values import BEGUN
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.data.references import SetReferences, reference_shapes, sets_of, with_references
from lorafusion_jax.errors import CheckpointError, LoraFusionError, RunError, raise_all
from lorafusion_jax.report.events import Listener, PhaseBegun, ReferencesComputed, RunEvent
from lorafusion_jax.session.assembler import teacher_state
from lorafusion_jax.session.failures import is_of_devices
from lorafusion_jax.session.processes import answers_of_all, is_alone, text_of_first
from lorafusion_jax.session.references import References, SetPass
from lorafusion_jax.session.session import Session

# References of a run's adapters: computed at their start, then always read from the run folder.


def read_references(
    run: Path, record: Mapping[str, Any], config: JobConfig, prepared: Prepared, names: Sequence[str]
) -> Prepared:
    """Returns the data with the stored references of these adapters.

    Raises:
        CheckpointError, ErrorList: `reference.missing`, `reference.damaged`.
    """
    references: dict[str, SetReferences] = {}
    errors: list[LoraFusionError] = []
    for name in names:
        try:
            state = teacher_state(select_adapters(config, [name]))
            references[name] = read_reference(run, record, name, reference_shapes(prepared.adapters[name], state))
        except CheckpointError as problem:
            errors.append(problem)
    raise_all(errors)
    return with_references(prepared, references)


def compute_references(
    session: Session, prepared: Prepared, names: Sequence[str], emit: Listener, slot: int = 0
) -> tuple[References, list[RunEvent]]:
    """Computes the references of adapters at their first step; see `Session.compute_references`.

    Returns:
        (references, an event about it; none without adapters)
    """
    if not names:
        return {}, []
    began = time.perf_counter()
    references = session.compute_references(prepared, names, lambda text: emit(PhaseBegun(slot=slot, text=text)))
    seconds = round(time.perf_counter() - began, 3)
    tokens = sum(len(samples.tokens) for name in names for samples in sets_of(prepared.adapters[name]).values())
    return references, [ReferencesComputed(slot=slot, adapters=list(names), tokens=tokens, seconds=seconds)]


def store_references(run: Path, record: dict, references: Mapping[str, SetReferences], config: JobConfig) -> dict:
    """Writes references into a run folder. Returns run.json's record with their digests."""
    if not references:
        return record
    return record | {KEY: record.get(KEY, {}) | write_references(run, references, reference_sources(config))}


def split_stored(config: JobConfig, record: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the adapters whose references the run has, and those whose references must be computed."""
    names, stored = adapters_with_references(config), record.get(KEY, {})
    return [name for name in names if name in stored], [name for name in names if name not in stored]


CODE, WHAT = "add.references", "the references of {} cannot be computed."


@dataclass(slots=True, kw_only=True)
class _Joining:
    """The adapters of a request.

    Attributes:
        new: the job with these adapters alone.
        names: those that need references.
        source: digests of their samples and warm starts.
        open: makes their passes.
        opened: what it returned.
        began, passes_s: of the passes.
        made: the references.
    """

    new: JobConfig
    names: list[str]
    source: dict[str, Any]
    open: Callable[[], list[SetPass]]
    opened: Future[list[SetPass]]
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
    """Computes references of adapters before they join. Takes part in the loop only while a request waits."""

    def __init__(self, session: Session, listener: Listener):
        self._session, self._emit = session, listener
        self._thread = ThreadPoolExecutor(1, "references")
        self._joining: dict[str, _Joining] = {}  # by request, oldest first
        self._slot = 0

    def waits(self, request: str) -> bool:
        """Whether the references of a request are not complete."""
        return request in self._joining and not self._joining[request].ended

    def take(self, request: str, new: JobConfig, prepared: Prepared) -> References | None:
        """Returns the references of a request's adapters; None while they are computed.

        The first call starts that, with several processes in the next `agree`. So does a call after the samples or a
        warm start have changed.

        Args:
            new: the adapters that are about to join.

        Raises:
            LoraFusionError: a folder cannot be read; `add.references`, the devices cannot compute them.
        """
        if not adapters_with_references(new):
            return {}
        joining = self._joining.get(request)
        if joining is None or joining.source != _source(new, prepared):
            self._session.references.drop(request)
            self._joining[request] = joining = self._joining_of(new, prepared)
            if is_alone():
                joining.opened = self._thread.submit(joining.open)
            self._follow_slots()
            self._emit(PhaseBegun(text=f"preparing the references of {', '.join(joining.names)}"))
            return None
        if joining.failed is not None:
            raise _joining_error(joining.failed, joining.names)
        return joining.made

    def agree(self, config: JobConfig) -> None:
        """Opens and forgets on all processes what the first one has. Collective, at a drained slot.

        Args:
            config: of the run, whose adapters are replaced by those that join.
        """
        if is_alone():
            return
        of_this_process = {name: [_rows(joining.new), joining.source] for name, joining in self._joining.items()}
        of_first = json.loads(text_of_first(json.dumps(of_this_process)))
        for request in self._joining.keys() - of_first.keys():
            self.drop(request)
        for request, (rows, source) in of_first.items():
            joining = self._joining.get(request)
            if joining is None or joining.source != source or not joining.opened.done():
                self._session.references.drop(request)
                self._joining[request] = self._opened_by_all(config, joining, rows, source)
        self._follow_slots()

    def drop(self, request: str) -> None:
        """Forgets a request."""
        self._joining.pop(request, None)
        self._session.references.drop(request)
        self._follow_slots()

    def _follow_slots(self) -> None:
        self._session.loop.hooks.on_entry = self._step if self._joining else None

    def _step(self, slot: int) -> None:
        """Issues a microbatch of the oldest request whose passes are compiled."""
        self._slot = slot
        for request, joining in self._joining.items():
            if not joining.ended and joining.opened.done():
                self._enter(request, joining)
        self._session.references.step()

    def complete(self, request: str, slot: int) -> References:
        """Computes the rest of a request's references at once. Waits. Several processes do so after the adapters join.

        Raises:
            LoraFusionError: as in `take`.
        """
        if not is_alone():
            self.drop(request)
            return {}
        self._slot, joining = slot, self._joining[request]
        if (problem := joining.opened.exception()) is not None:  # waits
            raise _joining_error(problem, joining.names)
        if joining.made is None:
            self._enter(request, joining)
            self._session.references.complete(request)
        assert joining.made is not None
        return joining.made

    def close(self) -> None:
        """Waits for what compiles. References that are not complete are computed again when the run is resumed."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _joining_of(self, new: JobConfig, prepared: Prepared) -> _Joining:
        names = adapters_with_references(new)

        def open_passes() -> list[SetPass]:
            return self._session.open_passes(new, prepared, names, read_warm_starts(new))

        return _Joining(new=new, names=names, source=_source(new, prepared), open=open_passes, opened=Future())

    def _opened_by_all(self, config: JobConfig, joining: _Joining | None, rows: list, source: dict) -> _Joining:
        """Opens the passes of a request here. If one process cannot, all keep its reason as their failure.

        Args:
            joining: what this process knows of the request.
            rows, source: adapters and digests on the first process.
        """
        adapters = tuple(AdapterConfig.model_validate(row, context=BEGUN) for row in rows)
        only, passes, why = config.model_copy(update={"adapters": adapters}), [], ""
        try:
            if joining is None or joining.source != source:
                joining = self._joining_of(only, prepare(only))
            why = "" if joining.source == source else "its files differ between processes"
            passes = [] if why else joining.open()
        except Exception as problem:  # every process must come to the exchange below
            why = str(problem).partition("\n")[0] or type(problem).__name__
        whys = [answer for answer in answers_of_all(why) if answer]
        names = adapters_with_references(only)
        opened: Future[list[SetPass]] = Future()
        if whys:
            opened.set_exception(RunError(CODE, WHAT.format(", ".join(names)), why=whys[0]))
        else:
            opened.set_result(passes)
        return _Joining(new=only, names=names, source=source, open=lambda: passes, opened=opened)

    def _enter(self, request: str, joining: _Joining) -> None:
        """Enters the passes of a request into the session's queue, once."""
        if request not in self._session.references:
            joining.began, joining.passes_s = time.perf_counter(), self._session.spans.passes_s
            self._session.references.add(request, joining.opened.result(), partial(self._take_made, joining))

    def _take_made(self, joining: _Joining, references: References | None) -> None:
        joining.made = references
        if references is None:  # it was dropped
            return
        tokens = sum(len(set_pass.samples.tokens) for set_pass in joining.opened.result())
        self._emit(
            ReferencesComputed(
                slot=self._slot,
                adapters=joining.names,
                tokens=tokens,
                seconds=round(self._session.spans.passes_s - joining.passes_s, 3),
                beside_s=round(time.perf_counter() - joining.began, 3),
            )
        )


def _source(new: JobConfig, prepared: Prepared) -> dict[str, Any]:
    names = adapters_with_references(new)
    return {"data": {name: prepared.adapters[name].digest for name in names}, "starts": warm_start_digests(new)}


def _rows(config: JobConfig) -> list[dict[str, Any]]:
    return [adapter.model_dump(mode="json") for adapter in config.adapters]


def _joining_error(problem: BaseException, names: Sequence[str]) -> BaseException:
    if not isinstance(problem, Exception) or not is_of_devices(problem):
        return problem
    return RunError(CODE, WHAT.format(", ".join(names)), why=str(problem).partition("\n")[0])
