"""Throughput and time left, from the times of finished slots."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping

WARM_UP = 5  # first slots compile, fill caches and clocks: they would spoil the estimate
WINDOW = 50


class Meter:
    """Measures slots; every slot costs the same, so time left is slots left times the median.

    Args:
        useful_tokens: real tokens of each slot of the plan.
        capacity_tokens: processed tokens of a slot.
        last_slot: slot after which each adapter is done.
        done: slots that a resumed run has behind it.
    """

    def __init__(self, useful_tokens: list[int], capacity_tokens: int, last_slot: Mapping[str, int], done: int = 0):
        self._useful, self._capacity, self._last = useful_tokens, capacity_tokens, dict(last_slot)
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._first, self._seen, self._at = done, 0, time.perf_counter()
        self.seconds = 0.0

    def slot_done(self, slot: int) -> None:
        """Notes that slot number `slot` (from 0) has just finished."""
        now = time.perf_counter()
        self.seconds += now - self._at
        self._seen += 1
        if self._seen > WARM_UP or slot + 1 == len(self._useful):
            self._recent.append((now - self._at, self._useful[slot]))
        self._at = now

    def pause(self) -> None:
        """Leaves out time that belongs to no slot: evaluation, saving."""
        self._at = time.perf_counter()

    def snapshot(self, slots_done: int) -> dict:
        """Rates and times left; None while there is nothing to measure yet."""
        if not self._recent:
            return {"slots": len(self._useful), "useful_tokens_per_s": None, "processed_tokens_per_s": None,
                    "slot_seconds": None, "eta_s": None, "adapter_eta_s": {}}
        per_slot = statistics.median(seconds for seconds, _ in self._recent)
        useful = sum(tokens for _, tokens in self._recent) / len(self._recent)
        left = {name: max(last + 1 - slots_done, 0) * per_slot for name, last in self._last.items()}
        return {"slots": len(self._useful), "useful_tokens_per_s": round(useful / per_slot, 1),
                "processed_tokens_per_s": round(self._capacity / per_slot, 1), "slot_seconds": round(per_slot, 5),
                "eta_s": round((len(self._useful) - slots_done) * per_slot, 2),
                "adapter_eta_s": {name: round(seconds, 2) for name, seconds in left.items()}}
