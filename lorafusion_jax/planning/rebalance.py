"""Rebalancing of layers from measured stage times, because equal shares of a model rarely take equal times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from lorafusion_jax.layout.extent import Extent, counts_of
from lorafusion_jax.planning.stages import WORTH_A_CUT, PartCosts, stage_loads

# At its power limit, a GPU that never waits clocks lower than one that does, so it looks slower than it is. Moving
# layers away from it for small differences saves nothing.
WORTH_A_MOVE = 0.95


class Moved(NamedTuple):
    """A faster layout than the measured one.

    Args:
        layers: layers of each stage, as in `mesh.layers`.
        saving: relative reduction of the slowest stage's time.
    """

    layers: list[int | float]
    saving: float


def rebalanced(
    stages: Sequence[Extent], seconds: Sequence[float], costs: PartCosts, *, most: Sequence[int] | None = None
) -> Moved | None:
    """Finds the layout with the fastest slowest stage, from the measured stage times of another layout.

    speed(s) = cost(s) / seconds(s). It differs between GPUs of one kind, and costs of parts are only modelled.

    Args:
        stages: the measured layout.
        seconds: measured time of each stage, for the same microbatches.
        most: maximum number of half layers of each stage (None: any).

    Returns:
        None if no layout saves at least five per cent.

    >>> rebalanced([Extent(0, 20), Extent(20, 40)], [1.0, 1.5], PartCosts())
    Moved(layers=[12, 8], saving=0.2)
    """
    if len(stages) == 1 or min(seconds) <= 0:
        return None
    speeds = [load / took for load, took in zip(stage_loads(stages, costs), seconds, strict=True)]
    most = most or [stages[-1].stop] * len(stages)
    by_layer = _quickest(stages[-1].stop, costs, speeds, most, step=2)
    by_half = by_layer if costs.attention is None else _quickest(stages[-1].stop, costs, speeds, most, step=1)
    took, edges = by_half if by_half[0] < WORTH_A_CUT * by_layer[0] else by_layer
    if took >= WORTH_A_MOVE * max(seconds):
        return None
    layers = counts_of([Extent(*pair) for pair in pairwise(edges)])
    return Moved(layers, round(1 - took / max(seconds), 4))


def _quickest(
    halves: int, costs: PartCosts, speeds: Sequence[float], most: Sequence[int], *, step: int
) -> tuple[float, tuple[int, ...]]:
    """(time of the slowest stage, edges of the stages); infinite if the stages cannot hold all halves.

    Dynamic programming over stages: stores the fastest solution for every half at which a stage may end.
    """
    attention = costs.layer / 2 if costs.attention is None else costs.attention
    upto = list(accumulate([attention, costs.layer - attention] * (halves // 2), initial=0.0))
    ways: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage, (speed, room) in enumerate(zip(speeds, most, strict=True)):
        last = stage == len(speeds) - 1
        ends = (costs.embed if stage == 0 else 0.0) + (costs.head if last else 0.0)
        further: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (before, edges) in ways.items():
            for stop in (halves,) if last else range(start + 2, halves, step):
                if not 2 <= stop - start <= room:
                    continue
                took = max(before, (upto[stop] - upto[start] + ends) / speed)
                further[stop] = min(further.get(stop, (inf, ())), (took, (*edges, stop)))
        ways = further
    return ways.get(halves, (inf, ()))
