"""Split: a group with low density on many GPUs gives half of them away."""

from __future__ import annotations

from typing import NamedTuple

from scheduling.online.policies.draft import DraftGroup
from scheduling.online.policies.ours.packing import best_pack
from scheduling.online.policies.ours.search import Pack, Search
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
    rate = appraiser.rate(group.members, kind, half)
    if rate is None or (rest := appraiser.worth(group.members, rate)) < LEAST_WORTH * worth:
        return None
    packed = best_pack(search, kind, half)
    if packed is None:
        return None
    open_s, (base, pack) = search.open_s(group.members[0]), packed
    effect_s = min(search.settings.horizon_s, pack.lasts_s)
    gain = (rest + pack.worth) * (1 - open_s / effect_s) - worth * (1 + search.settings.margin)
    if gain <= 0 or not appraiser.tolerates(group.members, rate, group.members, open_s):
        return None
    return _Split(gain, group, rate, base, pack)
