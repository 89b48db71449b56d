"""Free GPUs: the group with the highest worth takes them."""

from __future__ import annotations

from itertools import product

from scheduling.online.policies.ours.packing import first_pack
from scheduling.online.policies.ours.search import Search


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
