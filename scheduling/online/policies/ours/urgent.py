"""Urgent jobs: those near the end of their patience or of their time start where that costs least."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from scheduling.online.policies.draft import DraftGroup
from scheduling.online.policies.ours.search import Block, Option, Search
from scheduling.online.rates import MESHES, Kind
from scheduling.online.state import JobState


def place_urgent(search: Search) -> None:
    """Starts urgent jobs: on free GPUs, else in a group of their base, else in place of groups worth less."""
    misses: dict[str, int] = {}  # per base, in a row: if the first jobs find no place, the many after them do not
    for state in search.claims.urgent:
        name, base = state.job.name, state.job.base_name
        if state.job.priority != search.priority or misses.get(base, 0) >= search.settings.candidates:
            continue
        if name not in search.backlog.get(base, ()) or not search.may_start(name):
            continue
        due = state.job.deadline_s is not None  # no group is as fast as GPUs of its own
        if (
            _open(search, state)
            or (due and _open(search, state, clear=True))
            or _join(search, state)
            or _open(search, state, clear=True)
        ):
            search.protected.add(name)
            misses[base] = 0
        else:
            misses[base] = misses.get(base, 0) + 1


def _sizes(search: Search, state: JobState) -> list[int]:
    """GPUs for a job: those of its best mesh, or more if only they meet its deadline."""
    best, deadline_s = search.best_sizes([state.job.name]), state.job.deadline_s
    if deadline_s is None or not search.settings.elasticity:
        return best
    from_s = search.now + search.open_s(state.job.name)
    for size in MESHES:
        rates = (search.rates.isolated_rate(state.job, kind, size) for kind in search.kinds)
        rate = next((rate for rate in rates if rate and size >= best[0]), None)
        if rate and from_s + rate.step_s / state.speed * state.left_steps(search.now) <= deadline_s:
            return [size, *best]
    return best


def _open(search: Search, state: JobState, *, clear: bool = False) -> bool:
    """Opens the job's best mesh on free GPUs, or with `clear` on GPUs of groups that come after it."""
    name, base = state.job.name, state.job.base_name
    for size in _sizes(search, state):
        for kind in search.kinds:
            rate = search.appraiser.rate([name], kind, size)
            if rate is None:
                continue
            block = search.draft.block(base, size, kind)
            if block is None and clear:
                block = _clear(search, size, kind, name)
            if block is not None:
                search.open(base, block, [name], rate, f"{name} has waited long")
                return True
    return False


def _join(search: Search, state: JobState) -> bool:
    """Adds the job to a group of its base, or puts it in the place of a member that comes after it."""
    name, base = state.job.name, state.job.base_name
    best, best_group = None, None
    for group in search.draft.groups.values():
        if group.base == base and group.members:
            for option in _options(search, group, name):
                if best is None or option.gain > best.gain:
                    best, best_group = option, group
    if best is None or best_group is None:
        return False
    reason = search.appraiser.reason(best.members, best.rate, search.draft.kind(best_group), [best_group])
    search.change(best_group, best.members, best.rate, f"{name} has waited long: {reason}")
    return True


def _options(search: Search, group: DraftGroup, name: str) -> Iterator[Option]:
    rank, appraiser = search.claims.rank, search.appraiser
    safe = search.protected | search.claims.pressed  # they would displace others in turn
    others = [member for member in group.members if rank(member) < rank(name) and member not in safe]
    last = min(others, key=rank, default=None)
    for leaver in (None, last) if last is not None else (None,):
        members = [member for member in group.members if member != leaver] + [name]
        kind = search.draft.kind(group)
        rate = appraiser.packed_rate(members, kind, len(group.gpus))
        stop_s = search.stop_s(group, members, rate) if rate else 0.0
        if rate and appraiser.tolerates(members[:-1], rate, members, kind, stop_s):
            yield Option(appraiser.worth(members, rate) - appraiser.of(group), members, rate, stop_s)


def _clear(search: Search, size: int, kind: Kind, name: str) -> Block | None:
    """Frees the block of this size whose groups are worth least, if all their members come after the job.

    A job that waits for less time than a session takes to open would end each session before its first step: it leaves
    a session alone until that has trained for as long as it took to open.
    """
    block, least, rank = None, inf, search.claims.rank(name)
    is_hasty = search.claims.patience_s[name] < search.open_s(name)
    for worker in search.state.workers.values():
        for first in range(0, worker.gpus - size + 1, size) if worker.kind == kind else ():
            groups = search.draft.groups_on(worker.name, range(first, first + size))
            inside = [member for group in groups for member in group.members]
            if any(search.claims.rank(member) >= rank or member in search.protected for member in inside):
                continue
            if is_hasty and any(g.members and search.now < g.ready_s + search.open_s(g.members[0]) for g in groups):
                continue
            worth = sum(map(search.appraiser.of, groups))
            if worth < least:
                block, least = (worker.name, first), worth
    if block is not None:
        for group in search.draft.groups_on(block[0], range(block[1], block[1] + size)):
            search.close(group)
    return block
