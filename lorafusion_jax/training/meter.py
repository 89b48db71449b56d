"""Measures throughput and remaining time from the wall time of slots and pauses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

WARM_UP = 5  # first slots are slower: they compile, fill caches and raise clocks
WINDOW = 50
EVALUATING, SAVING, COMPILING, SAMPLING = "evaluating", "saving", "compiling", "sampling"  # kinds of pauses


class Meter:
    """Measures one process of a run. After the first slots, all time counts: as part of a slot or as a pause.

    A row takes the mean time of the rows of recent slots, slow ones included. Pauses come now and then, so what a slot
    has to bear of them is their share of all time after the first slots. What goes before, loading, compiling and the
    first slots, counts nowhere.

    Args:
        slot_tokens: adapter → real tokens, for each slot of the plan.
        slot_rows: rows that each slot computes, padding included.
        last_slot: slot after which each adapter is done.

    Attributes:
        seconds: time of all slots, including the first.
    """

    def __init__(
        self,
        slot_tokens: Sequence[Mapping[str, int]] = (),
        slot_rows: Sequence[int] = (),
        last_slot: Mapping[str, int] = {},
    ):
        self.replan(slot_tokens, slot_rows, last_slot)
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # seconds, slot
        self._seen, self._at, self._before_pause = 0, time.perf_counter(), 0.0
        self._busy_s = 0.0  # time of slots after the first ones
        self._paused_s: dict[str, float] = {}  # time of pauses after the first slots
        self.seconds = 0.0

    def drop(self, name: str, from_slot: int) -> None:
        """Removes an adapter that has ended from all slots from `from_slot` on."""
        later_slots = [{other: n for other, n in slot.items() if other != name} for slot in self._tokens[from_slot:]]
        self._tokens[from_slot:] = later_slots
        self._last[name] = -1
        self._busy = _busy_rows(self._tokens, self._rows)

    def replan(
        self, slot_tokens: Sequence[Mapping[str, int]], slot_rows: Sequence[int], last_slot: Mapping[str, int]
    ) -> None:
        """Takes another plan, equal to the one before in all slots that are done."""
        self._tokens, self._rows, self._last = list(slot_tokens), list(slot_rows), dict(last_slot)
        self._busy = _busy_rows(self._tokens, self._rows)

    def slots_done(self, slots: Sequence[int]) -> None:
        """Records that these slots (from 0) are done, the last of them just now."""
        if not slots:
            return
        now = time.perf_counter()
        took = self._before_pause + now - self._at
        self._at, self._before_pause = now, 0.0
        self.seconds += took
        self._seen += len(slots)
        if self._seen > WARM_UP:
            self._busy_s += took
            self._recent.extend((took / len(slots), slot) for slot in slots)
        if slots[-1] + 1 == len(self._tokens) and not self._recent:  # measure a very short run as a whole
            self._busy_s = self.seconds
            self._recent.append((self.seconds / self._seen, slots[-1]))

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Counts the time of the body as a pause, not as time of slots."""
        began = time.perf_counter()
        self._before_pause += began - self._at
        try:
            yield
        finally:
            self._at = time.perf_counter()
            if self._seen >= WARM_UP:
                self._paused_s[reason] = self._paused_s.get(reason, 0.0) + self._at - began

    def snapshot(self, slots_done: int, evaluations_left_s: float | None = 0.0) -> dict:
        """Returns rates and remaining times; None where nothing is measured yet.

        Args:
            evaluations_left_s: expected time of future evaluations (None: unknown).
        """
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
        recent_s = sum(seconds for seconds, _ in self._recent)
        per_slot = recent_s / len(self._recent)
        paused_s = sum(self._paused_s.values())
        wall_s = recent_s * (1 + paused_s / self._busy_s)
        useful = sum(sum(self._tokens[slot].values()) for _, slot in self._recent)
        tokens_of = {name: sum(self._tokens[slot].get(name, 0) for _, slot in self._recent) for name in self._last}
        rows = sum(self._rows[slot] for _, slot in self._recent)
        rows_left = self._rows_left(slots_done, len(self._tokens))
        eta_s = rows_left * (recent_s / rows) * (1 + self._paused_s.get(SAVING, 0.0) / self._busy_s) + (
            evaluations_left_s or 0.0
        )
        each_s = eta_s / max(rows_left, 1)
        seconds_left = {name: self._rows_left(slots_done, last + 1) * each_s for name, last in self._last.items()}
        return {
            "slots": len(self._tokens),
            "useful_tokens_per_s": round(useful / wall_s, 1),
            "processed_tokens_per_s": round(rows / wall_s, 1),
            "slot_seconds": round(per_slot, 5),
            "eta_s": round(eta_s, 2),
            "adapter_eta_s": {name: round(seconds, 2) for name, seconds in seconds_left.items()},
            "adapter_tokens_per_s": {name: round(tokens / wall_s, 1) for name, tokens in tokens_of.items()},
            "paused_share": round(paused_s / (self._busy_s + paused_s), 4),
            "paused_s": {reason: round(seconds, 3) for reason, seconds in self._paused_s.items()},
            "eta_leaves_out": ["evaluations"] if evaluations_left_s is None else [],
        }

    def _rows_left(self, start: int, stop: int) -> int:
        """Rows of the slots of [start, stop) that have work: no-ops and slots of failed adapters take no time."""
        return int(max(self._busy[stop] - self._busy[start], 0))


def _busy_rows(slot_tokens: Sequence[Mapping[str, int]], slot_rows: Sequence[int]) -> np.ndarray:
    """Rows of the slots with work before each slot, [slots + 1]."""
    busy = [rows if tokens else 0 for tokens, rows in zip(slot_tokens, slot_rows, strict=True)]
    return np.concatenate([[0], np.cumsum(busy)]).astype(np.int64)
