"""How quickly jobs train: alone on a mesh, and together in a group.

A group's slots are shared like a fluid. Per slot, job i takes at most cap_i = B_i / (n_i + S - 1) tokens: its batch of B_i
tokens fills n_i slots, and S - 1 more pass before its next batch may start. What all want, x = Σ cap_i / room, fills
the slots to  x · (1 + (x / full)^p)^(-1/p)  of their room, and is dealt max–min fairly by weight.
`benchmarks/online.py rates` compares this with plans of `make_plan`, played by `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from scheduling.online.costs import ChangeCosts, slot_cost
from scheduling.online.memory import GIB, adapters_bytes, stage_bytes
from scheduling.online.profile import LADDER, LARGEST_CAPACITY, TILE, Profile, make_profile
from scheduling.online.shapes import ModelShape
from scheduling.online.types import Job

MESHES = (1, 2, 4, 8)  # GPUs of a group
USUAL_CAPACITY = 8192  # larger microbatches are hardly cheaper per token
EMPTY = 0.5  # density
FULL = 0.97  # of a slot's room that the planner fills when there is always a sample that fits
SHARPNESS = 5.0  # p
Kind = tuple[str, float]  # of a worker: device, GiB of a GPU


class Mesh(NamedTuple):
    """How a group uses its GPUs."""

    stages: int
    replicas: int
    capacity_tokens: int

    @property
    def gpus(self) -> int:
        return self.stages * self.replicas


class AloneRate(NamedTuple):
    """A job alone on its best mesh of some GPUs."""

    step_s: float
    mesh: Mesh

    def gpu_s(self, steps: float) -> float:
        return self.step_s * steps * self.mesh.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRate:
    """A group on a mesh.

    Args:
        steps_per_s: of each member, in the order given.
        tokens_per_s: of all members.
        slowdowns: of each member, against it alone on its fair share of the GPUs.
        density: real tokens over room.
        excess: largest slowdown over its bound; up to 1 all bounds hold.
    """

    mesh: Mesh
    steps_per_s: tuple[float, ...]
    tokens_per_s: float
    slowdowns: tuple[float, ...]
    density: float
    excess: float

    @property
    def within_bounds(self) -> bool:
        return self.excess <= 1.0

    def better_than(self, other: GroupRate) -> bool:
        """More tokens within all bounds; beyond them, nearer to the bounds."""
        if self.within_bounds and other.within_bounds:
            return self.tokens_per_s > other.tokens_per_s
        return self.excess < other.excess


class Rates:
    """Predicts rates and remembers them; every answer follows from its arguments alone.

    Args:
        changes: what starting and changing groups costs.
    """

    def __init__(self, changes: ChangeCosts | None = None):
        self.changes = changes or ChangeCosts()
        self._profiles: dict[int, Profile] = {}
        self._alone: dict[tuple, AloneRate | None] = {}
        self._groups: dict[tuple, GroupRate | None] = {}
        self._fair: dict[tuple, float] = {}
        self._best: dict[tuple, AloneRate | None] = {}
        self._keys: dict[str, tuple[Job, int]] = {}
        self._numbers: dict[tuple, int] = {}

    def key(self, job: Job) -> int:
        """A number for what a job's rates depend on; jobs of one number are interchangeable."""
        known = self._keys.get(job.name)
        if known is None or known[0] is not job:
            of = (job.shape, job.lengths, job.global_batch, job.rank, job.targets, job.weight, job.max_slowdown)
            known = self._keys[job.name] = (job, self._numbers.setdefault(of, len(self._numbers)))
        return known[1]

    def profile(self, job: Job) -> Profile:
        """The job's batches, packed once."""
        key = self.key(job)
        if key not in self._profiles:
            self._profiles[key] = make_profile(job)
        return self._profiles[key]

    def alone(self, job: Job, kind: Kind, gpus: int) -> AloneRate | None:
        """The quickest mesh of exactly so many GPUs; None if none holds the job."""
        key = (self.key(job), kind, gpus)
        if key not in self._alone:
            self._alone[key] = self._search_alone(job, kind, gpus)
        return self._alone[key]

    def best_alone(self, job: Job, kind: Kind, most_gpus: int = 8) -> AloneRate | None:
        """The mesh of 1, 2, 4 or 8 GPUs with the fewest GPU-seconds; None if none holds the job."""
        key = (self.key(job), kind, most_gpus)
        if key not in self._best:
            found = [rate for gpus in MESHES if gpus <= most_gpus and (rate := self.alone(job, kind, gpus))]
            self._best[key] = min(found, key=lambda rate: rate.step_s * rate.mesh.gpus, default=None)
        return self._best[key]

    def fair_steps_per_s(self, job: Job, kind: Kind, share: float) -> float:
        """Steps per second alone on a share of GPUs, at least the smallest mesh that holds the job.

        Between two meshes the rate is interpolated; more GPUs are never slower.
        """
        key = (self.key(job), kind, share)
        if key not in self._fair:
            self._fair[key] = self._interpolate(job, kind, share)
        return self._fair[key]

    def group(self, members: Sequence[Job], kind: Kind, gpus: int) -> GroupRate | None:
        """The best mesh of so many GPUs for these jobs of one base: most tokens within every bound, if there is one.

        Returns None if no mesh holds them.
        """
        if len(members) == 1:
            rate = self.alone(members[0], kind, gpus)
            return self.on_mesh(members, kind, rate.mesh) if rate else None
        keys = [self.key(job) for job in members]
        key = (*sorted(keys), *kind, gpus)
        if key not in self._groups:
            found = self._search_group(sorted(members, key=self.key), kind, gpus)
            self._groups[key] = found
        rate = self._groups[key]
        if rate is None or all(one <= next_one for one, next_one in pairwise(keys)):
            return rate
        place = sorted(range(len(keys)), key=sorted(range(len(keys)), key=keys.__getitem__).__getitem__)
        return replace(
            rate,
            steps_per_s=tuple(rate.steps_per_s[p] for p in place),
            slowdowns=tuple(rate.slowdowns[p] for p in place),
        )

    def on_mesh(self, members: Sequence[Job], kind: Kind, mesh: Mesh) -> GroupRate | None:
        """These jobs on this very mesh; None if it does not hold them."""
        recompute = _recompute(members, kind, mesh)
        if recompute is None or max(self.profile(job).longest for job in members) > mesh.capacity_tokens:
            return None
        return self._share(members, kind, mesh, recompute)

    def in_turn(self, members: Sequence[Job], kind: Kind, gpus: int) -> GroupRate | None:
        """Jobs that take turns, a batch each, and never share a microbatch; the quickest mesh of so many GPUs."""
        best = None
        for stages in _divisors(gpus, members[0].shape):
            for recompute, most in _rooms(members, kind, stages):
                for tokens in LADDER:
                    if max(self.profile(job).longest for job in members) <= tokens <= most:
                        found = self._turns(members, kind, Mesh(stages, gpus // stages, tokens), recompute)
                        if best is None or found.tokens_per_s > best.tokens_per_s:
                            best = found
        return best

    def turns_on_mesh(self, members: Sequence[Job], kind: Kind, mesh: Mesh) -> GroupRate | None:
        """Jobs that take turns on this very mesh; None if it does not hold them."""
        recompute = _recompute(members, kind, mesh)
        return None if recompute is None else self._turns(members, kind, mesh, recompute)

    def _turns(self, members: Sequence[Job], kind: Kind, mesh: Mesh, recompute: bool) -> GroupRate:
        profiles = [self.profile(job) for job in members]
        slots = [profile.slots_at(mesh.capacity_tokens, mesh.replicas) for profile in profiles]
        cycle = max(sum(slots), max(slots) + mesh.stages - 1)
        tokens = sum(profile.batch_tokens for profile in profiles)
        squares = sum(profile.batch_tokens * profile.squares for profile in profiles) / tokens
        cost, capacity = slot_cost(members[0].shape, kind[0], mesh.stages, recompute), mesh.capacity_tokens
        cycle_s = cycle * cost.seconds(capacity, capacity * squares) + cost.update_s * len(members)
        share = mesh.gpus / sum(job.weight for job in members)
        slowdowns = tuple(self.fair_steps_per_s(job, kind, share * job.weight) * cycle_s for job in members)
        return GroupRate(
            mesh=mesh,
            steps_per_s=(1 / cycle_s,) * len(members),
            tokens_per_s=tokens / cycle_s,
            slowdowns=slowdowns,
            density=tokens / (cycle * mesh.replicas * capacity),
            excess=max(slowdown / job.max_slowdown for slowdown, job in zip(slowdowns, members, strict=True)),
        )

    def _search_alone(self, job: Job, kind: Kind, gpus: int) -> AloneRate | None:
        profile, best = self.profile(job), None
        for stages in _divisors(gpus, job.shape):
            replicas = gpus // stages
            for recompute, most in _rooms([job], kind, stages):
                cost = slot_cost(job.shape, kind[0], stages, recompute)
                for place, tokens in enumerate(profile.capacities):
                    if tokens > most:
                        break
                    slots = profile.slots(place, replicas) + stages - 1
                    step_s = slots * cost.seconds(tokens, tokens * profile.squares) + cost.update_s
                    if best is None or step_s < best.step_s:
                        best = AloneRate(step_s, Mesh(stages, replicas, tokens))
        return best

    def _interpolate(self, job: Job, kind: Kind, share: float) -> float:
        points, best = [], 0.0
        for gpus in MESHES:
            if rate := self.alone(job, kind, gpus):
                best = max(best, 1 / rate.step_s)
                points.append((gpus, best))
        if not points:
            return 0.0
        if share <= points[0][0]:
            return points[0][1]
        for (below, low), (above, high) in zip(points, points[1:], strict=False):
            if share <= above:
                return low + (high - low) * (share - below) / (above - below)
        return points[-1][1]

    def _search_group(self, members: Sequence[Job], kind: Kind, gpus: int) -> GroupRate | None:
        longest = max(self.profile(job).longest for job in members)
        ladder = [tokens for tokens in LADDER if longest <= tokens <= max(longest, USUAL_CAPACITY)]
        best = None
        for stages in _divisors(gpus, members[0].shape):
            for recompute, most in _rooms(members, kind, stages):
                last = 0.0
                for tokens in ladder:
                    if tokens > most:
                        break
                    found = self._share(members, kind, Mesh(stages, gpus // stages, tokens), recompute)
                    if best is None or found.better_than(best):
                        best = found
                    if found.tokens_per_s < last or found.density < EMPTY:
                        break  # larger microbatches are emptier still
                    last = found.tokens_per_s
                if most >= ladder[-1]:
                    return best  # more stages would make no room that is needed
        return best

    def _share(self, members: Sequence[Job], kind: Kind, mesh: Mesh, recompute: bool) -> GroupRate:
        profiles = [self.profile(job) for job in members]
        wanted = [profile.wanted(*mesh) for profile in profiles]
        weights = [job.weight for job in members]
        room, all_wanted = mesh.replicas * mesh.capacity_tokens, sum(tokens for tokens, _ in wanted)
        all_padded = sum(padded for _, padded in wanted)
        squares = sum(tokens * p.squares for (tokens, _), p in zip(wanted, profiles, strict=True)) / all_wanted
        filled = _filled(all_padded / room) * room * all_wanted / all_padded if len(members) > 1 else all_wanted
        tokens = fair_shares([tokens for tokens, _ in wanted], weights, filled)
        per_slot = [share / profile.batch_tokens for share, profile in zip(tokens, profiles, strict=True)]
        cost, capacity = slot_cost(members[0].shape, kind[0], mesh.stages, recompute), mesh.capacity_tokens
        slot_s = cost.seconds(capacity, capacity * squares) + cost.update_s * sum(per_slot)
        gpus_per_weight = mesh.gpus / sum(weights)
        slowdowns = tuple(
            self.fair_steps_per_s(job, kind, gpus_per_weight * job.weight) * slot_s / steps
            for job, steps in zip(members, per_slot, strict=True)
        )
        return GroupRate(
            mesh=mesh,
            steps_per_s=tuple(steps / slot_s for steps in per_slot),
            tokens_per_s=sum(tokens) / slot_s,
            slowdowns=slowdowns,
            density=sum(tokens) / room,
            excess=max(slowdown / job.max_slowdown for slowdown, job in zip(slowdowns, members, strict=True)),
        )


def _filled(wanted: float) -> float:
    """Share of a slot's room that is used when jobs want `wanted` times its room."""
    return wanted * (1 + (wanted / FULL) ** SHARPNESS) ** (-1 / SHARPNESS)


def fair_shares(caps: Sequence[float], weights: Sequence[float], room: float) -> list[float]:
    """Max–min fair shares: in proportion to weights, nobody above its cap, room used up if caps allow.

    >>> fair_shares([1.0, 5.0, 9.0], [1.0, 1.0, 1.0], 9.0)
    [1.0, 4.0, 4.0]
    """
    shares = [0.0] * len(caps)
    order = sorted(range(len(caps)), key=lambda i: caps[i] / weights[i])
    weight_left = sum(weights)
    for i in order:
        shares[i] = min(caps[i], room * weights[i] / weight_left)
        room -= shares[i]
        weight_left -= weights[i]
    return shares


def _divisors(gpus: int, shape: ModelShape) -> list[int]:
    return [stages for stages in (1, 2, 4, 8) if gpus % stages == 0 and stages <= min(gpus, shape.num_layers)]


def _rooms(members: Sequence[Job], kind: Kind, stages: int) -> list[tuple[bool, int]]:
    """(recompute, tokens of the largest microbatch) that fit; recomputing only where it makes room."""
    shape, rooms, before = members[0].shape, [], 0
    adapters = adapters_bytes(shape, stages, ((job.rank, job.targets) for job in members))
    for recompute in (False, True):
        most = min(LARGEST_CAPACITY, stage_bytes(shape, stages, recompute).room(kind[1], adapters))
        if most >= TILE and most > before and before < 4096:
            rooms.append((recompute, most))
            before = most
    return rooms


def _recompute(members: Sequence[Job], kind: Kind, mesh: Mesh) -> bool | None:
    """Whether backward has to run the forward once more to fit; None if even that does not fit."""
    shape = members[0].shape
    adapters = adapters_bytes(shape, mesh.stages, ((job.rank, job.targets) for job in members))
    for recompute in (False, True):
        if stage_bytes(shape, mesh.stages, recompute).room(kind[1], adapters) >= mesh.capacity_tokens:
            return recompute
    return None


def memory_gib(members: Sequence[Job], kind: Kind, mesh: Mesh) -> float | None:
    """GiB on each GPU of the fullest stage; None if the mesh does not hold these jobs."""
    recompute = _recompute(members, kind, mesh)
    if recompute is None:
        return None
    shape = members[0].shape
    adapters = adapters_bytes(shape, mesh.stages, ((job.rank, job.targets) for job in members))
    return stage_bytes(shape, mesh.stages, recompute).total(mesh.capacity_tokens, adapters) / GIB
