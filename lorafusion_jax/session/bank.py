"""Adapters of a run that are in no place on the devices: their states wait in host memory.

Copies overlap training. The devices copy the state of an adapter that leaves, and a thread reads the copy; another
thread sends the arrays of adapters that come next, before they are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from lorafusion_jax.peft.folder import Arrays
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.session.places import PlaceWeights
from lorafusion_jax.session.stage_state import PlaceArrays

type Sent = tuple[PlaceWeights, list[PlaceArrays]]  # an adapter's weights, and its arrays on each stage
BYTES_AHEAD = 2 * 2**30  # of copies on a device that wait for a place, and of those that wait to be read


class Bank:
    """What adapters have that are in no place. One that is at its first step has no state: it is drawn again.

    Attributes:
        starts: weights of a warm start, of all adapters that have one.
    """

    def __init__(self) -> None:
        self.starts: Mapping[str, Arrays] = {}
        self._states: dict[str, Future[AdapterState]] = {}
        self._unread: deque[Future[AdapterState]] = deque()
        self._sent: dict[str, Future[Sent]] = {}
        self._reader, self._sender = ThreadPoolExecutor(1, "bank-reads"), ThreadPoolExecutor(1, "bank-sends")

    def keep(self, states: Mapping[str, AdapterState]) -> None:
        """Takes states. Their arrays are not changed, so that a checkpoint may be written of them meanwhile."""
        for name, state in states.items():
            self._states[name] = Future()
            self._states[name].set_result(state)

    def make_room(self, most_unread: int) -> None:
        """Waits until fewer than so many copies are unread."""
        while len(self._unread) >= most_unread:
            self._unread.popleft().result()

    def read(self, name: str, copy: Callable[[], AdapterState]) -> None:
        """Reads the copy of an adapter that leaves its place, on a thread."""
        self._states[name] = future = self._reader.submit(copy)
        self._unread.append(future)

    def get(self, name: str) -> AdapterState | None:
        """Returns the state of an adapter that has one, once it is read. Any thread may call it."""
        future = self._states.get(name)
        return None if future is None else future.result()

    def pop(self, name: str) -> AdapterState | None:
        """`get` for an adapter that leaves the bank."""
        state = self.get(name)
        self._states.pop(name, None)
        return state

    def states(self) -> dict[str, AdapterState]:
        """Returns all states, once they are read."""
        self.make_room(1)
        return {name: future.result() for name, future in self._states.items()}

    def send(self, names: Sequence[str], send: Callable[[str], Sent]) -> None:
        """Sends the arrays of adapters on a thread, one after another. What was sent of others is dropped."""
        self._drop(self._sent.keys() - set(names))
        for name in names:
            if name not in self._sent:
                self._sent[name] = self._sender.submit(send, name)

    def pop_sent(self, name: str) -> Sent | None:
        """Returns what was sent of an adapter; None if nothing was."""
        future = self._sent.pop(name, None)
        return None if future is None else future.result()

    def _drop(self, names: Collection[str]) -> None:
        for name in names:
            self._sent.pop(name).cancel()

    def close(self) -> None:
        """Ends the threads."""
        for threads in (self._reader, self._sender):
            threads.shutdown(wait=True, cancel_futures=True)
