"""Packs batches of a group's jobs together, as a plan would, to see how fast each of them trains.

The fluid model of `sharing` lets every job use what others leave. Whole samples do not always fit, and a job whose next
batch has to wait leaves its room empty. Packing a few batches of every member counts both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from scheduling.online.costs import SlotCost
from scheduling.online.profile import TILE
from scheduling.online.sharing import GroupRate, Members, Mesh, between_steps_s, group_rate, share
from scheduling.online.types import Job

LEAST_SLOTS, MOST_SLOTS = 24, 96  # of a packing
BATCHES = 4.0  # of the member with the longest batches, if they fit in these slots


class JointRate(NamedTuple):
    """What a slot holds on average.

    Args:
        steps: optimizer steps of each member.
        tokens: of all members.
        squares: Σ length² of all members.
    """

    steps: tuple[float, ...]
    tokens: float
    squares: float


@dataclass(slots=True)
class _Cursor:
    """A member's position in its data, and the samples of its batch that are left, longest first."""

    job: Job
    position: int = 0
    left: list[int] = field(default_factory=list[int])
    ready_slot: int = 0
    tokens: int = 0

    def open_batch(self) -> None:
        lengths, size = self.job.lengths, self.job.global_batch
        self.left = sorted((lengths[(self.position + i) % len(lengths)] for i in range(size)), reverse=True)
        self.position = (self.position + size) % len(lengths)


def pack_together(members: Sequence[Job], mesh: Mesh, slots: int) -> JointRate:
    """Packs slots one after the other: the member with the least tokens for its weight comes first.

    A member's next batch may start `stages` slots after the last one of its batch. Its samples in a microbatch are
    padded to whole tiles.

    >>> jobs = [Job(name, "ann", "llama-3.1-8b", 0.0, [1000], global_batch=2, steps=9) for name in "ab"]
    >>> pack_together(jobs, Mesh(1, 1, 4096), 10).tokens
    4000.0
    """
    cursors = [_Cursor(job) for job in members]
    tokens = squares = 0
    for slot in range(slots):
        rooms = [mesh.capacity_tokens] * mesh.replicas
        turns = sorted(cursors, key=lambda cursor: cursor.tokens / cursor.job.weight)
        for cursor in turns:
            if slot < cursor.ready_slot:
                continue
            if not cursor.left:
                cursor.open_batch()
            packed = _fill(rooms, cursor.left)
            taken = sum(packed)
            cursor.tokens += taken
            tokens += taken
            squares += sum(length * length for length in packed)
            if not cursor.left:
                cursor.ready_slot = slot + mesh.stages
    means = [sum(job.lengths) / len(job.lengths) * job.global_batch for job in members]
    steps = tuple(cursor.tokens / mean / slots for cursor, mean in zip(cursors, means, strict=True))
    return JointRate(steps, tokens / slots, squares / slots)


def joint_rate(jobs: Sequence[Job], members: Members, mesh: Mesh, cost: SlotCost) -> GroupRate:
    """Rates of jobs that share microbatches, from packing some batches of each together.

    The slots are so many that the member with the longest steps, by the fluid model, takes some.
    """
    fluid = share(members, mesh, cost)
    room = mesh.capacity_tokens * mesh.replicas
    per_slot = min(fluid.steps_per_s) * fluid.density * room / fluid.tokens_per_s
    joint = pack_together(jobs, mesh, int(min(MOST_SLOTS, max(LEAST_SLOTS, BATCHES / per_slot))))
    squares = mesh.capacity_tokens * joint.squares / joint.tokens
    slot_s = cost.seconds(mesh.capacity_tokens, squares)
    slot_s += between_steps_s(members.profiles, joint.steps, mesh, cost)
    steps = [steps / slot_s for steps in joint.steps]
    return group_rate(mesh, steps, joint.tokens / slot_s, members.fair, members.bounds, joint.tokens / room)


def _fill(rooms: list[int], left: list[int]) -> list[int]:
    """Takes the samples that fit off `left`, longest first, into the fullest microbatch that holds them."""
    packed: list[int] = []
    rest: list[int] = []
    free = list(rooms)
    for length in left:  # without min(): a decision asks for hundreds of thousands of samples
        fullest, least = -1, inf
        for index, room in enumerate(free):
            if length <= room < least:
                fullest, least = index, room
        if fullest >= 0:
            free[fullest] -= length
            packed.append(length)
        else:
            rest.append(length)
    for index, room in enumerate(free):
        rooms[index] -= -(-(rooms[index] - room) // TILE) * TILE
    left[:] = rest
    return packed
