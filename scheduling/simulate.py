"""Simulates a plan's events with a cost model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from scheduling.cost_model import CostModel
from scheduling.pipeline import Event, Program, one_forward_one_backward, play
from scheduling.plan import Plan
from scheduling.timeline import Span, Timeline

# Attention costs the square of a segment's length: padding of a whole microbatch is cut into so many, a part of one
# into as many as it has eighths.
PADDING_SEGMENTS = 8


def simulate(plan: Plan, cost_model: CostModel, *, program: Program | None = None) -> Timeline:
    """Predicts the timeline of a plan.

    A forward waits for the activations of the previous stage, a backward for the gradients of the next stage, and every
    event for its predecessor on its stage. A link sends one message at a time in each direction. Shapes are static, so
    a microbatch costs as much as a full one of its capacity. Replicas wait for the slowest of them.

    Args:
        program: events of each stage, in order (None: 1F1B of this plan).

    >>> from scheduling import AdapterJob, default_cost_model, make_plan
    >>> plan = make_plan([AdapterJob("law", [700] * 64, 8)], capacity_tokens=1024, num_stages=2)
    >>> timeline = simulate(plan, default_cost_model(num_stages=2))
    >>> len(timeline.spans) == 2 * (2 * 64 + 8)
    True
    """
    cost_model.check_stages(plan.num_stages)
    program = one_forward_one_backward(plan) if program is None else program
    loads = _loads(plan)
    capacities = plan.slot_capacities

    def transfer(stage: int, slot: int) -> tuple[float, float]:
        return cost_model.link(stage).seconds(capacities[slot])

    spans = [
        Span(event.kind, event.stage, event.slot, start, end, event.adapters)
        for event, start, end in play(program, lambda event: _seconds(event, cost_model, loads), transfer)
    ]
    return Timeline(
        spans=tuple(spans),
        num_stages=plan.num_stages,
        title=f"predicted: {cost_model.source}" if cost_model.source else "predicted",
        slot_adapters={index: load.adapters for index, load in enumerate(loads) if load.adapters},
        tokens=plan.tokens,
    )


class _Load(NamedTuple):
    """Work of a slot's slowest replica."""

    tokens: int
    squares: int
    adapters: tuple[str, ...]


def slot_squares(plan: Plan) -> list[int]:
    """Per slot, Σ length² over the segments (padding included) of its slowest replica; attention's cost scales with it.

    >>> from scheduling import AdapterJob, make_plan
    >>> job = AdapterJob(name="law", sample_tokens=(64, 32), global_batch=2)
    >>> slot_squares(make_plan([job], capacity_tokens=128, num_stages=1, tile_tokens=32)) == [64**2 + 32**2 + 2 * 16**2]
    True
    """
    replicas = max((len(slot.replicas) for slot in plan.slots), default=1)
    tokens, squares = np.zeros((2, plan.num_slots, replicas), np.int64)
    parts = plan.parts
    np.add.at(tokens, (parts.slot, parts.replica), parts.tokens)
    np.add.at(squares, (parts.slot, parts.replica), parts.squares)
    capacities = np.array(plan.slot_capacities, np.int64)[:, None]
    padding = capacities - tokens
    for slot, layout in enumerate(len(slot.replicas) for slot in plan.slots):
        padding[slot, layout:] = 0
    length = _padding_length(padding, capacities, PADDING_SEGMENTS)
    full, rest = np.divmod(padding, np.maximum(length, 1))
    return (squares + full * length**2 + rest**2).max(axis=1, initial=0).tolist()


def padding_segments(rows: int, capacity: int, places: int = PADDING_SEGMENTS) -> list[int]:
    """The lengths of the segments of a microbatch's padding, which share its rows evenly.

    Args:
        rows: of padding.
        places: for segments that nothing else takes, at least one.

    >>> padding_segments(96, 128), padding_segments(96, 128, places=2), padding_segments(9, 128)
    ([16, 16, 16, 16, 16, 16], [48, 48], [9])
    """
    length = int(_padding_length(np.int64(rows), capacity, places))
    return [min(length, rows - first) for first in range(0, rows, max(length, 1))]


def _padding_length(rows: Any, capacity: Any, places: int) -> Any:
    segments = np.minimum(-(-rows * PADDING_SEGMENTS // capacity), places)
    return -(-rows // np.maximum(segments, 1))


def _loads(plan: Plan) -> list[_Load]:
    return [
        _Load(capacity, squares, adapters)
        for adapters, capacity, squares in zip(
            plan.slot_adapters, plan.slot_capacities, slot_squares(plan), strict=True
        )
    ]


def _seconds(event: Event, cost_model: CostModel, loads: list[_Load]) -> float:
    cost = cost_model.stage(event.stage)
    if event.kind == "update":
        return cost.update_s * len(event.adapters)
    load = loads[event.slot]
    return (cost.forward if event.kind == "forward" else cost.backward).seconds(load.tokens, load.squares)
