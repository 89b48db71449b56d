"""Costs of a slot on a mesh, and of starting or changing a group."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from scheduling.cost_model import CostModel
from scheduling.online.shapes import ModelShape

TYPICAL_SAMPLE = 1024  # tokens; stages are balanced for samples of this length


class SlotCost(NamedTuple):
    """Seconds of a slot on the slowest stage: fixed + token · tokens + square · Σ length² + update · steps.

    `forward` is the share of a slot that its forward pass takes.
    """

    fixed_s: float
    token_s: float
    square_s: float
    update_s: float
    forward: float = 0.5

    def seconds(self, tokens: float, squares: float) -> float:
        return self.fixed_s + self.token_s * tokens + self.square_s * squares


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeCosts:
    """Costs of starting and changing groups, equal for all policies.

    A session compiles programs for every mesh, size of microbatches and class of ranks that it has not had before.

    Args:
        start_s: start of a new session: processes, and programs from the compilation cache.
        load_bytes_per_s: rate of loading base weights into the GPUs of a host, shared by all sessions that open there.
        change_s: a running group drains and continues with other members.
        compile_s: a running group continues with programs that its session has not compiled yet.
        move_s: a job's state is written by one session and read by another.
        checkpoint_s: training time between saves of every job. A fault loses the progress since the last save.
        save_s: what a save of its members costs a group in training time.
    """

    start_s: float = 30.0
    load_bytes_per_s: float = 4e9
    change_s: float = 3.0
    compile_s: float = 20.0
    move_s: float = 2.0
    checkpoint_s: float = 600.0
    save_s: float = 0.5

    def open_s(self, shape: ModelShape, loading: int = 0) -> float:
        """Seconds from the decision to open a group to its first step, while others load on the same host."""
        return self.start_s + 2 * shape.parameters / self.load_bytes_per_s * (1 + loading)

    @property
    def trains(self) -> float:
        """The share of a group's time that saves leave to training."""
        return 1 - self.save_s / self.checkpoint_s

    def stop_s(self, compiled: bool) -> float:
        """Seconds for which a running group stops for a change."""
        return self.change_s if compiled else self.change_s + self.compile_s


RANK_CLASSES = (16, 32, 64, 128, 256)


def rank_class(ranks: Iterable[int]) -> int:
    """The class of places that hold these ranks; programs depend on the largest."""
    largest = max(ranks)
    return RANK_CLASSES[bisect_left(RANK_CLASSES, largest)] if largest <= RANK_CLASSES[-1] else largest


def slot_cost(costs: CostModel, num_stages: int, trains: float = 1.0) -> SlotCost:
    """Cost of a slot on the slowest stage, forward plus backward, if `trains` of the time is left to training."""

    def of_stage(stage: int) -> SlotCost:
        cost = costs.stage(stage)
        names = ("fixed_s", "token_s", "square_s")
        both = {name: (getattr(cost.forward, name) + getattr(cost.backward, name)) / trains for name in names}
        forward = cost.forward.seconds(*typical) / (cost.forward.seconds(*typical) + cost.backward.seconds(*typical))
        return SlotCost(**both, update_s=cost.update_s / trains, forward=forward)

    typical = 4 * TYPICAL_SAMPLE, 4 * TYPICAL_SAMPLE**2
    return max(map(of_stage, range(num_stages)), key=lambda cost: cost.seconds(*typical))
