"""From slots to what each stage does, in order: forward, backward and update events of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from scheduling.types import Plan

Kind = Literal["forward", "backward", "update"]


class Event(NamedTuple):
    """One thing that one stage does. A named tuple, because a long run has millions."""

    kind: Kind
    stage: int
    slot: int
    adapters: tuple[str, ...] = ()  # whose optimizer steps, for updates


Program = tuple[tuple[Event, ...], ...]  # per stage, in order


def one_forward_one_backward(plan: Plan, *, flush: bool = False) -> Program:
    """Lists 1F1B events: stage s holds at most S - s microbatches; no-ops keep their place but do nothing.

    An adapter's update runs on a stage right after that stage's backward of its batch's last slot. The plan's
    distance of S slots makes sure that it comes before the next batch's first forward, on every stage.

    Args:
        flush: drain the pipeline whenever no batch is open, as training one adapter with a plain pipeline does.
    """
    groups = _groups(plan) if flush else [range(plan.num_slots)]
    return _program(plan, [(group, _interleaved) for group in groups])


def forward_then_backward(plan: Plan) -> Program:
    """Lists GPipe events: all forwards of a group of slots, then all backwards, then a flush."""
    return _program(plan, [(group, _all_forward_first) for group in _groups(plan)])


def _program(plan: Plan, groups: Sequence[tuple]) -> Program:
    ending: dict[int, list[str]] = {}
    for slot, adapter, _ in plan.batches_ending():
        ending.setdefault(slot, []).append(adapter)
    stages = []
    for stage in range(plan.num_stages):
        events: list[Event] = []
        for slots, order in groups:
            for kind, slot in order(slots, plan.num_stages - 1 - stage):
                if plan.slots[slot].is_noop:
                    continue
                events.append(Event(kind, stage, slot))
                if kind == "backward" and slot in ending:
                    events.append(Event("update", stage, slot, tuple(ending[slot])))
        stages.append(tuple(events))
    return tuple(stages)


def _interleaved(slots: Sequence[int], ahead: int) -> Iterator[tuple[Kind, int]]:
    for index, slot in enumerate(slots):
        yield "forward", slot
        if index >= ahead:
            yield "backward", slots[index - ahead]
    for slot in slots[max(0, len(slots) - ahead) :]:
        yield "backward", slot


def _all_forward_first(slots: Sequence[int], ahead: int) -> Iterator[tuple[Kind, int]]:
    del ahead  # every stage does the same
    for slot in slots:
        yield "forward", slot
    for slot in slots:
        yield "backward", slot


def _groups(plan: Plan) -> list[range]:
    """Runs of slots after which no batch is open."""
    open_batches: set[tuple[str, int]] = set()
    ends: dict[int, list[tuple[str, int]]] = {}
    for slot, adapter, batch in plan.batches_ending():
        ends.setdefault(slot, []).append((adapter, batch))
    groups, start = [], 0
    for index, slot in enumerate(plan.slots):
        open_batches.update((ref.adapter, ref.batch) for ref in slot.samples)
        open_batches.difference_update(ends.get(index, ()))
        if not open_batches and not slot.is_noop:
            groups.append(range(start, index + 1))
            start = index + 1
    return groups
