"""Packs: waiting jobs of a base that would share a new group, on free GPUs or in the place of another group.

A group of another base goes for good, or while the pack lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product
from math import inf

from scheduling.online.policies.draft import DraftGroup
from scheduling.online.policies.ours.search import Pack, Search
from scheduling.online.rates import Kind
from scheduling.online.sharing import GroupRate


def pack(search: Search, kind: Kind, gpus: int, waiting: Sequence[str]) -> Pack | None:
    """Collects waiting jobs, most valuable first, while each raises the worth of the group enough."""
    settings, appraiser = search.settings, search.appraiser
    largest = settings.largest_group if settings.grouping else 1
    members, worth, misses = list[str](), 0.0, 0
    grown = list[tuple[list[str], GroupRate]]()
    for name in waiting:
        if misses >= settings.candidates or len(members) >= largest:
            break
        if search.overdue and not search.may_start(name):
            continue
        more = [*members, name]
        rate = appraiser.rate(more, kind, gpus)
        if rate is not None and not search.trained.isdisjoint(more) and not _stay_within(search, more, kind, rate):
            rate = None
        if rate is not None and (more_worth := appraiser.worth(more, rate)) > worth:
            members, worth, misses = more, more_worth, 0
            grown.append((members, rate))
        else:
            misses += 1
    for members, rate in reversed(grown):  # the largest whose bounds hold as batches are packed
        exact_rate = appraiser.packed(members, kind, rate)
        if exact_rate is not None and _stay_within(search, members, kind, exact_rate):
            return Pack(members, exact_rate, appraiser.worth(members, exact_rate), search.lasts_s(members, exact_rate))
    return None


def _stay_within(search: Search, members: Sequence[str], kind: Kind, rate: GroupRate) -> bool:
    """Whether members stay within their bounds, also those that this decision takes out of other groups, which stop
    while the session opens. A waiting job may always train alone, also if its bound can no longer be kept."""
    stays = search.trained.isdisjoint(members)
    if stays and len(members) == 1:
        return True
    stop_s = 0.0 if stays else search.move_s(members[0], search.draft.names_of(kind))
    return search.appraiser.tolerates(search.trained, rate, members, kind, stop_s)


def first_pack(search: Search, base: str, kind: Kind, gpus: int) -> Pack | None:
    """`pack` of a base's waiting jobs, cached until they change."""
    key = base, kind, gpus
    if key not in search.packs:
        search.packs[key] = pack(search, kind, gpus, search.backlog[base])
    return search.packs[key]


def best_pack(search: Search, kind: Kind, gpus: int) -> tuple[str, Pack] | None:
    """(base, pack) of the waiting jobs that are worth most on this number of GPUs."""
    packs = ((base, first_pack(search, base, kind, gpus)) for base, names in search.backlog.items() if names)
    return max(((base, pack) for base, pack in packs if pack), key=lambda entry: entry[1].worth, default=None)


def fill_free(search: Search) -> bool:
    """Opens a group on free GPUs, with the base and the size whose waiting jobs are worth most, starts included."""
    if not search.draft.free_gpus() or not any(search.backlog.values()):
        return False
    best, most = None, 0.0
    for base, waiting in search.backlog.items():
        sizes = (8, 4, 2, 1) if search.settings.elasticity else search.best_sizes(waiting)
        for size, kind in product(sizes if waiting else (), search.kinds):
            block = search.draft.block(base, size, kind)
            pack = first_pack(search, base, kind, size) if block else None
            if block is None or pack is None:
                continue
            trains = pack.lasts_s / (pack.lasts_s + search.start_s(base, block, size, pack.members[0]))
            worth = pack.worth * trains / size**search.settings.thrift
            if best is None or worth > most:
                best, most = (base, block, pack), worth
    if best is None:
        return False
    base, block, pack = best
    search.open(base, block, pack.members, pack.rate, "GPUs are free")
    return True


VICTIMS = 3  # groups that a base may replace, least worth first


def evict(search: Search) -> bool:
    """Makes the replacement with the largest gain in worth."""
    bases = [base for base, waiting in search.backlog.items() if waiting]
    if not search.settings.preemption or not bases:
        return False
    best, most = None, 0.0
    free_s = _next_free_s(search)
    candidates = search.by_worth([group for group in search.draft.groups.values() if _may_go(search, group)])
    for base in bases:
        first = search.backlog[base][0]
        yielding = (group for group in candidates if group.base != base and _yields(search, group, first))
        for group in islice(yielding, VICTIMS):
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


def _yields(search: Search, group: DraftGroup, waiting: str) -> bool:
    """Whether a group ends for a waiting job: not for one of lower priority nor, until it trains, of an equal one."""
    highest, other = search.highest(group.members), search.claims.priority.get(waiting, 0)
    return other > highest or (other == highest and group.ready_s <= search.now)


def _next_free_s(search: Search) -> float:
    """Seconds until the first group ends, at most the horizon: so long a job waits that replaces nobody."""
    groups = [group for group in search.draft.groups.values() if group.members]
    ends = (search.lasts_s(group.members, rate) for group in groups if (rate := search.appraiser.current_rate(group)))
    return min([search.settings.horizon_s, *ends])


def _exchange(search: Search, pack: Pack, group: DraftGroup, free_s: float) -> float:
    """Gain per second if a short pack goes first and the group comes back after it.

    The pack ends sooner by the wait until GPUs are free. The group ends later by the pack and two starts, and all
    others by one start more. Seconds of a higher priority are not given for those of a lower one.
    """
    if search.highest(group.members) > min(search.claims.priority.get(name, 0) for name in pack.members):
        return -inf
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
