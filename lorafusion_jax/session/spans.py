"""Measures when each event ran on its stage: a thread per stage waits for results in order, without slowing training.

An adapter has two updates per slot and stage: one closes its global batch, the other is its step.

Times are wall-clock seconds since the start. A stage runs one event at a time, so an event starts when it was issued,
when its input was ready or when the previous event ended, whichever is last.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from lorafusion_jax.session.links import Links
from lorafusion_jax.session.processes import barrier
from scheduling import Plan
from scheduling.pipeline import Event
from scheduling.timeline import Pause, Span, Timeline

MOST = 200_000  # recorded events, about 40 MB; later ones are not recorded
PATIENCE_S = 5.0  # after a failure
RECENT = 50  # slots
UNREAD = 10_000  # ends of events that the next event has not asked for: the last stage's, and those of failed steps


class Issued(NamedTuple):
    event: Event
    at: float
    stepping: bool


class _Pass(NamedTuple):
    """A pass that is no event of the plan."""

    issued_at: float
    result: Any


class Spans:
    """Recorder of one process of a run. Close it to end its threads.

    Attributes:
        passes_s: time of the recorded passes that are no events of the plan, on the first stage.
    """

    def __init__(self, num_stages: int):
        self._began, self.passes_s = time.perf_counter(), 0.0
        self._ends: dict[tuple[str, int, int], float] = {}  # ends of passes, for the next stage
        self._closed: dict[tuple[int, tuple[str, ...]], float] = {}  # (slot, adapter) -> latest close of any stage
        self._pauses: list[Pause] = []
        self._spans: list[Span] = []
        self._host: list[Span] = []
        self._lock = threading.Lock()
        self._failed: list[Issued] = []
        self._joined, self._joined_at = False, 0.0
        self._num_stages = num_stages
        self._queues: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(num_stages)]
        self._threads = [
            threading.Thread(target=self._watch, args=(stage,), name=f"spans-{stage}", daemon=True)
            for stage in range(num_stages)
        ]
        for thread in self._threads:
            thread.start()

    def issued(self, event: Event, *, stepping: bool = False) -> Issued:
        """Records that the host starts to dispatch an event.

        Args:
            stepping: whether it is the step of an adapter, which waits until all stages have closed its batch.
        """
        return Issued(event, self._now(), stepping)

    @contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        """Records the body as a pause of training, which does not count as a bubble of the pipeline."""
        start = self._now()
        try:
            yield
        finally:
            with self._lock:
                self._pauses.append(Pause(start, self._now(), reason))

    def follow(self, issued: Issued, result: Array, *, needed: Array | None = None) -> None:
        """Records the end of an event when its result is ready. `result` must not be donated.

        Args:
            needed: ready when the input of the event has come from another process.
        """
        event, is_recorded = issued.event, len(self._host) < MOST
        if is_recorded:
            self._host.append(Span(event.kind, event.stage, event.slot, issued.at, self._now(), event.adapters))
        # All events, so that the first failure is always known.
        self._queues[event.stage].put((issued, result, needed, is_recorded))

    def follow_pass(self, issued_at: float, result: Any) -> None:
        """Records the time of a pass of the first stage that is no event of the plan.

        Args:
            issued_at: when the host started to dispatch it, by `time.perf_counter`.
        """
        self._queues[0].put(_Pass(issued_at - self._began, result))

    def stop(self) -> None:
        """Ends the threads."""
        self._join()

    def recorded(self) -> bytes:
        """Returns the spans as JSON, with times relative to now. Call it after `stop`, at once on all processes."""
        now = self._joined_at = self._now()
        rows = [[_before(span, now) for span in spans] for spans in (self._spans, self._host)]
        return json.dumps(rows).encode()

    def take(self, recorded: bytes) -> None:
        """Adds spans that another process returned from `recorded` when this one did."""
        now = self._joined_at
        for spans, rows in zip((self._spans, self._host), json.loads(recorded), strict=True):
            for kind, stage, slot, start, end, adapters in rows:
                spans.append(Span(kind, stage, slot, now + start, now + end, tuple(adapters)))

    def join(self, links: Links) -> None:
        """Adds what other processes have recorded of their stages. Collective over processes, once training has ended.

        Clocks are compared by when all processes are here, up to milliseconds.
        """
        if not links.apart:
            return
        self.stop()
        barrier()
        recorded = {"spans": np.frombuffer(self.recorded(), np.uint8)}
        empty = {"spans": np.empty(0, np.uint8)}
        first, *later_stages = links.local
        trees = links.share({first: recorded, **dict.fromkeys(later_stages, empty)})
        for stage, tree in enumerate(trees):
            if stage not in links.local and tree["spans"].size:
                self.take(tree["spans"].tobytes())

    def close(self, plan: Plan) -> Timeline:
        """Ends the threads and returns the measured timeline of a plan."""
        self._join()
        lengths = {job.name: job.sample_tokens for job in plan.jobs}
        # Skip incomplete slots, after which a stage failed or recording ended.
        slots = {span.slot for span in self._spans if span.kind == "backward" and span.stage == 0}
        names = {slot: plan.slots[slot].adapters for slot in slots}
        timeline = Timeline(
            spans=tuple(sorted((span for span in self._spans if span.slot in slots), key=lambda span: span.end_s)),
            num_stages=self._num_stages,
            title="measured",
            slot_adapters=names,
            tokens=sum(lengths[ref.adapter][ref.sample] for slot in slots for ref in plan.slots[slot].samples),
            host=tuple(span for span in self._host if span.slot in slots),
        )
        return timeline.with_pauses(self._pauses)

    def bubble_share(self) -> float | None:
        """Returns the idle share of the stages over the recent slots, without fill, drain and pauses.

        None with one stage, with too few slots (at most twice the stages), after recording has ended, and if there is
        no steady state between pauses.
        """
        with self._lock:
            spans, pauses = tuple(self._spans[-2 * RECENT * self._num_stages :]), tuple(self._pauses)
        enough = len({span.slot for span in spans}) > 2 * self._num_stages
        if self._num_stages == 1 or not enough or len(self._host) >= MOST:
            return None
        recent = Timeline(spans=spans, num_stages=self._num_stages, pauses=pauses)
        return recent.bubble_share if any(recent.steady_s) else None

    def first_failure(self) -> Event | None:
        """Returns the failed event that was issued first; events that depend on it fail, too.

        Call it after a failure, when no more events are issued. Waits at most some seconds, because another process may
        be lost.
        """
        self._join(PATIENCE_S)
        first = min(self._failed, key=lambda issued: issued.at, default=None)
        return None if first is None else first.event

    def _join(self, patience: float | None = None) -> None:
        if self._joined:
            return
        self._joined = True
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join(patience)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _watch(self, stage: int) -> None:
        free = 0.0
        while (item := self._queues[stage].get()) is not None:
            if isinstance(item, _Pass):
                free = self._watch_pass(item, free)
                continue
            issued, result, awaited, is_recorded = item
            event, ready = issued.event, 0.0
            try:
                if awaited is not None:
                    awaited.block_until_ready()
                    ready = self._now()
                result.block_until_ready()
            except Exception:  # the issuing thread gets the same error and calls `first_failure`
                self._failed.append(issued)
                continue
            del result, awaited, item
            if not is_recorded:
                continue
            end = self._now()
            with self._lock:
                start = min(max(free, issued.at, ready, self._input_ready(issued)), end)
                self._note_end(issued, end)
                self._spans.append(Span(event.kind, stage, event.slot, start, end, event.adapters))
            free = end

    def _watch_pass(self, item: _Pass, free: float) -> float:
        """Waits for a pass. Returns its end."""
        try:
            jax.block_until_ready(item.result)
        except Exception:  # who reads the result gets the same error
            return free
        end = self._now()
        self.passes_s += end - max(free, item.issued_at)
        return end

    def _note_end(self, issued: Issued, end: float) -> None:
        event = issued.event
        if event.kind != "update":
            self._ends[event.kind, event.stage, event.slot] = end
            drop_oldest(self._ends, UNREAD)
        elif not issued.stepping:
            self._closed[event.slot, event.adapters] = end  # threads record ends nearly in order of time
            drop_oldest(self._closed, UNREAD)

    def _input_ready(self, issued: Issued) -> float:
        event = issued.event
        if event.kind == "update":
            return self._closed.get((event.slot, event.adapters), 0.0) if issued.stepping else 0.0
        before = event.stage - 1 if event.kind == "forward" else event.stage + 1
        return self._ends.pop((event.kind, before, event.slot), 0.0)


def _before(span: Span, now: float) -> Span:
    return span._replace(start_s=span.start_s - now, end_s=span.end_s - now)


def drop_oldest(table: dict, most_entries: int) -> None:
    """Drops the entries that were added first, until `most_entries` are left: a run of weeks must not grow.

    >>> table = {1: "a", 2: "b", 3: "c"}
    >>> drop_oldest(table, 2)
    >>> table
    {2: 'b', 3: 'c'}
    """
    while len(table) > most_entries:
        del table[next(iter(table))]
