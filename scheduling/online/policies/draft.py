"""A draft of the cluster on which a policy tries moves. Its difference to the real cluster becomes decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from scheduling.online.rates import Kind
from scheduling.online.sharing import Mesh
from scheduling.online.state import ClusterState, Decision, JobState


@dataclass(slots=True)
class DraftGroup:
    """A group of the draft; `why` becomes the reason of its decision."""

    base: str
    worker: str
    gpus: tuple[int, ...]
    mesh: Mesh
    members: list[str]
    name: str
    is_new: bool = True
    ready_s: float = 0.0
    why: list[str] = field(default_factory=list[str])


class Draft:
    """A mutable copy of the groups; `decisions` returns the changes.

    Groups use aligned blocks of 1, 2, 4 or 8 GPUs, so that they do not fragment a worker.
    """

    def __init__(self, state: ClusterState):
        self.state = state
        self.groups = {
            name: DraftGroup(
                group.base, group.worker, group.gpus, group.mesh, list(group.members), name, False, group.ready_s
            )
            for name, group in state.groups.items()
        }
        self.by_worker: dict[str, dict[str, DraftGroup]] = {name: {} for name in state.workers}
        for name, group in self.groups.items():
            self.by_worker[group.worker][name] = group
        self.free = {name: [True] * worker.gpus for name, worker in state.workers.items()}
        self.count = {name: worker.gpus for name, worker in state.workers.items()}  # of free GPUs
        self._kinds = {name: worker.kind for name, worker in state.workers.items()}
        self._names: dict[Kind, list[str]] = {}
        self._tightest: dict[tuple[int, Kind], tuple[str, int] | None] = {}  # until a GPU is taken or freed
        self._idle: list[DraftGroup] | None = None
        for group in self.groups.values():
            if group.members:
                self._mark(group, False)

    def waiting(self) -> list[JobState]:
        """Jobs that are in no group of the draft."""
        members = {name for group in self.groups.values() for name in group.members}
        return [job for name, job in self.state.jobs.items() if name not in members]

    def free_gpus(self) -> int:
        return sum(self.count.values())

    def names_of(self, kind: Kind) -> list[str]:
        """Workers of a kind."""
        if kind not in self._names:
            self._names[kind] = [name for name, of in self._kinds.items() if of == kind]
        return self._names[kind]

    def kind(self, group: DraftGroup) -> Kind:
        return self._kinds[group.worker]

    def blocks(self, size: int, kind: Kind) -> Iterator[tuple[str, int]]:
        """(worker, first GPU) of free aligned blocks on workers of a kind, fullest worker first."""
        counts = ((self.count[name], name) for name in self.names_of(kind) if self.count[name] >= size)
        for _, worker in sorted(counts):
            free = self.free[worker]
            for first in range(0, len(free) - size + 1, size):
                if all(free[first : first + size]):
                    yield worker, first

    def open(self, base: str, block: tuple[str, int], mesh: Mesh, members: list[str], why: str) -> DraftGroup:
        """Opens a group on a free block. Reuses an idle session of its base and size there, else closes it."""
        worker, first = block
        gpus = tuple(range(first, first + mesh.gpus))
        for name, group in list(self.by_worker[worker].items()):
            if not group.members and set(group.gpus) & set(gpus):
                if group.base == base and group.gpus == gpus:
                    group.members, group.mesh = members, mesh
                    group.why.append(why)
                    self._mark(group, False)
                    return group
                del self.groups[name], self.by_worker[worker][name]
        name = f"{worker}:{first}"
        group = self.groups[name] = DraftGroup(base, worker, gpus, mesh, members, name, why=[why])
        self.by_worker[worker][name] = group
        self._mark(group, False)
        return group

    def warm_block(self, base: str, size: int, kind: Kind) -> tuple[str, int] | None:
        """A free block with an idle session of this base and size."""
        if self._idle is None:
            self._idle = [group for group in self.groups.values() if not group.members]
        for group in self._idle:
            idle = not group.members and all(self.free[group.worker][gpu] for gpu in group.gpus)
            if idle and group.base == base and len(group.gpus) == size and self.kind(group) == kind:
                return group.worker, group.gpus[0]
        return None

    def idle_session(self, base: str, block: tuple[str, int], size: int) -> bool:
        """Whether exactly these GPUs hold an idle session of this base."""
        worker, first = block
        sessions = self.by_worker[worker].values()
        return any((g.base, g.gpus[0], len(g.gpus)) == (base, first, size) and not g.members for g in sessions)

    def block(self, base: str, size: int, kind: Kind) -> tuple[str, int] | None:
        """The block that a group of this size would use: a warm session if there is one, else the tightest fit."""
        if (size, kind) not in self._tightest:
            self._tightest[size, kind] = next(self.blocks(size, kind), None)
        return self.warm_block(base, size, kind) or self._tightest[size, kind]

    def empty(self, group: DraftGroup, why: str) -> None:
        """Removes all members of a group; its session stays idle."""
        group.members = []
        group.why.append(why)
        self._mark(group, True)

    def halve(self, group: DraftGroup) -> None:
        """Frees the second half of a group's GPUs."""
        self._mark(group, True)
        group.gpus = group.gpus[: len(group.gpus) // 2]
        self._mark(group, False)

    def close(self, group: DraftGroup) -> None:
        self._mark(group, True)
        del self.groups[group.name], self.by_worker[group.worker][group.name]

    def groups_on(self, worker: str, gpus: range) -> list[DraftGroup]:
        """Groups with members on any of these GPUs."""
        on_worker = self.by_worker[worker].values()
        return [g for g in on_worker if g.members and g.gpus[0] < gpus.stop and g.gpus[-1] >= gpus.start]

    def decisions(self) -> list[Decision]:
        """The decisions that turn the real groups into the draft."""
        decisions: list[Decision] = []
        for name, before in self.state.groups.items():
            after = self.groups.get(name)
            if after is None or after.is_new:
                decisions.append(Decision(kind="close", group=name, why="its GPUs go to another group"))
            elif (before.members, before.gpus, before.mesh) != (tuple(after.members), after.gpus, after.mesh):
                decisions.append(self._decision("change", after))
        return decisions + [self._decision("open", group) for group in self.groups.values() if group.is_new]

    def _decision(self, kind: Literal["open", "change"], group: DraftGroup) -> Decision:
        return Decision(
            kind=kind,
            group=group.name,
            base=group.base,
            worker=group.worker,
            gpus=group.gpus,
            mesh=group.mesh,
            members=tuple(group.members),
            why=group.why[-1] if group.why else "",
        )

    def _mark(self, group: DraftGroup, free: bool) -> None:
        self._tightest.clear()
        self._idle = None
        row = self.free[group.worker]
        for gpu in group.gpus:
            self.count[group.worker] += free - row[gpu]
            row[gpu] = free
