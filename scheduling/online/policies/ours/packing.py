"""Packing: which waiting jobs of a base would share a new group."""

from __future__ import annotations

from collections.abc import Sequence

from scheduling.online.policies.ours.search import Pack, Search
from scheduling.online.rates import Kind
from scheduling.online.sharing import GroupRate


def pack(search: Search, kind: Kind, gpus: int, waiting: Sequence[str]) -> Pack | None:
    """Collects waiting jobs, most valuable first, while each raises the worth of the group enough."""
    settings, appraiser = search.settings, search.appraiser
    largest = settings.largest_group if settings.grouping else 1
    members, best, worth, misses = list[str](), None, 0.0, 0
    for name in waiting:
        if misses >= settings.candidates or len(members) >= largest:
            break
        if search.overdue and not search.may_start(name):
            continue
        more = [*members, name]
        rate = appraiser.rate(more, kind, gpus)
        if rate is not None and not _may_move(search, more, rate):
            rate = None
        if rate is not None and (gained := appraiser.worth(more, rate)) > worth:
            members, best, worth, misses = more, rate, gained, 0
        else:
            misses += 1
    return Pack(members, best, worth, search.lasts_s(members, best)) if best else None


def _may_move(search: Search, members: Sequence[str], rate: GroupRate) -> bool:
    """Whether members that this decision takes out of other groups stay within their bounds while the session opens."""
    return search.trained.isdisjoint(members) or search.appraiser.tolerates(
        search.trained, rate, members, search.open_s(members[0])
    )


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
