"""A fluid model of how jobs share the slots of a group: max–min fair by weight.

Per slot, job i uses at most cap_i = B_i / (n_i + S - 1) tokens: its batch of B_i tokens fills n_i slots, and S - 1
more slots pass before its next batch may start. The total demand x = Σ cap_i / room fills the slots to
x · (1 + (x / FULL)^p)^(-1/p)  of their room. `benchmarks/online.py rates` compares this with plans of `make_plan`,
played by `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import truediv
from typing import NamedTuple

from scheduling.online.costs import SlotCost
from scheduling.online.profile import Profile

FULL = 0.97  # of a slot's room that the planner fills when demand is unlimited
SHARPNESS = 5.0  # p for many jobs; it is lower for few jobs, which leave larger gaps


class Mesh(NamedTuple):
    """Layout of a group on its GPUs."""

    stages: int
    replicas: int
    capacity_tokens: int

    @property
    def gpus(self) -> int:
        return self.stages * self.replicas


class IsolatedRate(NamedTuple):
    """Rate of an isolated job on its best mesh."""

    step_s: float
    mesh: Mesh

    def gpu_s(self, steps: float) -> float:
        return self.step_s * steps * self.mesh.gpus


class GroupRate(NamedTuple):
    """Rates of a group on a mesh.

    Args:
        steps_per_s: of each member, in the order given.
        tokens_per_s: sum over all members.
        slowdowns: of each member, relative to isolated training on its fair share of the GPUs.
        density: real tokens / room.
        excess: largest ratio of a slowdown to its bound; all bounds hold if it is at most 1.
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
        """Compares by tokens per second if both are within their bounds, otherwise by excess."""
        if self.within_bounds and other.within_bounds:
            return self.tokens_per_s > other.tokens_per_s
        return self.excess < other.excess

    def reordered(self, places: Sequence[int]) -> GroupRate:
        """The same rates for members in another order."""
        return self._replace(
            steps_per_s=tuple(self.steps_per_s[index] for index in places),
            slowdowns=tuple(self.slowdowns[index] for index in places),
        )


class Members(NamedTuple):
    """The jobs of a group, as the fluid model needs them.

    Attributes:
        fair: isolated steps per second of each on its fair share.
        bounds: bounds on the slowdowns.
    """

    profiles: Sequence[Profile]
    weights: Sequence[float]
    fair: Sequence[float]
    bounds: Sequence[float]


class Slots(NamedTuple):
    """What the slots of a group hold on average.

    Args:
        slot_s: seconds of a slot, with its part of what the group stops for.
        steps: optimizer steps of each member in a slot.
        density: real tokens / room.
    """

    mesh: Mesh
    slot_s: float
    steps: Sequence[float]
    tokens_per_s: float
    density: float

    def rate(self, members: Members) -> GroupRate:
        steps = [steps / self.slot_s for steps in self.steps]
        return group_rate(self.mesh, steps, self.tokens_per_s, members.fair, members.bounds, self.density)


def share(members: Members, mesh: Mesh, cost: SlotCost) -> GroupRate:
    """Rates of jobs that share microbatches."""
    return share_slots(members, mesh, cost).rate(members)


def share_slots(members: Members, mesh: Mesh, cost: SlotCost) -> Slots:
    """How jobs that share microbatches fill them."""
    profiles = members.profiles
    room = mesh.replicas * mesh.capacity_tokens
    caps: list[float] = []
    padded, squares = 0.0, 0.0
    for profile in profiles:
        cap, with_padding = profile.wanted(mesh)
        caps.append(cap)
        padded += with_padding
        squares += cap * profile.squares
    demand = sum(caps)
    tokens = demand
    if len(caps) > 1:
        caps = fair_shares(caps, members.weights, filled(padded / room, len(caps)) * room * demand / padded)
        tokens = sum(caps)
    steps = [cap / profile.batch_tokens for cap, profile in zip(caps, profiles, strict=True)]
    slot_s = cost.seconds(mesh.capacity_tokens, mesh.capacity_tokens * squares / demand)
    slot_s += between_steps_s(profiles, steps, mesh, cost)
    return Slots(mesh, slot_s, steps, tokens / slot_s, tokens / room)


def alternate(members: Members, mesh: Mesh, cost: SlotCost) -> GroupRate:
    """Rates of jobs that alternate batch by batch: the pipeline holds several jobs, a microbatch only one."""
    profiles, _, fair, bounds = members
    slots = [profile.slots_at(mesh.capacity_tokens, mesh.replicas) for profile in profiles]
    cycle = max(sum(slots), max(slots) + mesh.stages - 1)
    tokens = sum(profile.batch_tokens for profile in profiles)
    squares = sum(profile.batch_tokens * profile.squares for profile in profiles) / tokens
    capacity = mesh.capacity_tokens
    cycle_s = cycle * cost.seconds(capacity, capacity * squares)
    cycle_s += between_steps_s(profiles, [1.0] * len(profiles), mesh, cost)
    density = tokens / (cycle * mesh.replicas * capacity)
    return group_rate(mesh, [1 / cycle_s] * len(profiles), tokens / cycle_s, fair, bounds, density)


def between_steps_s(profiles: Sequence[Profile], steps: Sequence[float], mesh: Mesh, cost: SlotCost) -> float:
    """Seconds for which a group stops while its members take so many steps."""
    return sum([count * job.between_steps_s(mesh, cost) for job, count in zip(profiles, steps, strict=True)])


def group_rate(
    mesh: Mesh, steps: list[float], tokens_per_s: float, fair: Sequence[float], bounds: Sequence[float], density: float
) -> GroupRate:
    """The rates of a group's members, with their slowdowns against `fair` rates."""
    slowdowns = tuple(map(truediv, fair, steps))
    excess = max(map(truediv, slowdowns, bounds))
    return GroupRate(mesh, tuple(steps), tokens_per_s, slowdowns, density, excess)


def filled(wanted: float, jobs: int) -> float:
    """Share of a slot's room that is used when jobs demand `wanted` times the room."""
    sharpness = min(SHARPNESS, 3 + jobs / 2)
    return wanted * (1 + (wanted / FULL) ** sharpness) ** (-1 / sharpness)


def fair_shares(caps: Sequence[float], weights: Sequence[float], room: float) -> list[float]:
    """Max–min fair shares: proportional to weights, limited by caps, and using all room if the caps allow it.

    >>> fair_shares([1.0, 5.0, 9.0], [1.0, 1.0, 1.0], 9.0)
    [1.0, 4.0, 4.0]
    """
    shares = [0.0] * len(caps)
    open_weight = sum(weights)
    for ratio, i in sorted([(caps[i] / weights[i], i) for i in range(len(caps))]):
        level = min(ratio, room / open_weight)
        shares[i] = level * weights[i]
        room -= shares[i]
        open_weight -= weights[i]
    return shares
