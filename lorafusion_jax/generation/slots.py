"""Adapters in the slots of a bank. A snapshot that gets no slot waits in the memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.generation.packing import BASE


@dataclass(slots=True, eq=False, kw_only=True)
class Sampler:
    """The weights of an adapter at one moment, or the base.

    Attributes:
        number: of all samplers of an engine.
        adapter: index among those of the stages, or `BASE`.
        name: in messages.
        spec: of the adapter, None of the base.
        finite: whether its weights are numbers.
        slot: of the bank (None: none now).
        on_host: its weights, while they are on the host.
        requests: without an end so far.
        running: those of them that run.
        used: moment of its last use, counted in uses.
        dropped: whether it goes after its last request.
    """

    number: int
    adapter: int
    name: str
    spec: AdapterSpec | None = None
    finite: bool = True
    slot: int | None = None
    on_host: Any = None
    requests: int = 0
    running: int = 0
    used: int = 0
    dropped: bool = False


class SlotTable:
    """Which sampler is in which slot.

    Args:
        slots: their number.
        read, write: copy a slot to the host, and back.
        changed: called with the samplers of all slots after a change.
    """

    def __init__(
        self,
        slots: int,
        read: Callable[[int], Any],
        write: Callable[[int, Any], None],
        changed: Callable[[list[Sampler | None]], None],
    ):
        self._held: list[Sampler | None] = [None] * slots
        self._read, self._write, self._changed = read, write, changed
        self._uses = 0

    def take(self, sampler: Sampler) -> int | None:
        """Gives a slot to a sampler; the one that was not used for longest goes to the host. None: all are in use."""
        free = [slot for slot, held in enumerate(self._held) if held is None]
        if not free:
            idle = [held for held in self._held if held is not None and not held.running]
            if not idle:
                return None
            oldest = min(idle, key=lambda held: held.used)
            assert oldest.slot is not None
            oldest.on_host = self._read(oldest.slot)
            free = [oldest.slot]
            oldest.slot = None
        sampler.slot, self._held[free[0]] = free[0], sampler
        self._touch(sampler)
        self._changed(list(self._held))
        return sampler.slot

    def acquire(self, sampler: Sampler) -> int | None:
        """Returns the slot of a sampler for a sequence that starts; brings its weights back if they are on the host."""
        if sampler.adapter != BASE:
            if sampler.slot is None:
                if self.take(sampler) is None:
                    return None
                assert sampler.slot is not None
                self._write(sampler.slot, sampler.on_host)
                sampler.on_host = None
            self._touch(sampler)
        sampler.running += 1
        return BASE if sampler.slot is None else sampler.slot

    def release(self, sampler: Sampler) -> None:
        """Tells that a sequence of a sampler does not run any more."""
        sampler.running -= 1

    def end(self, sampler: Sampler) -> None:
        """Tells that a request of a sampler has ended."""
        sampler.requests -= 1
        if sampler.dropped:
            self.drop(sampler)

    def drop(self, sampler: Sampler) -> None:
        """Frees a sampler after its last request."""
        sampler.dropped = True
        if not sampler.requests:
            if sampler.slot is not None:
                self._held[sampler.slot] = None
            sampler.slot = sampler.on_host = None

    def _touch(self, sampler: Sampler) -> None:
        self._uses += 1
        sampler.used = self._uses
