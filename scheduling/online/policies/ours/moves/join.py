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
    what = f"{joins} joins" + (f" instead of {leaves}" if leaves else "")
    search.change(chosen, best.members, best.rate, f"{what}: {reason}")
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
    """The change with the largest gain that makes up for its stop and that every member that trained tolerates."""
    appraiser = search.appraiser
    best, worth = None, appraiser.of(group)
    for members in _with_one_more(search, group, waiting):
        for rate in _rates(search, group, members):
            stop_s = search.change_s(group, members, rate)
            gain = appraiser.worth(members, rate) - worth * (1 + stop_s / search.settings.horizon_s)
            if gain > 0 and (best is None or gain > best.gain):
                trained = [name for name in members if search.state.jobs[name].group is not None]
                if appraiser.tolerates(trained, rate, members, stop_s):
                    best = Option(gain, members, rate)
    return best


def _rates(search: Search, group: DraftGroup, members: list[str]) -> Iterator[GroupRate]:
    """The rate on the group's mesh, whose programs are compiled, and on the best mesh."""
    kind, best = search.draft.kind(group), search.appraiser.rate(members, search.draft.kind(group), len(group.gpus))
    if best is None:
        return
    yield best
    if best.mesh != group.mesh:
        same = search.appraiser.rate_on(members, kind, group.mesh)
        if same is not None:
            yield same


def _with_one_more(search: Search, group: DraftGroup, waiting: str) -> Iterator[list[str]]:
    """Members with a waiting job in addition, or in the place of the last."""
    settings, order = search.settings, search.claims.order
    if settings.grouping and len(group.members) < settings.largest_group:
        yield [*group.members, waiting]
    last = min(group.members, key=lambda name: (name in search.protected, order[name]))
    swaps = settings.preemption and last not in search.protected
    if swaps and order[waiting] > (1 + settings.margin) * order[last]:
        yield [member for member in group.members if member != last] + [waiting]
