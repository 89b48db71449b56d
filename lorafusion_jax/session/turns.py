"""Turns of owners while training clients wait: slots are shared by tokens, as deficit round robin does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from scheduling import Slot
from scheduling.window import Cursor, Tail

JOBS = ""  # the owner of all jobs together
JOBS_SHARE = 0.5
CREDIT = 4.0  # slots that an owner who had no rows may be ahead of others: its first call joins the next slot


@dataclass(slots=True, kw_only=True)
class Turns:
    """The owner that has received fewest tokens for its weight goes first, however many adapters it has.

    Args:
        jobs_share: weight of all jobs together beside the owners of clients, whose weight is 1 unless set. Jobs have
            what clients leave, too.
    """

    jobs_share: float = JOBS_SHARE
    _served: dict[str, float] = field(default_factory=dict[str, float])  # owner → slots for its weight
    _weights: dict[str, float] = field(default_factory=dict[str, float])

    def weigh(self, cursors: Sequence[Cursor], owners: Sequence[str], tail: Tail) -> tuple[list[Cursor], Tail]:
        """Returns cursors with the weights, and the tail with the turns, of a window.

        Args:
            cursors: of adapters that have rows.
            owners: of each. Jobs alone keep what they have.
        """
        groups: dict[str, list[Cursor]] = {}
        for cursor, owner in zip(cursors, owners, strict=True):
            groups.setdefault(owner, []).append(cursor)
        if set(groups) <= {JOBS}:
            # Without clients there is nothing to share: what jobs receive alone must not count against them later.
            self._served.clear()
            self._weights.clear()
            return list(cursors), tail
        least = min((self._served[owner] for owner in groups if owner in self._served), default=0.0)
        # An owner who was away catches up by CREDIT slots at most, not by all that it left to others.
        served_by_owner = {owner: max(self._served.get(owner, -inf), least - CREDIT) for owner in groups}
        self._served = {
            owner: slots for owner, slots in self._served.items() if slots > least - CREDIT
        } | served_by_owner
        first, served, weights = min(served_by_owner.values()), dict[str, float](), dict[str, float]()
        for owner, group in groups.items():
            total = sum(cursor.job.weight for cursor in group)
            # The mean of its adapters: an owner gets no larger share by starting more of them.
            self._weights[owner] = self.jobs_share if owner == JOBS else total / len(group)
            ahead = {cursor.job.name: tail.served.get(cursor.job.name, 0.0) for cursor in group}
            for cursor in group:
                name = cursor.job.name
                # Between owners their turns decide; among adapters of one owner, what each has received.
                served[name] = served_by_owner[owner] - first + ahead[name] - min(ahead.values())
                weights[name] = self._weights[owner] * cursor.job.weight / total
        weighed = [replace(cursor, job=replace(cursor.job, weight=weights[cursor.job.name])) for cursor in cursors]
        return weighed, replace(tail, served=served)

    def note(self, slots: Sequence[Slot], cursors: Sequence[Cursor], owners: Sequence[str], tail: Tail) -> None:
        """Notes what owners have received in slots of a window that `weigh` was asked for."""
        room = tail.limits.slot_tiles * tail.limits.tile_tokens
        lengths = {cursor.job.name: cursor.job.sample_tokens for cursor in cursors}
        names = {cursor.job.name: owner for cursor, owner in zip(cursors, owners, strict=True)}
        tokens: Counter[str] = Counter()
        for slot in slots:
            for ref in slot.samples:
                tokens[names[ref.adapter]] += lengths[ref.adapter][ref.sample]
        for owner in self._served.keys() & tokens.keys():
            self._served[owner] += tokens[owner] / room / self._weights[owner]
