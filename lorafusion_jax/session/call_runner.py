"""Runs the calls of streams between windows, and gives calls their log-probabilities.

Rows with gradients are slots of windows. Everything else happens between two windows: optimizer steps whose rows were
issued before, passes without gradients, and states.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from lorafusion_jax.data.assemble import first_rows
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.session.calls import LoadState, OptimStep, SaveState
from lorafusion_jax.session.move import to_host
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stream import Entry, Stream, Waiting, settle
from lorafusion_jax.session.turns import Turns
from scheduling import Slot
from scheduling.pipeline import Event
from scheduling.window import Cursor, plan_window

MOST_PASSES = 4  # between two windows
SMALLEST_PASS = 1024  # tokens of a microbatch without gradients: each half of the largest one compiles once


class Located(NamedTuple):
    """Where a row is in a slot."""

    entry: Entry
    replica: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """A pass without gradients that was issued."""

    rows: Sequence[Located]
    logprobs: Future[Array]


class CallRunner:
    """Runs the calls of the streams of a session. Its methods are called in the session's thread."""

    def __init__(self, session: Session, turns: Turns):
        self._session, self._turns, tail = session, turns, session.free_places.tail
        self._tail = replace(tail, limits=replace(tail.limits, num_stages=1))
        self._entered: dict[int, list[Located]] = {}  # by slot
        self._passes: deque[_Pass] = deque()
        self._reader = ThreadPoolExecutor(1, "read states")
        self._reading: Future[None] | None = None

    @property
    def streams(self) -> dict[str, Stream]:
        """The streams of the session, by name of their adapter."""
        tasks = self._session.tasks.items()
        return {name: task.source for name, task in tasks if isinstance(task.source, Stream)}

    @property
    def has_news(self) -> bool:
        """Whether calls were added since the last window was planned."""
        return any(stream.has_news for stream in self.streams.values())

    def advance(self, slot: int) -> None:
        """Issues what comes before the next window.

        Args:
            slot: the next one.
        """
        for name, stream in self.streams.items():
            while (call := stream.take_first()) is not None:
                self._run(name, stream, call, slot)
        self._issue_passes()
        self.collect(wait=False)

    def _run(self, name: str, stream: Stream, call: Waiting, slot: int) -> None:
        session = self._session
        session.steps.settle(name)
        if isinstance(call.call, OptimStep):
            stream.has_sums = False
            events = [Event("update", stage, max(slot - 1, 0)) for stage in reversed(range(len(session.stages)))]
            for event in events:
                session.batch_ends.close_batch(event, name)
            session.steps.issue(name, events[0].slot)
            return
        try:
            if isinstance(call.call, SaveState):
                self._save(stream, name, call, call.call.optimizer)
            elif isinstance(call.call, LoadState):
                session.restore(name, call.call.state, optimizer=call.call.optimizer)
                _settle_after(stream.issued_before(call), call.future, None)
        except LoraFusionError as problem:
            settle(call.future, problem)

    def _save(self, stream: Stream, name: str, call: Waiting, optimizer: bool) -> None:
        """Copies a state on the devices, and gives it to the call on another thread once it is on the host.

        Not before all earlier calls have their results: whoever has a state can forget them.
        """
        if self._reading is not None:
            self._reading.result()  # devices have memory for one copy
        wait = self._session.read(name, optimizer=optimizer, sums=optimizer and stream.has_sums)
        earlier = stream.issued_before(call)

        def read() -> None:
            try:
                _settle_after(earlier, call.future, wait())
            except Exception as problem:  # of a device; whoever asked must not wait forever
                settle(call.future, problem)

        self._reading = self._reader.submit(read)

    def _issue_passes(self) -> None:
        session, streams = self._session, self.streams
        cursors = {name: cursor for name, stream in streams.items() if (cursor := stream.look()) is not None}
        if not cursors:
            return
        for name in cursors:
            session.make_room(session.tasks[name])
        owners = [streams[name].owner for name in cursors]
        window = plan_window(*self._turns.weigh([*cursors.values()], owners, self._tail), MOST_PASSES)
        self._turns.note(window.slots, [*cursors.values()], owners, self._tail)
        for slot in (self._smallest(slot, cursors) for slot in window.slots):
            rows = session.free_places.microbatch(session.assembler, slot, session.tasks)
            names = slot.adapters
            logprobs = session.executor.run_forward(Stage.row_logprobs, session.executor.describe(rows), names)
            self._passes.append(_Pass(rows=self._locate(slot, cursors), logprobs=logprobs))
            if len(self._passes) > len(session.stages) + 1:
                self._finish_pass()
        self._tail = window.tail
        for cursor in window.cursors:
            streams[cursor.job.name].advance(cursor)

    def _smallest(self, slot: Slot, cursors: Mapping[str, Cursor]) -> Slot:
        """Halves the microbatch while its rows fit: padding takes as long as they do, and a short call must not wait.

        Not in a reproducible session: another size may round otherwise, and company must not change the size.
        """
        tile, size = self._tail.limits.tile_tokens, self._tail.limits.capacity_tokens
        if self._tail.reproducible:
            return slot
        rows_needed = SMALLEST_PASS
        for part in slot.replicas:
            tokens: Counter[str] = Counter()
            for ref in part:
                tokens[ref.adapter] += cursors[ref.adapter].job.sample_tokens[ref.sample]
            rows_needed = max(rows_needed, sum(-(-count // tile) * tile for count in tokens.values()))
        while size % (2 * tile) == 0 and size // 2 >= rows_needed:
            size //= 2
        return replace(slot, capacity_tokens=size)

    def enter(self, number: int, slot: Slot, cursors: Mapping[str, Cursor]) -> None:
        """Notes which rows are in a slot of a window that is issued now, planned from these cursors."""
        if located := self._locate(slot, cursors):
            self._entered[number] = located

    def finish(self, slots: Sequence[int]) -> None:
        """Gives the rows of slots that are done their log-probabilities."""
        for slot in slots:
            logprobs, located = self._session.executor.take_logprobs(slot), self._entered.pop(slot, [])
            if logprobs is not None and located:
                _give(located, to_host(logprobs))
        self.collect(wait=False)

    def collect(self, *, wait: bool) -> None:
        """Gives the rows of passes that are done their log-probabilities.

        Args:
            wait: for all passes.
        """
        while self._passes and (wait or _is_ready(self._passes[0].logprobs)):
            self._finish_pass()

    def _finish_pass(self) -> None:
        first = self._passes.popleft()
        with self._session.executor.blaming(None, None):
            logprobs = to_host(first.logprobs.result())
        _give(first.rows, logprobs)

    def _locate(self, slot: Slot, cursors: Mapping[str, Cursor]) -> list[Located]:
        streams, limits = self.streams, self._tail.limits
        located: list[Located] = []
        for replica, part in enumerate(slot.replicas):
            sizes = [(ref.adapter, cursors[ref.adapter].job.sample_tokens[ref.sample]) for ref in part]
            starts = first_rows(sizes, limits.capacity_tokens, limits.tile_tokens)
            for ref, start in zip(part, starts, strict=True):
                if ref.adapter in streams:
                    located.append(Located(streams[ref.adapter].entry(ref), replica, start))
        return located


def _give(located: Sequence[Located], logprobs_RTK: np.ndarray) -> None:
    for entry, replica, start in located:
        entry.call.give(entry, logprobs_RTK[replica, start : start + len(entry.tokens)].copy())


def _settle_after(earlier: Sequence[Future[Any]], future: Future[Any], value: Any) -> None:
    """Completes a future once others are complete."""
    if earlier:
        earlier[-1].add_done_callback(lambda _: _settle_after(earlier[:-1], future, value))
    else:
        settle(future, value)


def _is_ready(future: Future[Array]) -> bool:
    array: Any = future.result() if future.done() else None
    return array is not None and array.is_ready()
