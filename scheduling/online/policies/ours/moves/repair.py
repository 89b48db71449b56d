"""Repair: groups that lost members get a mesh that suits the rest."""

from __future__ import annotations

from scheduling.online.policies.draft import DraftGroup
from scheduling.online.policies.ours.search import Search
from scheduling.online.sharing import GroupRate

REPAIR_GAIN = 1.05  # minimum gain in worth for which a group stops for another mesh


def repair(search: Search) -> None:
    """Gives every group the mesh that suits its members; members that are too slow on any mesh leave."""
    appraiser = search.appraiser
    for group in search.draft.groups.values():
        kind, (members, best) = search.draft.kind(group), _tolerable(search, group)
        if best is None or (best.mesh == group.mesh and members == group.members):
            continue
        now = appraiser.current_rate(group)
        slow = now is None or not now.within_bounds
        pays = slow or appraiser.worth(members, best) > REPAIR_GAIN * appraiser.of(group)
        if not pays or not appraiser.tolerates(members, best, members, search.change_s(group, members, best)):
            continue
        leave = ", ".join(name for name in group.members if name not in members)
        change = f"{leave} leaves, too slow here" if leave else "another mesh suits the remaining members"
        group.why.append(f"{change}: {appraiser.reason(members, best, kind, [group])}")
        group.members, group.mesh = members, best.mesh
        search.changed(group)


def _tolerable(search: Search, group: DraftGroup) -> tuple[list[str], GroupRate | None]:
    """The members that keep their bounds on some mesh, least valuable dropped first, and their rate."""
    members, kind = list(group.members), search.draft.kind(group)
    rate = search.appraiser.rate(members, kind, len(group.gpus)) if members else None
    while rate is None and len(members) > 1:
        members.remove(min(members, key=lambda name: search.claims.step[name]))
        rate = search.appraiser.rate(members, kind, len(group.gpus))
    return members, rate
