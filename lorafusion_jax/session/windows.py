"""Windows: the next slots of a session whose adapters come and go, planned from the positions of its tasks."""

from __future__ import annotations

from collections.abc import Callable

from lorafusion_jax.report.events import Listener
from lorafusion_jax.session.loop import SlotHooks
from lorafusion_jax.session.session import Session
from scheduling import issue_order
from scheduling.pipeline import one_forward_one_backward
from scheduling.window import Window, advance, plan_window


class WindowPlanner:
    """Plans the next slots of a session and runs them. Adapters may start and stop between two windows.

    Attributes:
        slot: number of slots run so far.
    """

    def __init__(self, session: Session):
        self._session, self._tail, self.slot = session, session.first_tail, 0
        self._pause: Callable[[], bool] = lambda: False
        session.loop.hooks = SlotHooks(must_pause=self._must_pause)

    def plan(self, horizon: int) -> Window:
        """Plans the next slots of all adapters that run; empty if there are none."""
        running = [task.cursor for task in self._session.tasks.values() if task.status == "running"]
        return plan_window(running, self._tail, horizon)

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
        session, first, slots = self._session, self.slot, window.slots
        session.steps.listener, self._pause = listener, pause
        if not slots:
            while len(session.references) and not session.references.step() and not pause():
                pass
            return 0
        tasks = dict(session.tasks)
        before = {name: task.cursor for name, task in tasks.items()}
        events = issue_order(one_forward_one_backward(window), window.num_stages)
        later = session.run(
            [event._replace(slot=first + event.slot) for event in events],
            lambda slot: slots[slot - first],
            lambda slot: session.assembler.slot(session.shape, slots[slot - first].replicas, tasks),
        )
        end = later[0].slot - first if later else len(slots)
        if end < len(slots):
            window = advance([before[cursor.job.name] for cursor in window.cursors], self._tail, slots[:end])
        self._tail, self.slot = window.tail, self.slot + end
        for cursor in window.cursors:
            tasks[cursor.job.name].cursor = cursor
        return end

    def _must_pause(self, slot: int) -> bool:
        """Whether a window ends before a slot. Its first slot is always run."""
        ready = self._session.references.step()
        return slot > self.slot and (ready or self._pause())
