"""Free GPUs: the group with the highest worth takes them."""

from __future__ import annotations

from itertools import product

from scheduling.online.policies.ours.packing import first_pack
from scheduling.online.policies.ours.search import Search

QUIET = 0.25  # exponent of a group's GPUs while all waiting jobs fit


def fill_free(search: Search) -> bool:
    """Opens a group on free GPUs, with the base and the size whose waiting jobs are worth most.

    While more jobs wait than fit, groups are compared by worth per GPU.
    """
    free = search.draft.free_gpus()
    if not free or not any(search.backlog.values()):
        return False
    crowded = sum(map(len, search.backlog.values())) > free
    power = search.settings.thrift if crowded else QUIET
    best, most = None, 0.0
    for base, waiting in search.backlog.items():
        sizes = (8, 4, 2, 1) if search.settings.elasticity else search.best_sizes(waiting)
        for size, kind in product(sizes if waiting else (), search.kinds):
            block = search.draft.block(base, size, kind)
            found = first_pack(search, base, kind, size) if block else None
            if block and found and (best is None or found.worth / size**power > most):
                best, most = (base, block, found), found.worth / size**power
    if best is None:
        return False
    base, block, found = best
    search.open(base, block, found.members, found.rate, "GPUs are free")
    return True
