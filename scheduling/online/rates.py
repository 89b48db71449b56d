"""Training rates of jobs, isolated on a mesh or together in a group. All results are cached.

A service runs for months, so caches forget jobs that were seen long ago.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count, islice, pairwise
from typing import Any, NamedTuple

from scheduling.online.costs import ChangeCosts, SlotCost, slot_cost
from scheduling.online.facts import GIB, Facts, ShapeFacts, StageBytes
from scheduling.online.joint import joint_rate
from scheduling.online.profile import LADDER, LARGEST_CAPACITY, TILE, Profile, make_profile, make_profiles
from scheduling.online.sharing import GroupRate, IsolatedRate, Members, Mesh, alternate, share, share_slots
from scheduling.online.types import Job

MOST_JOBS = 20_000


class JobCache:
    """Results that depend on one job, kept by its content: equal jobs share them."""

    def __init__(self):
        self._next = count()
        self._keys: dict[str, tuple[Job, int]] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._results: dict[int, dict[tuple[Any, ...], Any]] = {}

    def key(self, job: Job) -> int:
        """A key of everything that a job's rates depend on; jobs with equal keys are interchangeable."""
        entry = self._keys.get(job.name)
        if entry is None or entry[0] is not job:
            of = (job.shape, job.lengths, job.global_batch, job.rank, job.targets, job.weight, job.max_slowdown)
            of += (job.eval_every, job.eval_tokens, job.kind)
            if max(len(self._keys), len(self._numbers)) >= MOST_JOBS:
                self._forget_oldest()
            if of not in self._numbers:
                self._numbers[of] = next(self._next)
            entry = self._keys[job.name] = (job, self._numbers[of])
        return entry[1]

    def once(self, job: Job, question: tuple[Any, ...], search: Callable[[], Any]) -> Any:
        """The result of `search`, which is called once for a job and a question."""
        results = self.results(job)
        if question not in results:
            results[question] = search()
        return results[question]

    def results(self, job: Job) -> dict[tuple[Any, ...], Any]:
        """What is known of a job, by question."""
        key = self.key(job)
        results = self._results.get(key)
        if results is None:
            results = self._results[key] = {}
        return results

    def _forget_oldest(self) -> None:
        """Forgets half of the jobs, those seen first. Keys are not used again, for caches of groups have them."""
        self._keys = dict(islice(self._keys.items(), len(self._keys) // 2, None))
        live = {key for _, key in self._keys.values()}
        self._numbers = {of: key for of, key in self._numbers.items() if key in live}
        self._results = {key: results for key, results in self._results.items() if key in live}


MESHES = (1, 2, 4, 8)  # GPUs of a group
USUAL_CAPACITY = 8192  # larger microbatches are barely cheaper per token
EMPTY = 0.5  # density below which larger microbatches are not tried
LEAST_SHARE = 1e-6  # of a GPU: a job of little weight has a slowdown above 0
MOST_KNOWN = 300_000  # groups in a cache
PROFILE = ("profile",)  # of a job, in its cache
Kind = tuple[str, float]  # kind of worker: device, GiB of a GPU


class Meshes(NamedTuple):
    """Meshes of some GPUs that jobs fit on, by stages and capacity.

    Attributes:
        roomy: whether the last stages have room for the usual microbatch, so that no more stages are tried.
    """

    options: list[tuple[Mesh, SlotCost]]
    roomy: bool


class Rates:
    """Predicts rates. Every result depends only on the arguments.

    Args:
        changes: costs of starting and changing groups.
        capacities: tokens that a microbatch may have (None: what is best for each group). A session that does not
            compile again for every change of its members has one.
        facts: seconds and bytes of a base's stages (None: counted from its sizes, at the rates of rank 16).

    Attributes:
        known_groups, known_on_mesh, known_formed: what `group`, `on_mesh` and `formed` found before, by the keys of the
            jobs.
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
        self.known_groups: dict[tuple[tuple[int, ...], Kind, int], GroupRate | None] = {}
        self._ranked: dict[tuple[tuple[int, ...], Kind, int], list[GroupRate]] = {}
        self.known_on_mesh: dict[tuple[tuple[int, ...], Kind, Mesh], GroupRate | None] = {}
        self.known_formed: dict[tuple[tuple[int, ...], Kind, Mesh], GroupRate | None] = {}

    def profile(self, job: Job) -> Profile:
        """The profile of the job's batches, computed once."""
        return self._jobs.once(job, PROFILE, lambda: make_profile(job))

    def prepare(self, jobs: Iterable[Job]) -> None:
        """Computes the profiles of many jobs at once, in a fraction of the time."""
        job_by_key = {self.key(job): job for job in jobs if PROFILE not in self._jobs.results(job)}
        for job, profile in zip(job_by_key.values(), make_profiles([*job_by_key.values()]), strict=True):
            self._jobs.results(job)[PROFILE] = profile

    def isolated_rate(self, job: Job, kind: Kind, gpus: int) -> IsolatedRate | None:
        """The fastest mesh of exactly this number of GPUs; None if the job fits on none."""
        return self._jobs.once(job, ("alone", kind, gpus), lambda: self._search_isolated(job, kind, gpus))

    def best_isolated_rate(self, job: Job, kind: Kind, most_gpus: int = 8) -> IsolatedRate | None:
        """The mesh of 1, 2, 4 or 8 GPUs with the fewest GPU-seconds; None if the job fits on none."""

        return self._jobs.once(job, ("best", kind, most_gpus), lambda: self._search_best(job, kind, most_gpus))

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
        question = (keys, kind, gpus)
        if question in self.known_groups:
            return self.known_groups[question]
        self._make_room(self.known_groups)
        order = sorted(range(len(keys)), key=keys.__getitem__)
        key = (tuple(keys[i] for i in order), kind, gpus)
        if key not in self.known_groups:
            self.known_groups[key] = self._search_group([members[i] for i in order], kind, gpus)
        rate = self.known_groups[key]
        if key != question:
            ranking = sorted(range(len(order)), key=order.__getitem__)
            rate = self.known_groups[question] = rate.reordered(ranking) if rate is not None else None
        return rate

    def ranked(self, members: Sequence[Job], kind: Kind, gpus: int, most: int) -> list[GroupRate]:
        """The rates on the best meshes on which the jobs are within their bounds, most tokens per second first."""
        key = (tuple(map(self.key, members)), kind, gpus)
        if key not in self._ranked:
            self._make_room(self._ranked)
            cache = self._members(members, kind, gpus)
            slots = [share_slots(cache, mesh, cost) for mesh, cost in self._meshes(members, kind, gpus).options]
            rates = (of.rate(cache) for of in sorted(slots, key=lambda of: -of.tokens_per_s))
            self._ranked[key] = [rate for rate in rates if rate.within_bounds]
        return self._ranked[key][:most]

    def on_mesh(self, members: Sequence[Job], kind: Kind, mesh: Mesh) -> GroupRate | None:
        """The rate of these jobs on this mesh; None if they do not fit."""
        key = (tuple(map(self.key, members)), kind, mesh)
        if key not in self.known_on_mesh:
            self._make_room(self.known_on_mesh)
            self.known_on_mesh[key] = self._on_mesh(share, members, kind, mesh)
        return self.known_on_mesh[key]

    def formed(self, members: Sequence[Job], kind: Kind, mesh: Mesh) -> GroupRate | None:
        """The rate of a group that trains, from packing its batches together; None if the jobs do not fit.

        It is slower to compute and closer to plans than `on_mesh`, with which groups are searched.
        """
        if len(members) == 1:
            return self.on_mesh(members, kind, mesh)
        key = (tuple(map(self.key, members)), kind, mesh)
        if key not in self.known_formed:
            self._make_room(self.known_formed)
            self.known_formed[key] = self._on_mesh(partial(joint_rate, members), members, kind, mesh)
        return self.known_formed[key]

    def alternating_rate(self, members: Sequence[Job], kind: Kind, gpus: int) -> GroupRate | None:
        """The fastest mesh for jobs that alternate batch by batch and never share a microbatch."""
        meshes = self._meshes(members, kind, gpus).options
        rates = [alternate(self._members(members, kind, gpus), mesh, cost) for mesh, cost in meshes]
        return max(rates, key=lambda rate: rate.tokens_per_s, default=None)

    def alternating_on_mesh(self, members: Sequence[Job], kind: Kind, mesh: Mesh) -> GroupRate | None:
        """The rate of jobs that alternate batch by batch on this mesh; None if they do not fit."""
        return self._on_mesh(alternate, members, kind, mesh)

    def memory_gib(self, members: Sequence[Job], kind: Kind, mesh: Mesh) -> float | None:
        """GiB on each GPU of the fullest stage; None if the jobs do not fit on the mesh."""
        adapters = self._facts.trainable_bytes(members, mesh.stages)
        for recompute in (False, True):
            stage = self._stage(members, mesh.stages, recompute)
            if stage.room(kind[1], adapters) >= mesh.capacity_tokens:
                return stage.total(mesh.capacity_tokens, adapters) / GIB
        return None

    def recomputes(self, members: Sequence[Job], kind: Kind, mesh: Mesh) -> bool:
        """Whether the jobs fit on the mesh only with recomputation in backward."""
        adapters = self._facts.trainable_bytes(members, mesh.stages)
        return self._stage(members, mesh.stages, False).room(kind[1], adapters) < mesh.capacity_tokens

    @staticmethod
    def _make_room(cache: dict[Any, Any]) -> None:
        """Empties a cache of groups that has become large: a service runs for months."""
        if len(cache) >= MOST_KNOWN:
            cache.clear()

    def _once(self, key: tuple[Any, ...], search: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = search()
        return self._known[key]

    def _search_best(self, job: Job, kind: Kind, most_gpus: int) -> IsolatedRate | None:
        best = None
        for gpus in MESHES:
            rate = self.isolated_rate(job, kind, gpus) if gpus <= most_gpus else None
            if rate and (best is None or rate.gpu_s(1) < best.gpu_s(1)):
                best = rate
            if rate and self._isolated_meshes(job, kind, gpus).roomy:
                break  # more GPUs are replicas of the same stages, which fill whole slots at best
        return best

    def _isolated_meshes(self, job: Job, kind: Kind, gpus: int) -> Meshes:
        profile = self.profile(job)
        key = ("meshes", job.base_name, job.rank, job.targets, job.kind, profile.longest, kind, gpus)
        return self._once(key, lambda: self._meshes([job], kind, gpus, profile.capacities))

    def _search_isolated(self, job: Job, kind: Kind, gpus: int) -> IsolatedRate | None:
        profile, best = self.profile(job), None
        for mesh, cost in self._isolated_meshes(job, kind, gpus).options:
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
                if share <= gpus:
                    break
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
        cache, best, last = self._members(members, kind, gpus), None, None
        for mesh, cost in self._meshes(members, kind, gpus).options:
            if last is not None and last.mesh.stages == mesh.stages and last.density < EMPTY:
                continue
            last = share_slots(cache, mesh, cost)
            if best is None or not best.within_bounds or last.tokens_per_s > best.tokens_per_s:
                rate = last.rate(cache)
                if best is None or rate.better_than(best):
                    best = rate
        return best

    def _on_mesh(
        self, how: Callable[[Members, Mesh, SlotCost], GroupRate], members: Sequence[Job], kind: Kind, mesh: Mesh
    ) -> GroupRate | None:
        if max(self.profile(job).longest for job in members) > mesh.capacity_tokens:
            return None
        adapters = self._facts.trainable_bytes(members, mesh.stages)
        for recompute in (False, True):
            if self._stage(members, mesh.stages, recompute).room(kind[1], adapters) >= mesh.capacity_tokens:
                cost = self._cost(members[0], kind, mesh.stages, recompute)
                return how(self._members(members, kind, mesh.gpus), mesh, cost)
        return None

    def _members(self, members: Sequence[Job], kind: Kind, gpus: int) -> Members:
        weights = [job.weight for job in members]
        gpus_per_weight = gpus / sum(weights)
        return Members(
            profiles=[self.profile(job) for job in members],
            weights=weights,
            fair=[
                self.fair_steps_per_s(job, kind, max(LEAST_SHARE, round(gpus_per_weight * job.weight, 6)))
                for job in members
            ],
            bounds=[job.max_slowdown for job in members],
        )

    def _meshes(self, members: Sequence[Job], kind: Kind, gpus: int, capacities: Sequence[int] | None = None) -> Meshes:
        """Meshes that these jobs fit on; more stages only if memory needs them."""
        longest = max([self.profile(job).longest for job in members])
        capacities_tried = self._capacities or capacities or LADDER
        most = LARGEST_CAPACITY if capacities_tried is not LADDER else max(longest, USUAL_CAPACITY)
        meshes, roomy = list[tuple[Mesh, SlotCost]](), False
        for stages in MESHES:
            if stages > gpus or gpus % stages or stages > members[0].shape.num_layers:
                continue
            adapters, before = self._facts.trainable_bytes(members, stages), 0
            for recompute in (False, True):
                room = min(LARGEST_CAPACITY, self._stage(members, stages, recompute).room(kind[1], adapters))
                if recompute and before >= longest + 4 * TILE:
                    break
                if room > before:
                    cost = self._cost(members[0], kind, stages, recompute)
                    low, high = max(before, longest - 1), min(room, most)
                    meshes += [
                        (Mesh(stages, gpus // stages, tokens), cost)
                        for tokens in capacities_tried
                        if low < tokens <= high
                    ]
                before = room
            roomy = before >= USUAL_CAPACITY >= longest
            if roomy:
                break
        return Meshes(meshes, roomy)

    def _cost(self, job: Job, kind: Kind, stages: int, recompute: bool) -> SlotCost:
        key = ("cost", job.base_name, kind[0], stages, recompute)
        trains = self.changes.trains
        return self._once(
            key, lambda: slot_cost(self._facts.stage_costs(job, kind[0], stages, recompute), stages, trains)
        )

    def _stage(self, members: Sequence[Job], stages: int, recompute: bool) -> StageBytes:
        key = ("stage", members[0].base_name, frozenset([job.kind for job in members]), stages, recompute)
        return self._once(key, lambda: self._facts.stage_bytes(members, stages, recompute))
