"""Join or swap: a waiting job joins a running group of its base, or replaces the member with the most work left."""

from __future__ import annotations

from collections.abc import Iterator

from scheduling.online.policies.draft import DraftGroup
from scheduling.online.policies.ours.search import Option, Search
from scheduling.online.sharing import GroupRate


def join_or_swap(search: Search) -> bool:
    """Makes the join or swap with the largest gain in worth."""
    best, chosen = None, None
    for group in search.poorest([group for group in search.draft.groups.values() if search.backlog.get(group.base)]):
        option = _known_option(search, group)
        if option is not None and (best is None or option.gain > best.gain):
            best, chosen = option, group
    if best is None or chosen is None:
        return False
    joins = ", ".join(name for name in best.members if name not in chosen.members)
    leaves = ", ".join(name for name in chosen.members if name not in best.members)
    reason = search.appraiser.reason(best.members, best.rate, search.draft.kind(chosen), [chosen])
    said = f"{joins} joins" + (f" instead of {leaves}" if leaves else "")
    search.change(chosen, best.members, best.rate, f"{said}: {reason}")
    return True


def _known_option(search: Search, group: DraftGroup) -> Option | None:
    """The best option of a group for the first waiting jobs of its base; each is cached until the group changes."""
    known = search.options.setdefault(group.name, {})
    best = None
    for name in search.backlog[group.base][: search.settings.candidates]:
        if not search.may_start(name):
            continue
        if name not in known:
            known[name] = _best_option(search, group, name)
        option = known[name]
        if option is not None and (best is None or option.gain > best.gain):
            best = option
    return best


def _best_option(search: Search, group: DraftGroup, waiting: str) -> Option | None:
    appraiser = search.appraiser
    stop_s = search.open_s(waiting) if group.is_new else search.rates.changes.change_s
    best, worth = None, appraiser.of(group)
    for members, rate in _with_one_more(search, group, waiting):
        gain = appraiser.worth(members, rate) - worth
        if gain > worth * stop_s / search.settings.horizon_s and (best is None or gain > best.gain):
            trained = [name for name in members if search.state.jobs[name].group is not None]
            if appraiser.tolerates(trained, rate, members, stop_s):
                best = Option(gain, members, rate)
    return best


def _with_one_more(search: Search, group: DraftGroup, waiting: str) -> Iterator[tuple[list[str], GroupRate]]:
    settings, order = search.settings, search.claims.order
    kind, size, rate_of = search.draft.kind(group), len(group.gpus), search.appraiser.rate
    if settings.grouping and len(group.members) < settings.largest_group:
        members = [*group.members, waiting]
        if rate := rate_of(members, kind, size):
            yield members, rate
    last = min(group.members, key=lambda name: (name in search.protected, order[name]))
    swaps = settings.preemption and last not in search.protected
    if swaps and order[waiting] > (1 + settings.margin) * order[last]:
        members = [one for one in group.members if one != last] + [waiting]
        if rate := rate_of(members, kind, size):
            yield members, rate
