"""Windows: the next slots of a session whose adapters come and go, planned from the positions of its tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lorafusion_jax.report.events import Listener
from lorafusion_jax.session.call_runner import CallRunner
from lorafusion_jax.session.loop import SlotHooks
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.turns import JOBS, Turns
from scheduling import issue_order
from scheduling.pipeline import one_forward_one_backward
from scheduling.window import Cursor, Window, advance, plan_window

CALL_HORIZON = 4  # slots of a window while clients wait for their calls


class WindowPlanner:
    """Plans the next slots of a session and runs them. Adapters may start and stop between two windows.

    Args:
        turns: of the owners of training clients.

    Attributes:
        slot: number of slots run so far.
    """

    def __init__(self, session: Session, turns: Turns | None = None):
        tail = session.free_places.tail
        self.session, self._tail, self.slot, self._turns = session, tail, 0, turns or Turns()
        self._pause: Callable[[], bool] = lambda: False
        self._enter: Callable[[int], None] = lambda slot: None
        self._calls = CallRunner(session, self._turns)
        # `_enter` is looked up at each call, because every window sets its own.
        session.loop.hooks = SlotHooks(
            must_pause=self._must_pause, on_entry=lambda slot: self._enter(slot), on_done=self._calls.finish
        )

    @property
    def has_calls(self) -> bool:
        """Whether calls of training clients wait to be issued."""
        return any(stream.has_calls for stream in self._calls.streams.values())

    def plan(self, horizon: int) -> Window:
        """Plans the next slots of all adapters that run; empty if there are none."""
        self._calls.advance(self.slot)
        running = [task for task in self.session.tasks.values() if task.status == "running"]
        for task in running:
            task.cursor = task.source.refresh(task.cursor)
            if task.cursor is not None and task.source.targets:
                self.session.make_room(task)
                horizon = min(horizon, CALL_HORIZON)
        cursors = [task.cursor for task in running if task.cursor is not None]
        return plan_window(*self._turns.weigh(cursors, self._owners(cursors), self._tail), horizon)

    def _owners(self, cursors: Sequence[Cursor]) -> list[str]:
        return [self.session.tasks[cursor.job.name].source.owner for cursor in cursors]

    def run(
        self,
        window: Window,
        listener: Listener = lambda event: None,
        pause: Callable[[], bool] = lambda: False,
    ) -> int:
        """Runs a window from `plan`. The devices may still work when it returns; see `Session.drain`.

        Adapters that are preparing advance by a microbatch before each slot. The window ends when one of them is ready.

        Args:
            listener: called with `StepTaken` and `AdapterFailed`.
            pause: asked before each slot; True ends the window there.

        Returns:
            Number of slots run.
        """
        session, first, slots = self.session, self.slot, window.slots
        session.steps.listener, self._pause = listener, pause
        if not slots:
            while len(session.references) and not session.references.step() and not pause():
                pass
            self._calls.collect(wait=True)
            return 0
        tasks, names = dict(session.tasks), [slot.adapters for slot in slots]
        before = {name: task.cursor for name, task in tasks.items() if task.cursor is not None}
        # A client's batch ends where it asks for an optimizer step, not where its rows of this window end.
        closed = [end for end in window.ends if tasks[end[1]].source.closes(end[2])]
        cursors = [before[cursor.job.name] for cursor in window.cursors]  # with their own weights
        owners = self._owners(cursors)
        events = issue_order(one_forward_one_backward(replace(window, ends=tuple(closed))), window.num_stages)
        self._enter = lambda slot: self._calls.enter(slot, slots[slot - first], before)
        later = session.run(
            [event._replace(slot=first + event.slot) for event in events],
            lambda slot: names[slot - first],
            lambda slot: session.free_places.microbatch(session.assembler, slots[slot - first], tasks),
        )
        end = later[0].slot - first if later else len(slots)
        self._turns.note(slots[:end], cursors, owners, self._tail)
        # The window's own end holds only if all of it ran, and with no weights of `Turns` in its cursors.
        if end < len(slots) or set(owners) != {JOBS}:
            window = advance(cursors, self._tail, slots[:end])
        self._tail, self.slot = window.tail, self.slot + end
        for cursor in window.cursors:
            tasks[cursor.job.name].cursor = tasks[cursor.job.name].source.advance(cursor)
        return end

    def _must_pause(self, slot: int) -> bool:
        """Whether a window ends before a slot. Its first slot is always run."""
        # Before the first slot, too: adapters that prepare advance by a microbatch before every slot.
        ready = self.session.references.step()
        return slot > self.slot and (ready or self._calls.has_news or self._pause())
