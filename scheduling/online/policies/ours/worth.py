"""Worth of a group: what its members gain per second, within bounds and quotas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduling.online.policies.draft import Draft, DraftGroup
from scheduling.online.policies.ours.claims import Claims
from scheduling.online.policies.ours.settings import Settings
from scheduling.online.rates import Kind, Rates
from scheduling.online.sharing import GroupRate, Mesh
from scheduling.online.state import ClusterState, held_gpus
from scheduling.online.types import Job


class Appraiser:
    """Appraises possible groups of one decision, next to the other groups of the draft."""

    def __init__(self, rates: Rates, settings: Settings, state: ClusterState, now: float, claims: Claims, draft: Draft):
        self.rates, self.settings, self.state, self.now = rates, settings, state, now
        self.claims, self.draft = claims, draft
        self.quotas = {name: most for name, user in state.users.items() if (most := user.user.max_gpus) is not None}
        self.measured = any(job_state.speed != 1.0 for job_state in state.jobs.values())
        self._known: dict[str, float] = {}  # worth of groups of the draft

    def jobs(self, names: Iterable[str]) -> list[Job]:
        return [self.state.jobs[name].job for name in names]

    def rate(self, names: Sequence[str], kind: Kind, gpus: int) -> GroupRate | None:
        """The best rate of these jobs; None if they may not share a group of this size.

        A job alone in its group may exceed its bound.
        """
        if len(names) > self.settings.most_members or (len(names) > 1 and not self.settings.grouping):
            return None
        return self._allowed(names, self.rates.group(self.jobs(names), kind, gpus))

    def rate_on(self, names: Sequence[str], kind: Kind, mesh: Mesh) -> GroupRate | None:
        """The same on one mesh, for jobs that may share a group of this size."""
        return self._allowed(names, self.rates.on_mesh(self.jobs(names), kind, mesh))

    def _allowed(self, names: Sequence[str], rate: GroupRate | None) -> GroupRate | None:
        if rate is None or not (len(names) == 1 or (rate.within_bounds and self._protects(names, rate))):
            return None
        return self._measured(names, rate) if not self.quotas or self._within_quotas(names, rate.mesh.gpus) else None

    def _protects(self, names: Sequence[str], rate: GroupRate) -> bool:
        """Whether the jobs of modest users train about as fast as alone."""
        least = self.claims.least_rate
        for name, steps in zip(names, rate.steps_per_s, strict=True) if least else ():
            if name in least and steps < least[name]:
                return False
        return True

    def current_rate(self, group: DraftGroup) -> GroupRate | None:
        """The rate of a group of the draft on its mesh."""
        rate = self.rates.on_mesh(self.jobs(group.members), self.draft.kind(group), group.mesh)
        return self._measured(group.members, rate) if rate else None

    def worth(self, names: Sequence[str], rate: GroupRate) -> float:
        """Σ claim · rate of a group: seconds of completion times that it saves a second."""
        step = self.claims.step
        return sum([step[name] * steps for name, steps in zip(names, rate.steps_per_s, strict=True)])

    def of(self, group: DraftGroup) -> float:
        """Worth of a group of the draft."""
        if group.name not in self._known:
            rate = self.current_rate(group) if group.members else None
            self._known[group.name] = self.worth(group.members, rate) if rate else 0.0
        return self._known[group.name]

    def changed(self, group: DraftGroup) -> None:
        """Forgets the worth of a group whose members or mesh have changed."""
        self._known.pop(group.name, None)

    def tolerates(self, names: Iterable[str], rate: GroupRate, members: Sequence[str], stall_s: float) -> bool:
        """Whether every running member stays within its bound to its end, including this stop and all earlier ones."""
        slowdown = dict(zip(members, rate.slowdowns, strict=True))
        steps = dict(zip(members, rate.steps_per_s, strict=True))
        for name in names:
            if name not in steps:
                continue
            mine = self.state.jobs[name]
            ahead = mine.left_steps(self.now) / steps[name]
            since = max(0.0, self.now - mine.at_s)
            before, alone = mine.in_groups_s + since, mine.alone_s + since / max(1.0, slowdown[name])
            if before + stall_s + ahead > mine.job.max_slowdown * (alone + ahead / slowdown[name]) and stall_s > 0:
                return False
        return True

    def reason(self, members: Sequence[str], rate: GroupRate, kind: Kind, instead_of: Iterable[DraftGroup] = ()) -> str:
        """Why a group is formed: gain in tokens per second over the groups that it replaces, and what it costs."""
        before = sum(now.tokens_per_s for group in instead_of if (now := self.current_rate(group)))
        gain, memory = rate.tokens_per_s - before, self.rates.memory_gib(self.jobs(members), kind, rate.mesh)
        return (
            f"{rate.tokens_per_s:,.0f} tokens/s ({gain:+,.0f}), {rate.density:.0%} full, "
            f"slowdowns up to {max(rate.slowdowns):.2f}, {memory or 0.0:.0f} of {kind[1]:.0f} GiB"
        )

    def _measured(self, names: Sequence[str], rate: GroupRate) -> GroupRate:
        """Corrects predicted rates by the speeds that live runs have reported.

        A job is expected to be as much slower or faster in isolation, so its slowdown stays.
        """
        if not self.measured:
            return rate
        states = [self.state.jobs[name] for name in names]
        steps = tuple(job_state.speed * steps for job_state, steps in zip(states, rate.steps_per_s, strict=True))
        tokens = sum(
            job_state.job.tokens / job_state.job.steps * steps for job_state, steps in zip(states, steps, strict=True)
        )
        return rate._replace(steps_per_s=steps, tokens_per_s=tokens)

    def _within_quotas(self, names: Sequence[str], gpus: int) -> bool:
        """Whether a group of these jobs keeps its users within their quotas, given the other groups."""
        members = set(names)
        rest = [(len(g.gpus), g.members) for g in self.draft.groups.values() if not members & set(g.members)]
        held = held_gpus([*rest, (gpus, names)], self.state.jobs)
        users = {self.state.jobs[name].job.user for name in names} & self.quotas.keys()
        return all(held[user] <= self.quotas[user] for user in users)
