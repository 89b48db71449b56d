"""Sizes: a group gives half of its GPUs away, takes the adjacent free half, or merges with a neighbour of its base."""

from __future__ import annotations

from typing import NamedTuple

from scheduling.online.policies.draft import DraftGroup
from scheduling.online.policies.ours.packs import best_pack
from scheduling.online.policies.ours.search import Block, Pack, Search
from scheduling.online.rates import Kind
from scheduling.online.sharing import GroupRate

SPLIT_FROM = 8  # minimum GPUs of a group that may be split in two
LEAST_WORTH = 0.5  # of a group's worth that half of its GPUs have to retain


class _Split(NamedTuple):
    gain: float
    group: DraftGroup
    rate: GroupRate  # on half of its GPUs
    base: str
    pack: Pack  # on the other half


def split(search: Search) -> bool:
    """Makes the split with the largest gain in worth."""
    if not search.settings.elasticity or not any(search.backlog.values()):
        return False
    splits = (_split_of(search, group) for group in search.poorest([*search.draft.groups.values()]))
    best = max((option for option in splits if option is not None), key=lambda option: option.gain, default=None)
    if best is None:
        return False
    group = best.group
    reason = search.appraiser.reason(group.members, best.rate, search.draft.kind(group), [group])
    search.draft.halve(group)
    group.mesh = best.rate.mesh
    group.why.append(f"half of its GPUs do nearly as well: {reason}")
    search.changed(group)
    block, pack = (group.worker, group.gpus[-1] + 1), best.pack
    search.open(best.base, block, pack.members, pack.rate, f"half of {group.name}'s GPUs are worth more here")
    return True


def _split_of(search: Search, group: DraftGroup) -> _Split | None:
    appraiser, half = search.appraiser, len(group.gpus) // 2
    if len(group.gpus) < SPLIT_FROM or group.is_new or group.ready_s > search.now:
        return None
    worth, kind = appraiser.of(group), search.draft.kind(group)
    rate = appraiser.packed_rate(group.members, kind, half)
    if rate is None or (half_worth := appraiser.worth(group.members, rate)) < LEAST_WORTH * worth:
        return None
    best = best_pack(search, kind, half)
    if best is None:
        return None
    open_s, (base, pack) = search.open_s(group.members[0]), best
    effect_s = min(search.settings.horizon_s, pack.lasts_s)
    gain = (half_worth + pack.worth) * (1 - open_s / effect_s) - worth * (1 + search.settings.margin)
    if gain <= 0 or not appraiser.tolerates(
        group.members, rate, group.members, kind, search.move_s(group.members[0], [group.worker])
    ):
        return None
    return _Split(gain, group, rate, base, pack)


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
    neighbours = search.draft.groups_on(group.worker, around)
    for other in neighbours:
        if other.base != group.base or other.gpus[0] < first or other.gpus[-1] >= first + size:
            return None
        if other.name < group.name:
            return None  # the merger is found from the other group
        if other.ready_s > search.now:
            return None  # its session opens, or stops for a change
    members = [name for other in neighbours for name in other.members]
    kind = search.draft.kind(group)
    rate = search.appraiser.packed_rate(members, kind, size)
    if rate is None:
        return None
    gain = _gain(search, neighbours, members, kind, rate)
    return _Growth(gain, neighbours, members, rate, (group.worker, first)) if gain is not None else None


def _gain(search: Search, groups: list[DraftGroup], members: list[str], kind: Kind, rate: GroupRate) -> float | None:
    """Gain in worth; None if it does not make up for the stop while the members last."""
    before, after = sum(map(search.appraiser.of, groups)), search.appraiser.worth(members, rate)
    open_s = search.open_s(members[0])
    lasts_s = min(search.settings.horizon_s * 2, search.lasts_s(members, rate))
    if after * (lasts_s - open_s) <= before * lasts_s * (1 + search.settings.margin):
        return None
    move_s = search.move_s(members[0], [groups[0].worker])
    return after - before if search.appraiser.tolerates(members, rate, members, kind, move_s) else None
