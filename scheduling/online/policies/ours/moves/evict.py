"""Evict: waiting jobs of one base replace the group of another base with the least worth."""

from __future__ import annotations

from itertools import islice

from scheduling.online.policies.draft import DraftGroup
from scheduling.online.policies.ours.packing import first_pack
from scheduling.online.policies.ours.search import Pack, Search

VICTIMS = 3  # groups that a base may replace, least worth first


def evict(search: Search) -> bool:
    """Makes the replacement with the largest gain in worth."""
    bases = [base for base, waiting in search.backlog.items() if waiting]
    if not search.settings.preemption or not bases:
        return False
    best, most = None, 0.0
    old = search.by_worth([group for group in search.draft.groups.values() if _may_go(search, group)])
    for base in bases:
        for group in islice((group for group in old if group.base != base), VICTIMS):
            pack = first_pack(search, base, search.draft.kind(group), len(group.gpus))
            if pack is None:
                continue
            gain = pack.worth - search.appraiser.of(group) * (1 + search.settings.margin) - _stops(search, pack, group)
            if gain > most:
                best, most = (group, base, pack), gain
    if best is None:
        return False
    group, base, pack = best
    search.close(group)
    block = group.worker, group.gpus[0]
    search.open(base, block, pack.members, pack.rate, f"worth more here than {group.base}")
    return True


def _may_go(search: Search, group: DraftGroup) -> bool:
    """Whether a group may end: it trains, and this decision placed none of its members with a reason to stay."""
    return bool(group.members) and not group.is_new and search.protected.isdisjoint(group.members)


def _stops(search: Search, pack: Pack, group: DraftGroup) -> float:
    """What is lost while the pack's session opens, and the group's again if the pack ends soon, per second."""
    lasts_s = search.lasts_s(pack.members, pack.rate)
    lost = pack.worth * search.open_s(pack.members[0])
    if lasts_s < search.settings.horizon_s:
        lost += search.appraiser.of(group) * search.open_s(group.members[0])
    return lost / min(lasts_s, search.settings.horizon_s)
