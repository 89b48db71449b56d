"""Members: a group drops those that are too slow in it, and takes waiting jobs in addition or instead."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from scheduling.online.policies.draft import DraftGroup
from scheduling.online.policies.ours.search import Option, Search
from scheduling.online.sharing import GroupRate

REPAIR_GAIN = 1.05  # minimum gain in worth for which a group stops for another mesh


def repair(search: Search) -> None:
    """Gives every group the mesh that suits its members; members that are too slow on any mesh leave."""
    appraiser = search.appraiser
    for group in search.draft.groups.values():
        kind, (members, best) = search.draft.kind(group), _tolerable(search, group)
        if best is None or (best.mesh == group.mesh and members == group.members):
            continue
        slow = not appraiser.keeps_bounds(group.members, kind, group.mesh)
        pays = slow or appraiser.worth(members, best) > REPAIR_GAIN * appraiser.of(group)
        if not pays or not appraiser.tolerates(members, best, members, kind, search.change_s(group, members, best)):
            continue
        leave = ", ".join(name for name in group.members if name not in members)
        change = f"{leave} leaves, too slow here" if leave else "another mesh suits the remaining members"
        group.why.append(f"{change}: {appraiser.reason(members, best, kind, [group])}")
        group.members, group.mesh = members, best.mesh
        search.changed(group)


def _tolerable(search: Search, group: DraftGroup) -> tuple[list[str], GroupRate | None]:
    """The members that keep their bounds on some mesh, least valuable dropped first, and their rate."""
    members, kind = list(group.members), search.draft.kind(group)
    rate = search.appraiser.packed_rate(members, kind, len(group.gpus)) if members else None
    while rate is None and len(members) > 1:
        members.remove(min(members, key=lambda name: search.claims.step[name]))
        rate = search.appraiser.packed_rate(members, kind, len(group.gpus))
    return members, rate


def join_or_swap(search: Search) -> bool:
    """Makes the join or swap with the largest gain in worth that every member that trained tolerates."""
    best, best_group = None, None
    waiting = {base: names for base in search.backlog if (names := search.first_waiting(base))}
    for group in search.poorest([group for group in search.draft.groups.values() if group.base in waiting]):
        options_by_job = search.options.setdefault(group.name, {})
        for name in waiting[group.base]:
            options = options_by_job.get(name)
            if options is None:
                options = options_by_job[name] = _options(search, group, name)
            while options and (best is None or options[0].gain > best.gain):
                first = options.pop(0)
                option = _tolerated(search, group, first)
                if option is not None:
                    insort(options, option, key=lambda option: -option.gain)
                if option == first:
                    best, best_group = option, group
    if best is None or best_group is None:
        return False
    joins = ", ".join(name for name in best.members if name not in best_group.members)
    leaves = ", ".join(name for name in best_group.members if name not in best.members)
    reason = search.appraiser.reason(best.members, best.rate, search.draft.kind(best_group), [best_group])
    change = f"{joins} joins" + (f" instead of {leaves}" if leaves else "")
    search.change(best_group, best.members, best.rate, f"{change}: {reason}")
    return True


def _options(search: Search, group: DraftGroup, waiting: str) -> list[Option]:
    """The changes whose gain makes up for their stop, best first."""
    options = [
        option
        for members in _with_one_more(search, group, waiting)
        for rate in _rates(search, group, members)
        if (option := _option(search, group, members, rate))
    ]
    return sorted(options, key=lambda option: -option.gain)


def _option(search: Search, group: DraftGroup, members: list[str], rate: GroupRate) -> Option | None:
    joint_worth, worth = search.appraiser.worth(members, rate), search.appraiser.of(group)
    if joint_worth <= worth:
        return None
    stop_s = search.change_s(group, members, rate)
    gain = joint_worth - worth * (1 + stop_s / search.settings.horizon_s)
    return Option(gain, members, rate, stop_s) if gain > 0 else None


def _tolerated(search: Search, group: DraftGroup, option: Option) -> Option | None:
    """The option, or the same on another mesh, if all members stay within their bounds."""
    kind, appraiser, members = search.draft.kind(group), search.appraiser, option.members
    rate = appraiser.packed(members, kind, option.rate)
    exact = option if rate is option.rate else _option(search, group, members, rate) if rate else None
    if exact is None:
        return None
    stop_s = search.stop_s(group, members, exact.rate) if group.why else exact.stop_s
    if not appraiser.tolerates(search.trained, exact.rate, members, kind, stop_s):
        return None
    return exact


def _rates(search: Search, group: DraftGroup, members: list[str]) -> list[GroupRate]:
    """The rate on the best mesh, and on the group's mesh, whose programs are compiled."""
    kind = search.draft.kind(group)
    best = search.appraiser.rate(members, kind, len(group.gpus))
    if best is None or best.mesh == group.mesh:
        return [best] if best else []
    same = search.appraiser.rate_on(members, kind, group.mesh)
    return [best, same] if same else [best]


def _with_one_more(search: Search, group: DraftGroup, waiting: str) -> Iterator[list[str]]:
    """Members with a waiting job in addition, or in the place of the last."""
    settings, claims = search.settings, search.claims
    if settings.grouping and len(group.members) < settings.largest_group:
        yield [*group.members, waiting]
    last = min(group.members, key=lambda name: (name in search.protected, claims.rank(name)))
    swaps = settings.preemption and last not in search.protected
    if swaps and claims.outranks(waiting, last, settings.margin):
        yield [member for member in group.members if member != last] + [waiting]
