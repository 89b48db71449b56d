"""Evict: waiting jobs of one base replace the group of another base with the least worth."""

from __future__ import annotations

from scheduling.online.policies.ours.packing import first_pack
from scheduling.online.policies.ours.search import Search

VICTIMS = 3  # groups that a base may replace, least worth first


def evict(search: Search) -> bool:
    """Makes the replacement with the largest gain in worth."""
    if not search.settings.preemption:
        return False
    best, most = None, 0.0
    for base, waiting in search.backlog.items():
        if not waiting:
            continue
        others = [g for g in search.draft.groups.values() if g.members and g.base != base and not g.is_new]
        for group in search.by_worth(others)[:VICTIMS]:
            pack = first_pack(search, base, search.draft.kind(group), len(group.gpus))
            if pack is None:
                continue
            stop = search.open_s(pack.members[0]) / search.settings.horizon_s
            gain = pack.worth * (1 - stop) - search.appraiser.of(group) * (1 + search.settings.margin)
            if gain > most:
                best, most = (group, base, pack), gain
    if best is None:
        return False
    group, base, pack = best
    search.close(group)
    block = group.worker, group.gpus[0]
    search.open(base, block, pack.members, pack.rate, f"worth more here than {group.base}")
    return True
