"""Throughput and time left, from the times of finished slots."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

WARM_UP = 5  # first slots compile, fill caches and clocks: they would spoil the estimate
WINDOW = 50


class Meter:
    """Measures slots. Rates and time left follow from the mean time of the recent slots, slow ones included.

    Args:
        slot_tokens: adapter → real tokens, for each slot of the plan.
        capacity_tokens: processed tokens of a slot.
        last_slot: slot after which each adapter is done.
        done: slots that a resumed run has done.
    """

    def __init__(
        self,
        slot_tokens: Sequence[Mapping[str, int]],
        capacity_tokens: int,
        last_slot: Mapping[str, int],
        done: int = 0,
    ):
        self._tokens, self._capacity, self._last = list(slot_tokens), capacity_tokens, dict(last_slot)
        self._busy = _count_busy(self._tokens)
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # seconds, slot
        self._seen, self._at = 0, time.perf_counter()
        self.seconds = 0.0
        self._paused = False

    def drop(self, name: str, from_slot: int) -> None:
        """Leaves an adapter out of all slots from `from_slot` on: it has failed."""
        rest = [{other: n for other, n in slot.items() if other != name} for slot in self._tokens[from_slot:]]
        self._tokens[from_slot:] = rest
        self._last[name] = -1
        self._busy = _count_busy(self._tokens)

    def replan(self, slot_tokens: Sequence[Mapping[str, int]], last_slot: Mapping[str, int]) -> None:
        """Takes another plan, equal to the one before in all slots that are done."""
        self._tokens, self._last = list(slot_tokens), dict(last_slot)
        self._busy = _count_busy(self._tokens)

    def slots_done(self, slots: Sequence[int]) -> None:
        """Notes that these slots (from 0) have been found finished, the last of them just now."""
        if not slots:
            return
        now = time.perf_counter()
        each = (now - self._at) / len(slots)
        self.seconds += now - self._at
        self._seen += len(slots)
        if not self._paused and self._seen > WARM_UP:
            self._recent.extend((each, slot) for slot in slots)
        if slots[-1] + 1 == len(self._tokens) and not self._recent:  # so short a run is measured as a whole
            self._recent.append((self.seconds / self._seen, slots[-1]))
        self._at, self._paused = now, False

    def pause(self) -> None:
        """Leaves out time that belongs to no slot: evaluation, saving. Slots that ran meanwhile are not counted."""
        self._at, self._paused = time.perf_counter(), True

    def snapshot(self, slots_done: int) -> dict:
        """Rates and times left; None while there is nothing to measure yet."""
        if not self._recent:
            return {
                "slots": len(self._tokens),
                "useful_tokens_per_s": None,
                "processed_tokens_per_s": None,
                "slot_seconds": None,
                "eta_s": None,
                "adapter_eta_s": {},
                "adapter_tokens_per_s": {},
            }
        window_s = sum(seconds for seconds, _ in self._recent)
        per_slot = window_s / len(self._recent)
        useful = sum(sum(self._tokens[slot].values()) for _, slot in self._recent)
        own = {name: sum(self._tokens[slot].get(name, 0) for _, slot in self._recent) for name in self._last}
        left = {name: self._busy_slots(slots_done, last + 1) * per_slot for name, last in self._last.items()}
        return {
            "slots": len(self._tokens),
            "useful_tokens_per_s": round(useful / window_s, 1),
            "processed_tokens_per_s": round(self._capacity / per_slot, 1),
            "slot_seconds": round(per_slot, 5),
            "eta_s": round(self._busy_slots(slots_done, len(self._tokens)) * per_slot, 2),
            "adapter_eta_s": {name: round(seconds, 2) for name, seconds in left.items()},
            "adapter_tokens_per_s": {name: round(tokens / window_s, 1) for name, tokens in own.items()},
        }

    def _busy_slots(self, start: int, stop: int) -> int:
        """Slots of [start, stop) that have work: no-ops and slots of failed adapters take no time."""
        return int(max(self._busy[stop] - self._busy[start], 0))


def _count_busy(slot_tokens: Sequence[Mapping[str, int]]) -> np.ndarray:
    """Slots with work before each slot, [slots + 1]."""
    return np.concatenate([[0], np.cumsum([bool(tokens) for tokens in slot_tokens])]).astype(np.int64)
