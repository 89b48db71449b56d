"""Worth of a group: what its members gain per second, within bounds and quotas."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from operator import lt, mul

from scheduling.online.policies.draft import Draft, DraftGroup
from scheduling.online.policies.ours.claims import Claims
from scheduling.online.policies.ours.settings import Settings
from scheduling.online.rates import Kind, Rates
from scheduling.online.sharing import GroupRate, Mesh
from scheduling.online.state import ClusterState, held_gpus
from scheduling.online.types import Job

MOST_MESHES = 8  # that are packed for a group, best first
Share = tuple[float, float, float]  # a member's steps to its end, seconds in groups, and isolated seconds of its steps


class _Keys(dict[str, int]):
    """Keys of jobs by name, asked for once."""

    def __init__(self, rates: Rates, state: ClusterState):
        super().__init__()
        self._rates, self._jobs = rates, state.jobs

    def __missing__(self, name: str) -> int:
        key = self[name] = self._rates.key(self._jobs[name].job)
        return key


class Appraiser:
    """Appraises possible groups of one decision, next to the other groups of the draft."""

    def __init__(self, rates: Rates, settings: Settings, state: ClusterState, now: float, claims: Claims, draft: Draft):
        self.rates, self.settings, self.state, self.now = rates, settings, state, now
        self.claims, self.draft = claims, draft
        self.quotas = {name: most for name, user in state.users.items() if (most := user.user.max_gpus) is not None}
        self.measured = any(job_state.speed != 1.0 for job_state in state.jobs.values())
        self._known: dict[str, float] = {}  # worth of groups of the draft
        self._per_gpu: dict[str, tuple[float, str]] = {}
        self._keys = _Keys(rates, state)

    def use(self, claims: Claims) -> None:
        """Appraises by other claims from now on."""
        self.claims = claims
        self._known.clear()
        self._per_gpu.clear()

    def jobs(self, names: Iterable[str]) -> list[Job]:
        return [self.state.jobs[name].job for name in names]

    def rate(self, names: Sequence[str], kind: Kind, gpus: int) -> GroupRate | None:
        """The best rate of these jobs; None if they may not share a group of this size.

        A job alone in its group may exceed its bound.
        """
        if len(names) > (self.settings.most_members if self.settings.grouping else 1):
            return None
        cached_rate = self.rates.known_groups.get((self._keys_of(names), kind, gpus))
        return self._allowed(names, cached_rate or self.rates.group(self.jobs(names), kind, gpus))

    def rate_on(self, names: Sequence[str], kind: Kind, mesh: Mesh) -> GroupRate | None:
        """The same on one mesh, for jobs that may share a group of this size."""
        return self._allowed(names, self._on_mesh(names, kind, mesh))

    def _on_mesh(self, names: Sequence[str], kind: Kind, mesh: Mesh) -> GroupRate | None:
        cached_rate = self.rates.known_on_mesh.get((self._keys_of(names), kind, mesh))
        return cached_rate or self.rates.on_mesh(self.jobs(names), kind, mesh)

    def _keys_of(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(map(self._keys.__getitem__, names))

    def _allowed(self, names: Sequence[str], rate: GroupRate | None) -> GroupRate | None:
        if rate is None or (len(names) > 1 and not (rate.within_bounds and self._protects(names, rate))):
            return None
        if self.quotas and not self._within_quotas(names, rate.mesh.gpus):
            return None
        return self._measured(names, rate) if self.measured else rate

    def _protects(self, names: Sequence[str], rate: GroupRate) -> bool:
        """Whether the jobs of modest users train about as fast as alone."""
        return not any(map(lt, rate.steps_per_s, map(self.claims.least_rate.__getitem__, names)))

    def packed(self, names: Sequence[str], kind: Kind, rate: GroupRate) -> GroupRate | None:
        """The first rate, this one or the best on another mesh, of which the bounds hold as batches are packed, too.

        It takes longer to compute than `rate`, so it is asked for groups that would be formed only.
        """
        if self.keeps_bounds(names, kind, rate.mesh):
            return rate
        others = self.rates.ranked(self.jobs(names), kind, rate.mesh.gpus, MOST_MESHES)
        meshes = (other for other in others if other.mesh != rate.mesh and self.keeps_bounds(names, kind, other.mesh))
        return self._allowed(names, next(meshes, None))

    def packed_rate(self, names: Sequence[str], kind: Kind, gpus: int) -> GroupRate | None:
        """`rate`, with bounds that hold as batches are packed, too."""
        rate = self.rate(names, kind, gpus)
        return self.packed(names, kind, rate) if rate else None

    def keeps_bounds(self, names: Sequence[str], kind: Kind, mesh: Mesh) -> bool:
        """Whether a group keeps the bounds of its members as their batches are packed; a job alone always does."""
        if len(names) == 1:
            return True
        rate = self._formed(names, kind, mesh)
        return rate is not None and rate.within_bounds and self._protects(names, rate)

    def _formed(self, names: Sequence[str], kind: Kind, mesh: Mesh) -> GroupRate | None:
        cached_rate = self.rates.known_formed.get((self._keys_of(names), kind, mesh))
        return cached_rate or self.rates.formed(self.jobs(names), kind, mesh)

    def current_rate(self, group: DraftGroup) -> GroupRate | None:
        """The rate of a group of the draft on its mesh."""
        rate = self._on_mesh(group.members, self.draft.kind(group), group.mesh)
        return self._measured(group.members, rate) if rate and self.measured else rate

    def worth(self, names: Sequence[str], rate: GroupRate) -> float:
        """Σ claim · rate of a group: seconds of completion times that it saves a second."""
        return sum(map(mul, map(self.claims.step.__getitem__, names), rate.steps_per_s))

    def of(self, group: DraftGroup) -> float:
        """Worth of a group of the draft."""
        if group.name not in self._known:
            rate = self.current_rate(group) if group.members else None
            self._known[group.name] = self.worth(group.members, rate) if rate else 0.0
        return self._known[group.name]

    def worth_per_gpu(self, group: DraftGroup) -> tuple[float, str]:
        """Worth per GPU of a group of the draft, and its name: groups sort by it."""
        per_gpu = self._per_gpu.get(group.name)
        if per_gpu is None:
            per_gpu = self._per_gpu[group.name] = (self.of(group) / len(group.gpus), group.name)
        return per_gpu

    def changed(self, group: DraftGroup) -> None:
        """Forgets the worth of a group whose members or mesh have changed."""
        self._known.pop(group.name, None)
        self._per_gpu.pop(group.name, None)

    def tolerates(
        self, names: Container[str], rate: GroupRate, members: Sequence[str], kind: Kind, stall_s: float
    ) -> bool:
        """Whether every member stays within its bound to its end, including this stop of those that run and all earlier
        ones, while the members end one after the other."""
        shares = [self._share(name, stall_s if name in names else 0.0) for name in members]
        return self._end_within_bounds(members, kind, rate.mesh, shares)

    def _share(self, name: str, stall_s: float) -> Share:
        """What a job has had until now, and this stop."""
        job_state = self.state.jobs[name]
        in_groups_s, alone_s = job_state.in_groups_s + stall_s, job_state.alone_s
        since_s = self.now - job_state.at_s
        if job_state.group is not None and since_s > 0.0:
            group = self.state.groups[job_state.group]
            rate = self._formed(group.members, self.state.workers[group.worker].kind, group.mesh)
            in_groups_s += since_s
            alone_s += since_s / (rate.slowdowns[group.members.index(name)] if rate else 1.0)
        return job_state.left_steps(self.now), in_groups_s, alone_s

    def _end_within_bounds(self, names: Sequence[str], kind: Kind, mesh: Mesh, shares: Sequence[Share]) -> bool:
        """Whether members end within their bounds if no other joins: on this mesh, or on the best one of those that are
        left, where this one is too slow for them."""
        members: Sequence[str] = names
        crises: list[tuple[Sequence[str], Sequence[Share]]] = []
        while members and (rate := self._formed(members, kind, mesh)):
            if members is not names and (len(members) == 1 or not rate.within_bounds):
                crises += [(members, shares)]
            rate = self._measured(members, rate) if self.measured else rate
            ahead_s = [share[0] / steps for share, steps in zip(shares, rate.steps_per_s, strict=True)]
            next_s = min(ahead_s)
            shares = [
                (left_steps - next_s * steps, in_groups_s + next_s, alone_s + next_s / slowdown)
                for (left_steps, in_groups_s, alone_s), steps, slowdown in zip(
                    shares, rate.steps_per_s, rate.slowdowns, strict=True
                )
            ]
            late = [
                name
                for name, (_, in_groups_s, alone_s), until_s in zip(members, shares, ahead_s, strict=True)
                if until_s == next_s and in_groups_s > self.state.jobs[name].job.max_slowdown * alone_s
            ]
            if late:
                break
            members = [name for name, until_s in zip(members, ahead_s, strict=True) if until_s > next_s]
            shares = [share for share, until_s in zip(shares, ahead_s, strict=True) if until_s > next_s]
        if not members:
            return True
        stop_s = self.rates.changes.stop_s(False)
        for rest, before in reversed(crises):
            best = self.packed_rate(rest, kind, mesh.gpus)
            after = [(left, in_groups_s + stop_s, alone_s) for left, in_groups_s, alone_s in before]
            if best and best.mesh != mesh and self._end_within_bounds(rest, kind, best.mesh, after):
                return True
        return False

    def reason(self, members: Sequence[str], rate: GroupRate, kind: Kind, instead_of: Iterable[DraftGroup] = ()) -> str:
        """Why a group is formed: gain in tokens per second over the groups that it replaces, and what it costs."""
        before = sum(current.tokens_per_s for group in instead_of if (current := self.current_rate(group)))
        gain, memory = rate.tokens_per_s - before, self.rates.memory_gib(self.jobs(members), kind, rate.mesh)
        return (
            f"{rate.tokens_per_s:,.0f} tokens/s ({gain:+,.0f}), {100 * rate.density:.0f} % full, "
            f"slowdowns up to {max(rate.slowdowns):.2f}, {memory or 0.0:.0f} of {kind[1]:.0f} GiB"
        )

    def _measured(self, names: Sequence[str], rate: GroupRate) -> GroupRate:
        """Corrects predicted rates by the speeds that live runs have reported.

        A job is expected to be as much slower or faster in isolation, so its slowdown stays.
        """
        states = [self.state.jobs[name] for name in names]
        steps = tuple(job_state.speed * steps for job_state, steps in zip(states, rate.steps_per_s, strict=True))
        tokens = sum(
            job_state.job.tokens / job_state.job.steps * steps for job_state, steps in zip(states, steps, strict=True)
        )
        return rate._replace(steps_per_s=steps, tokens_per_s=tokens)

    def _within_quotas(self, names: Sequence[str], gpus: int) -> bool:
        """Whether a group of these jobs keeps its users within their quotas, given the other groups."""
        members = set(names)
        other_groups = [(len(g.gpus), g.members) for g in self.draft.groups.values() if not members & set(g.members)]
        gpus_by_user = held_gpus([*other_groups, (gpus, names)], self.state.jobs)
        users = {self.state.jobs[name].job.user for name in names} & self.quotas.keys()
        return all(gpus_by_user[user] <= self.quotas[user] for user in users)
