"""How adapters take turns where not all are on the devices: as arguments of a plan, and when each is needed next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypedDict

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.stack import residents
from lorafusion_jax.data.prepare import Prepared
from scheduling import AdapterJob, Plan

NEAR = 8  # slots in which adapters come together; with twice as many a tenth more of them move
SOON = 4 * NEAR  # slots in which one that is needed again stays


class Turns(TypedDict):
    """Arguments of `make_plan` and `replan`."""

    most_open: int | None
    rests: Mapping[str, Sequence[int]]


def turns(
    config: JobConfig, prepared: Prepared, jobs: Sequence[AdapterJob], *, not_awaited: Collection[str] = ()
) -> Turns:
    """Returns how adapters take turns. Those that are compared come to the step of a comparison before any goes on.

    Args:
        not_awaited: adapters for which no comparison waits.
    """
    steps, rests = {job.name: job.num_batches for job in jobs}, {}
    for group in compared(config, prepared, steps) if config.halving.is_on else ():
        marks = config.halving.marks(max(steps[name] for name in group))
        awaited = [name for name in group if name not in not_awaited]
        if len(awaited) > 1:
            rests |= {name: [config.halving.step_of(mark, steps[name]) for mark in marks] for name in awaited}
    return {"most_open": residents(config), "rests": rests}


def compared(config: JobConfig, prepared: Prepared, names: Iterable[str]) -> list[list[str]]:
    """Returns the adapters in groups that can be compared: with the same held-out data and metric."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        held_out = prepared.adapters[name].eval
        if held_out is not None:
            groups.setdefault((held_out.digest, config.adapter(name).early_stop.metric), []).append(name)
    return list(groups.values())


class NextUses:
    """When the adapters of a plan are needed.

    >>> uses = NextUses([{"law"}, {"med"}, {"ore"}, {"law"}])
    >>> uses.wanted(2, {"law", "med"}, 2), uses.coming(0, {"law", "med"}, 2), uses.count_moves(2)
    (['ore', 'law'], ['ore'], 3)
    """

    def __init__(self, adapters_of_slots: Iterable[Iterable[str]]):
        self._slots = [frozenset(names) for names in adapters_of_slots]
        self._uses: dict[str, list[int]] = {}
        for slot, names in enumerate(self._slots):
            for name in sorted(names):
                self._uses.setdefault(name, []).append(slot)

    @classmethod
    def of(cls, plan: Plan) -> NextUses:
        return cls(plan.slot_adapters)

    def wanted(self, slot: int, resident: Collection[str], most: int, stay: Collection[str] = ()) -> list[str]:
        """Returns who should be in places from a slot on.

        First its adapters and those that must stay, then those in places that are needed soon, then others that are
        needed in the next slots, then the rest; of each those that are needed first. So many come at a time, and one
        that leaves is needed late.
        """
        after = {name: bisect_left(uses, slot) for name, uses in self._uses.items()}
        uses = {name: self._uses[name][at] for name, at in after.items() if at < len(self._uses[name])}
        uses |= {name: len(self._slots) for name in stay if name not in uses}

        def order(name: str) -> tuple[bool, bool, bool, int]:
            first, last = uses[name] <= slot or name in stay, slot + (SOON if name in resident else NEAR)
            return not first, uses[name] > last, name not in resident, uses[name]

        return sorted(uses, key=order)[:most]

    def coming(self, slot: int, resident: Collection[str], most: int) -> list[str]:
        """Returns who comes to a place at the next slot from this one on that lacks one; first who is needed first."""
        later = next((at for at in range(slot, len(self._slots)) if not self._slots[at] <= set(resident)), None)
        wanted = [] if later is None else self.wanted(later, resident, most)
        return [name for name in wanted if name not in resident]

    def adapters(self, slot: int) -> frozenset[str]:
        """Returns the adapters of a slot."""
        return self._slots[slot]

    def count_moves(self, most: int) -> int:
        """Counts how often an adapter comes to a place, where `most` are in places at a time."""
        resident: set[str] = set()
        moves = 0
        for slot, names in enumerate(self._slots):
            if not names <= resident:
                wanted = set(self.wanted(slot, resident, most))
                moves += len(wanted - resident)
                resident = wanted
        return moves
