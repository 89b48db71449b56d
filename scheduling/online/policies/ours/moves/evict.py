"""Evict: waiting jobs of one base replace the group of another base, for good or while they last."""

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
    free_s = _next_free_s(search)
    old = search.by_worth([group for group in search.draft.groups.values() if _may_go(search, group)])
    for base in bases:
        for group in islice((group for group in old if group.base != base), VICTIMS):
            pack = first_pack(search, base, search.draft.kind(group), len(group.gpus))
            if pack is None:
                continue
            gain = pack.worth - search.appraiser.of(group) * (1 + search.settings.margin) - _stops(search, pack, group)
            gain = max(gain, _exchange(search, pack, group, free_s))
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


def _next_free_s(search: Search) -> float:
    """Seconds until the first group ends, at most the horizon: so long a job waits that replaces nobody."""
    groups = [group for group in search.draft.groups.values() if group.members]
    ends = (search.lasts_s(group.members, rate) for group in groups if (rate := search.appraiser.current_rate(group)))
    return min([search.settings.horizon_s, *ends])


def _exchange(search: Search, pack: Pack, group: DraftGroup, free_s: float) -> float:
    """Gain per second if a short pack goes first and the group comes back after it.

    The pack ends sooner by the wait until GPUs are free. The group ends later by the pack and two starts, and all
    others by one start more.
    """
    back_s = search.open_s(group.members[0])
    away_s = search.open_s(pack.members[0]) + pack.lasts_s + back_s
    others = sum(map(len, search.backlog.values())) - len(pack.members)
    saved_s = len(pack.members) * free_s - len(group.members) * away_s * (1 + search.settings.margin) - others * back_s
    return saved_s / free_s


def _stops(search: Search, pack: Pack, group: DraftGroup) -> float:
    """What is lost while the pack's session opens, and the group's again if the pack ends soon, per second."""
    lasts_s = pack.lasts_s
    lost = pack.worth * search.open_s(pack.members[0])
    if lasts_s < search.settings.horizon_s:
        lost += search.appraiser.of(group) * search.open_s(group.members[0])
    return lost / min(lasts_s, search.settings.horizon_s)
