"""The loop of training: the five acts of a step in their order.

The devices always have the next microbatch queued. The rows of a failed adapter become padding in place, so results of
the others do not change. A slot with only such rows is skipped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.session.assembler import mask_adapters
from lorafusion_jax.session.batch_end import BatchEnds
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.steps import Steps
from scheduling.pipeline import Event

# Assembles the next microbatches on a host thread while the device computes.

DEPTH = 3  # microbatches prepared ahead; assembly takes about 1 ms, a step at least 10


def prefetch[In, Out](make: Callable[[In], Out], items: Iterable[In], depth: int = DEPTH) -> Generator[Out]:
    """Yields `make(item)` in order, computed ahead on another thread.

    An exception of `make` is raised in place of its result. Closing the iterator ends the thread.

    >>> list(prefetch(lambda n: n * n, [1, 2, 3]))
    [1, 4, 9]
    """
    ready: queue.Queue = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def offer(value) -> None:
        while not stop.is_set():
            try:
                # Not without a limit: once the consumer has stopped, nothing empties a full queue.
                ready.put(value, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                if stop.is_set():
                    return
                offer((make(item), None))
            offer((None, StopIteration()))
        except BaseException as problem:
            # Whatever it is: the consumer would wait forever for the next item of a thread that has ended.
            offer((None, problem))

    thread = threading.Thread(target=work, name="assemble", daemon=True)
    thread.start()
    try:
        while True:
            value, problem = ready.get()
            if isinstance(problem, StopIteration):
                return
            if problem is not None:
                raise problem
            yield value
    finally:
        stop.set()
        thread.join()


@dataclass(slots=True, kw_only=True)
class SlotHooks:
    """Called between slots; whoever has nothing to do there leaves its hook out.

    Attributes:
        must_pause: (slot) asked before a slot enters; if True, neither it nor a later one enters.
        on_entry: (slot) called before a slot enters: may issue work that the devices run before it. It may be set and
            left out while slots run.
        on_done: called with slots that are done, before the results of their steps are read.
        on_read: (slots done) called after the results of the steps in these slots were read.
    """

    must_pause: Callable[[int], bool] | None = None
    on_entry: Callable[[int], None] | None = None
    on_done: Callable[[list[int]], None] | None = None
    on_read: Callable[[int], None] | None = None


class Loop:
    """Runs slots of a plan, or of a window of a stream.

    Args:
        index: position of each adapter on the devices.

    Attributes:
        hooks: of whoever gives the slots.
        begun: adapters that have had rows since their last step.
    """

    def __init__(self, executor: Executor, ends: BatchEnds, steps: Steps, index: Mapping[str, int]):
        self._executor, self._ends, self._steps, self._index = executor, ends, steps, index
        self.hooks = SlotHooks()
        self.begun: set[str] = set()

    def run(
        self,
        events: Sequence[Event],
        names_of: Callable[[int], Sequence[str]],
        assemble: Callable[[int], Microbatch],
    ) -> list[Event]:
        """Issues events in order, until a pause is due.

        Args:
            names_of: returns the adapters with rows in a slot.
            assemble: returns the microbatch of a slot.

        Returns:
            The events of slots that did not enter.
        """
        executor, ends, steps, hooks = self._executor, self._ends, self._steps, self.hooks
        # A thread assembles them ahead, and ends with this call: tasks and places may change between two calls.
        microbatches = prefetch(assemble, [event.slot for event in events if _enters(event)])
        failed_at_entry: dict[int, frozenset[str]] = {}
        later: list[Event] = []
        try:
            for event in events:
                slot, enters, names = event.slot, _enters(event), names_of(event.slot)
                # Slots in flight still get all their events; only those from the pause on are left for later.
                if (later and slot >= later[0].slot) or (enters and hooks.must_pause and hooks.must_pause(slot)):
                    later.append(event)
                    continue
                if enters:  # 1. the next microbatch
                    # Fixed for the slot: all its events, on every process, leave out the same adapters.
                    failed_at_entry[slot] = steps.failed(names)
                    if hooks.on_entry:
                        hooks.on_entry(slot)
                failed = failed_at_entry[slot]
                if event.kind == "update":
                    for name in [name for name in event.adapters if name not in failed]:
                        steps.settle(name)
                        if ends.close_batch(event, name):  # 3. the batch ends
                            steps.issue(name, slot)  # 4. its step
                            self.begun.discard(name)
                    continue
                # Taken for skipped slots, too: microbatches come in the order of slots.
                rows = next(microbatches) if enters else None
                if failed.issuperset(names):
                    continue
                if rows is not None:
                    if failed:
                        rows = mask_adapters(rows, [self._index[name] for name in failed if name in self._index])
                    executor.admit(slot, rows)
                    # `admit` has waited until these slots were done, so reading their results costs no further wait.
                    self.report(executor.completed_slots())  # 5. results of earlier slots
                executor.issue(event, names)  # 2. forward and backward
                self.begun.update(names if event.kind == "backward" else ())
        finally:
            microbatches.close()
        return later

    def report(self, slots: list[int]) -> None:
        """Reports slots that are done, and the results of their steps."""
        if self.hooks.on_done:
            self.hooks.on_done(slots)
        for slot in slots:
            self._steps.read(slot + 1)
            if self.hooks.on_read:
                self.hooks.on_read(slot + 1)

    def drain(self) -> None:
        """Waits for all slots that were issued, and reads the results of their steps."""
        self._executor.wait_all()
        self.report(self._executor.completed_slots())
        self._steps.read_all()


def _enters(event: Event) -> bool:
    return event.kind == "forward" and event.stage == 0
