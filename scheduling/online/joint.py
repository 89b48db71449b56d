"""Packs batches of a group's jobs together, as a plan would, to see how fast each of them trains.

The fluid model of `sharing` lets every job use what others leave. Whole samples do not always fit, and a job whose next
batch has to wait leaves its room empty. Packing a few batches of every member counts both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import mul
from typing import NamedTuple

from scheduling.online.costs import SlotCost
from scheduling.online.profile import TILE
from scheduling.online.sharing import GroupRate, Members, Mesh, between_steps_s, group_rate, share
from scheduling.online.types import Job
from scheduling.packing.greedy import MOST_IDLE
from scheduling.packing.restarts import GAINS, NEARLY

GAIN = GAINS[-1]

LEAST_SLOTS, MOST_SLOTS = 24, 96  # of a packing
BATCHES = 6.0  # of the member with the longest batches, if they fit in these slots


Filled = tuple[list[int], list[int]]  # samples of a member that a slot holds, and those that are left


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
    """A member's position in its data, and the samples of its batch that are left, longest first. It goes first in the
    slot in which it is due, and until it has had one."""

    job: Job
    position: int = 0
    left: list[int] = field(default_factory=list[int])
    begun: bool = False
    ready_slot: int = 0
    due_slot: float = 0.0
    tokens: int = 0

    def open_batch(self) -> None:
        lengths, size = self.job.lengths, self.job.global_batch
        batch = lengths[self.position : self.position + size]
        while len(batch) < size:
            batch = (*batch, *lengths[: size - len(batch)])
        self.left = sorted(batch, reverse=True)
        self.position = (self.position + size) % len(lengths)
        self.begun = False


def pack_together(members: Sequence[Job], mesh: Mesh, slots: int) -> JointRate:
    """Packs slots one after the other, by the rules of windows: the member that was served least for its weight comes
    first, unless another order fills the slot much better.

    A member's next batch may start `stages` slots after the last one of its batch. Its samples in a microbatch are
    padded to whole tiles.

    >>> jobs = [Job(name, "ann", "llama-3.1-8b", 0.0, [1000], global_batch=2, steps=9) for name in "ab"]
    >>> pack_together(jobs, Mesh(1, 1, 4096), 10).tokens
    4000.0
    """
    fair, improvable = _pack(members, mesh, slots, inf)
    if not improvable or fair.tokens >= NEARLY * mesh.capacity_tokens * mesh.replicas:
        return fair
    fuller, _ = _pack(members, mesh, slots, GAIN)
    return fair if fair.tokens >= NEARLY * fuller.tokens else fuller


def _pack(members: Sequence[Job], mesh: Mesh, slots: int, gain: float) -> tuple[JointRate, bool]:
    """What slots hold if another order than the fair one is taken for those that it fills `gain` times fuller; and
    whether one might."""
    cursors, room = [_Cursor(job) for job in members], mesh.capacity_tokens * mesh.replicas
    patience = {job.name: max(MOST_IDLE, sum(other.weight for other in members) / job.weight) for job in members}
    tokens = squares = 0
    improvable = False
    for slot in range(slots):
        turns = [cursor for cursor in cursors if slot >= cursor.ready_slot]
        for cursor in turns:
            if not cursor.left:
                cursor.open_batch()
        turns.sort(key=lambda cursor: (cursor.due_slot > slot, cursor.tokens / cursor.job.weight))
        fillings = _fill_slot(turns, mesh)
        if len(turns) > 1 and _tokens(fillings) * GAIN < room and any(unplaced for _, unplaced in fillings):
            improvable = True
            turns, fillings = (turns, fillings) if gain == inf else _fuller(turns, fillings, mesh, slot, gain)
        for cursor, (samples, unplaced) in zip(turns, fillings, strict=True):
            if not samples:
                continue
            sample_tokens = sum(samples)
            cursor.tokens += sample_tokens
            tokens += sample_tokens
            squares += sum(map(mul, samples, samples))
            cursor.left = unplaced
            cursor.begun, cursor.due_slot = True, slot + 1 + patience[cursor.job.name]
            if not unplaced:
                cursor.ready_slot = slot + mesh.stages
    means = [sum(job.lengths) / len(job.lengths) * job.global_batch for job in members]
    steps = tuple(cursor.tokens / mean / slots for cursor, mean in zip(cursors, means, strict=True))
    return JointRate(steps, tokens / slots, squares / slots), improvable


def _fuller(
    turns: list[_Cursor], fair: list[Filled], mesh: Mesh, slot: int, gain: float
) -> tuple[list[_Cursor], list[Filled]]:
    """The order that fills a slot best, members that are due in front, if it holds `gain` times the fair one."""
    due = [index for index, cursor in enumerate(turns) if cursor.due_slot <= slot]
    others = [index for index, cursor in enumerate(turns) if cursor.due_slot > slot]
    keys: tuple[Callable[[int], int], ...] = (
        lambda index: sum(turns[index].left),
        lambda index: turns[index].left[0],
        lambda index: turns[index].begun,
    )
    best, most, first = (turns, fair), gain * _tokens(fair), (*range(len(turns)),)
    for order in dict.fromkeys((*due, *sorted(others, key=key, reverse=True)) for key in keys):
        if order == first:
            continue
        other = [turns[index] for index in order]
        fillings = _fill_slot(other, mesh)
        if (tokens := _tokens(fillings)) > most:
            best, most = (other, fillings), tokens
    return best


def _fill_slot(turns: Sequence[_Cursor], mesh: Mesh) -> list[Filled]:
    """The samples that each member gets into a slot, if they take it in turns."""
    rooms = [mesh.capacity_tokens] * mesh.replicas
    return [_fill(rooms, cursor.left) for cursor in turns]


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


def _tokens(filled: Sequence[Filled]) -> int:
    return sum([sum(samples) for samples, _ in filled])


def _fill(rooms: list[int], left: Sequence[int]) -> Filled:
    """Puts the samples that fit, longest first, into the fullest microbatch that holds them, and takes their room."""
    placed: list[int] = []
    unplaced: list[int] = []
    free, roomiest, shortest, several = list(rooms), max(rooms), left[-1], len(rooms) > 1
    for at, length in enumerate(left):  # without min(): a decision asks for hundreds of thousands of samples
        if length > roomiest:
            if shortest > roomiest:
                unplaced += left[at:]
                break
            unplaced.append(length)
            continue
        fullest, least = -1, inf
        for index, room in enumerate(free):
            if length <= room < least:
                fullest, least = index, room
        free[fullest] -= length
        placed.append(length)
        if least == roomiest:
            roomiest = max(free) if several else free[0]
    for index, room in enumerate(free):
        rooms[index] -= -(-(rooms[index] - room) // TILE) * TILE
    return placed, unplaced
