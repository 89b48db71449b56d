"""Grow or merge: a group takes the adjacent free half, or merges with adjacent groups of its base."""

from __future__ import annotations

from typing import NamedTuple

from scheduling.online.policies.draft import DraftGroup
from scheduling.online.policies.ours.search import Block, Search
from scheduling.online.sharing import GroupRate

LARGEST = 8  # GPUs of a group


class _Growth(NamedTuple):
    gain: float
    groups: list[DraftGroup]  # that become one
    members: list[str]
    rate: GroupRate
    block: Block


def grow(search: Search) -> bool:
    """Makes the growth or merger with the largest gain in worth."""
    growths = (_growth_of(search, group) for group in search.draft.groups.values())
    best = max((growth for growth in growths if growth is not None), key=lambda growth: growth.gain, default=None)
    if best is None:
        return False
    kind = search.draft.kind(best.groups[0])
    reason = search.appraiser.reason(best.members, best.rate, kind, best.groups)
    for group in best.groups:
        search.draft.close(group)
        search.changed(group)
    opened = search.draft.open(best.groups[0].base, best.block, best.rate.mesh, list(best.members), "")
    opened.why[:] = [f"{'a merger' if len(best.groups) > 1 else 'the free half next to it'} pays: {reason}"]
    return True


def _growth_of(search: Search, group: DraftGroup) -> _Growth | None:
    size = 2 * len(group.gpus)
    first = group.gpus[0] // size * size
    if not group.members or size > LARGEST or first + size > search.state.workers[group.worker].gpus:
        return None
    around = range(first, first + size)
    merged = search.draft.groups_on(group.worker, around)
    for other in merged:
        if other.base != group.base or other.gpus[0] < first or other.gpus[-1] >= first + size:
            return None
        if other.name < group.name:
            return None  # the merger is found from the other group
    members = [name for other in merged for name in other.members]
    rate = search.appraiser.rate(members, search.draft.kind(group), size)
    if rate is None:
        return None
    gain = _gain(search, merged, members, rate)
    return _Growth(gain, merged, members, rate, (group.worker, first)) if gain is not None else None


def _gain(search: Search, groups: list[DraftGroup], members: list[str], rate: GroupRate) -> float | None:
    """Gain in worth; None if it does not make up for the stop while the members last."""
    before, after = sum(map(search.appraiser.of, groups)), search.appraiser.worth(members, rate)
    open_s = search.open_s(members[0])
    lasts_s = min(search.settings.horizon_s * 2, search.lasts_s(members, rate))
    if after * (lasts_s - open_s) <= before * lasts_s * (1 + search.settings.margin):
        return None
    return after - before if search.appraiser.tolerates(members, rate, members, open_s) else None
