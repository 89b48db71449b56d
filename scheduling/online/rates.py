"""Training rates of jobs, isolated on a mesh or together in a group. All results are cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from scheduling.online.costs import ChangeCosts, SlotCost, slot_cost
from scheduling.online.facts import GIB, Facts, ShapeFacts, StageBytes
from scheduling.online.job_cache import JobCache
from scheduling.online.joint import joint_rate
from scheduling.online.profile import LADDER, LARGEST_CAPACITY, TILE, Profile, make_profile
from scheduling.online.sharing import GroupRate, IsolatedRate, Members, Mesh, alternate, share
from scheduling.online.types import Job

MESHES = (1, 2, 4, 8)  # GPUs of a group
USUAL_CAPACITY = 8192  # larger microbatches are barely cheaper per token
EMPTY = 0.5  # density below which larger microbatches are not tried
MOST_KNOWN = 300_000  # groups in a cache
Kind = tuple[str, float]  # kind of worker: device, GiB of a GPU


class Rates:
    """Predicts rates. Every result depends only on the arguments.

    Args:
        changes: costs of starting and changing groups.
        capacities: tokens that a microbatch may have (None: what is best for each group). A session that does not
            compile again for every change of its members has one.
        facts: seconds and bytes of a base's stages (None: counted from its sizes, at the rates of rank 16).
    """

    def __init__(
        self,
        changes: ChangeCosts | None = None,
        *,
        capacities: Sequence[int] | None = None,
        facts: Facts | None = None,
    ):
        self.changes, self._capacities, self._facts = changes or ChangeCosts(), capacities, facts or ShapeFacts()
        self._jobs = JobCache()
        self.key = self._jobs.key  # jobs with equal keys have equal rates
        self._known: dict[tuple[Any, ...], Any] = {}
        self._groups: dict[tuple[tuple[int, ...], Kind, int], GroupRate | None] = {}
        self._on_meshes: dict[tuple[tuple[int, ...], Kind, Mesh], GroupRate | None] = {}
        self._formed: dict[tuple[tuple[int, ...], Kind, Mesh], GroupRate | None] = {}

    def profile(self, job: Job) -> Profile:
        """The profile of the job's batches, computed once."""
        return self._jobs.once(job, ("profile",), lambda: make_profile(job))

    def isolated_rate(self, job: Job, kind: Kind, gpus: int) -> IsolatedRate | None:
        """The fastest mesh of exactly this number of GPUs; None if the job fits on none."""
        return self._jobs.once(job, ("alone", kind, gpus), lambda: self._search_isolated(job, kind, gpus))

    def best_isolated_rate(self, job: Job, kind: Kind, most_gpus: int = 8) -> IsolatedRate | None:
        """The mesh of 1, 2, 4 or 8 GPUs with the fewest GPU-seconds; None if the job fits on none."""

        def search() -> IsolatedRate | None:
            rates = [rate for gpus in MESHES if gpus <= most_gpus and (rate := self.isolated_rate(job, kind, gpus))]
            return min(rates, key=lambda rate: rate.step_s * rate.mesh.gpus, default=None)

        return self._jobs.once(job, ("best", kind, most_gpus), search)

    def fair_steps_per_s(self, job: Job, kind: Kind, share: float) -> float:
        """Isolated steps per second on a share of GPUs.

        A share below the smallest mesh that the job fits on is a share of the time on it. Rates between two meshes are
        interpolated, and more GPUs are never slower.
        """
        return self._jobs.once(job, ("fair", kind, share), lambda: self._interpolate(job, kind, share))

    def group(self, members: Sequence[Job], kind: Kind, gpus: int) -> GroupRate | None:
        """The best mesh for jobs of one base: most tokens per second within all bounds, or else closest to the bounds.

        Returns None if the jobs fit on no mesh.
        """
        keys = tuple(map(self.key, members))
        asked = (keys, kind, gpus)
        if asked in self._groups:
            return self._groups[asked]
        self._make_room(self._groups)
        order = sorted(range(len(keys)), key=keys.__getitem__)
        key = (tuple(keys[i] for i in order), kind, gpus)
        if key not in self._groups:
            self._groups[key] = self._search_group([members[i] for i in order], kind, gpus)
        rate = self._groups[key]
        if key != asked:
            again = sorted(range(len(order)), key=order.__getitem__)
            rate = self._groups[asked] = rate.reordered(again) if rate is not None else None
        return rate

    def on_mesh(self, members: Sequence[Job], kind: Kind, mesh: Mesh) -> GroupRate | None:
        """The rate of these jobs on this mesh; None if they do not fit."""
        key = (tuple(map(self.key, members)), kind, mesh)
        if key not in self._on_meshes:
            self._make_room(self._on_meshes)
            self._on_meshes[key] = self._on_mesh(share, members, kind, mesh)
        return self._on_meshes[key]

    def formed(self, members: Sequence[Job], kind: Kind, mesh: Mesh) -> GroupRate | None:
        """The rate of a group that trains, from packing its batches together; None if the jobs do not fit.

        It is slower to compute and closer to plans than `on_mesh`, with which groups are searched.
        """
        if len(members) == 1:
            return self.on_mesh(members, kind, mesh)
        key = (tuple(map(self.key, members)), kind, mesh)
        if key not in self._formed:
            self._make_room(self._formed)
            self._formed[key] = self._on_mesh(partial(joint_rate, members), members, kind, mesh)
        return self._formed[key]

    def alternating_rate(self, members: Sequence[Job], kind: Kind, gpus: int) -> GroupRate | None:
        """The fastest mesh for jobs that alternate batch by batch and never share a microbatch."""
        meshes = self._meshes(members, kind, gpus)
        rates = [alternate(self._members(members, kind, gpus), mesh, cost) for mesh, cost in meshes]
        return max(rates, key=lambda rate: rate.tokens_per_s, default=None)

    def alternating_on_mesh(self, members: Sequence[Job], kind: Kind, mesh: Mesh) -> GroupRate | None:
        """The rate of jobs that alternate batch by batch on this mesh; None if they do not fit."""
        return self._on_mesh(alternate, members, kind, mesh)

    def memory_gib(self, members: Sequence[Job], kind: Kind, mesh: Mesh) -> float | None:
        """GiB on each GPU of the fullest stage; None if the jobs do not fit on the mesh."""
        adapters = self._adapters(members, mesh.stages)
        for recompute in (False, True):
            stage = self._stage(members[0], mesh.stages, recompute)
            if stage.room(kind[1], adapters) >= mesh.capacity_tokens:
                return stage.total(mesh.capacity_tokens, adapters) / GIB
        return None

    def recomputes(self, members: Sequence[Job], kind: Kind, mesh: Mesh) -> bool:
        """Whether the jobs fit on the mesh only with recomputation in backward."""
        adapters = self._adapters(members, mesh.stages)
        return self._stage(members[0], mesh.stages, False).room(kind[1], adapters) < mesh.capacity_tokens

    @staticmethod
    def _make_room(known: dict[Any, Any]) -> None:
        """Empties a cache of groups that has become large: a service runs for months."""
        if len(known) >= MOST_KNOWN:
            known.clear()

    def _once(self, key: tuple[Any, ...], search: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = search()
        return self._known[key]

    def _search_isolated(self, job: Job, kind: Kind, gpus: int) -> IsolatedRate | None:
        profile, best = self.profile(job), None
        key = ("meshes", job.base_name, job.rank, job.targets, profile.longest, kind, gpus)
        for mesh, cost in self._once(key, lambda: self._meshes([job], kind, gpus, profile.capacities)):
            slots = profile.slots_at(mesh.capacity_tokens, mesh.replicas) + mesh.stages - 1
            tokens = mesh.capacity_tokens
            step_s = slots * cost.seconds(tokens, tokens * profile.squares) + profile.between_steps_s(mesh, cost)
            if best is None or step_s < best.step_s:
                best = IsolatedRate(step_s, mesh)
        return best

    def _interpolate(self, job: Job, kind: Kind, share: float) -> float:
        points: list[tuple[int, float]] = []
        best = 0.0
        for gpus in MESHES:
            if rate := self.isolated_rate(job, kind, gpus):
                best = max(best, 1 / rate.step_s)
                points.append((gpus, best))
        if not points:
            return 0.0
        if share <= points[0][0]:
            return points[0][1] * share / points[0][0]
        for (below, low), (above, high) in pairwise(points):
            if share <= above:
                return low + (high - low) * (share - below) / (above - below)
        return points[-1][1]

    def _search_group(self, members: Sequence[Job], kind: Kind, gpus: int) -> GroupRate | None:
        if len(members) == 1:
            alone = self.isolated_rate(members[0], kind, gpus)
            return self.on_mesh(members, kind, alone.mesh) if alone else None
        known, best, last = self._members(members, kind, gpus), None, None
        for mesh, cost in self._meshes(members, kind, gpus):
            if last is not None and last.mesh.stages == mesh.stages and last.density < EMPTY:
                continue
            shared = share(known, mesh, cost)
            if best is None or shared.better_than(best):
                best = shared
            last = shared
        return best

    def _on_mesh(
        self, how: Callable[[Members, Mesh, SlotCost], GroupRate], members: Sequence[Job], kind: Kind, mesh: Mesh
    ) -> GroupRate | None:
        if max(self.profile(job).longest for job in members) > mesh.capacity_tokens:
            return None
        adapters = self._adapters(members, mesh.stages)
        for recompute in (False, True):
            if self._stage(members[0], mesh.stages, recompute).room(kind[1], adapters) >= mesh.capacity_tokens:
                cost = self._cost(members[0], kind, mesh.stages, recompute)
                return how(self._members(members, kind, mesh.gpus), mesh, cost)
        return None

    def _members(self, members: Sequence[Job], kind: Kind, gpus: int) -> Members:
        weights = [job.weight for job in members]
        gpus_per_weight = gpus / sum(weights)
        return Members(
            profiles=[self.profile(job) for job in members],
            weights=weights,
            fair=[self.fair_steps_per_s(job, kind, round(gpus_per_weight * job.weight, 6)) for job in members],
            bounds=[job.max_slowdown for job in members],
        )

    def _meshes(
        self, members: Sequence[Job], kind: Kind, gpus: int, capacities: Sequence[int] | None = None
    ) -> list[tuple[Mesh, SlotCost]]:
        """Meshes that these jobs fit on, by stages and capacity; more stages only if memory needs them."""
        longest = max(self.profile(job).longest for job in members)
        ladder = [tokens for tokens in LADDER if longest <= tokens <= max(longest, USUAL_CAPACITY)]
        wanted = self._capacities or capacities or ladder
        meshes: list[tuple[Mesh, SlotCost]] = []
        for stages in MESHES:
            if stages > gpus or gpus % stages or stages > members[0].shape.num_layers:
                continue
            adapters, before = self._adapters(members, stages), 0
            for recompute in (False, True):
                room = min(LARGEST_CAPACITY, self._stage(members[0], stages, recompute).room(kind[1], adapters))
                if recompute and before >= longest + 4 * TILE:
                    break
                cost = self._cost(members[0], kind, stages, recompute) if room > before else None
                if cost is not None:
                    fitting = (tokens for tokens in wanted if max(before, longest - 1) < tokens <= room)
                    meshes += [(Mesh(stages, gpus // stages, tokens), cost) for tokens in fitting]
                before = room
            if before >= USUAL_CAPACITY >= longest:
                break
        return meshes

    def _cost(self, job: Job, kind: Kind, stages: int, recompute: bool) -> SlotCost:
        key = ("cost", job.base_name, kind[0], stages, recompute)
        trains = self.changes.trains
        return self._once(
            key, lambda: slot_cost(self._facts.stage_costs(job, kind[0], stages, recompute), stages, trains)
        )

    def _stage(self, job: Job, stages: int, recompute: bool) -> StageBytes:
        key = ("stage", job.base_name, stages, recompute)
        return self._once(key, lambda: self._facts.stage_bytes(job, stages, recompute))

    def _adapters(self, members: Sequence[Job], stages: int) -> float:
        """Trainable bytes of all members, each at its own rank."""
        total = 0.0
        for job in members:
            key = ("adapter", job.base_name, stages, job.rank, job.targets)
            total += self._once(key, lambda job=job: self._facts.trainable_bytes(job, stages))
        return total
