"""From slots to what each stage does, in order: forward, backward and update events of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from scheduling.errors import PlanError
from scheduling.plan import Plan

Kind = Literal["forward", "backward", "update"]


class Event(NamedTuple):
    """One thing that one stage does. A named tuple, because a long run has millions."""

    kind: Kind
    stage: int
    slot: int
    adapters: tuple[str, ...] = ()  # whose optimizer steps, for updates


Program = tuple[tuple[Event, ...], ...]  # per stage, in order
Order = Callable[[Sequence[int], int], Iterator[tuple[Kind, int]]]  # of a group's slots, on a stage


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


def issue_order(program: Program, num_stages: int) -> tuple[Event, ...]:
    """Merges the stages' events into one order in which one host thread can issue them all.

    Every event comes after those that it needs: a forward after that of the stage before, a backward after that of
    the stage after, and all after what precedes them on their stage. Otherwise the order is that in which devices
    would start them if a forward and a backward took 1, and an update nothing: a frozen base has no weight gradients,
    and one measured layer takes 5.9 and 5.8 ms. O(n log n).

    An event needs only events of its own slot on other stages, so the events of slots up to m, in this order, are an
    order by themselves: issue them first to drain the pipeline (for a checkpoint), and the rest afterwards.

    Raises:
        PlanError: `plan.deadlock` if the events wait for each other, `plan.setting` for another number of stages.

    >>> from scheduling import AdapterJob, make_plan
    >>> plan = make_plan([AdapterJob("law", [128, 128], 2)], capacity_tokens=128, num_stages=2)
    >>> " ".join(f"{e.kind[0]}{e.slot}@{e.stage}" for e in issue_order(one_forward_one_backward(plan), 2))
    'f0@0 f1@0 f0@1 b0@1 b0@0 f1@1 b1@1 b1@0 u1@1 u1@0'
    """
    if len(program) != num_stages:
        raise PlanError("plan.setting", f"a program of {len(program)} stages cannot run on {num_stages}")
    played = list(play(program, lambda event: _UNITS[event.kind]))
    # Stable: events of one stage that start together (an update takes no time) stay in their order.
    return tuple(event for event, _, _ in sorted(played, key=lambda one: (one[1], one[0].stage)))


_UNITS = {"forward": 1.0, "backward": 1.0, "update": 0.0}


def play(
    program: Program, seconds: Callable[[Event], float], transfer_s: float = 0.0
) -> Iterator[tuple[Event, float, float]]:
    """Yields (event, start, end) when each stage runs its events as early as their inputs arrive.

    Raises:
        PlanError: `plan.deadlock`, after what can run.
    """
    num_stages = len(program)
    ends: dict[tuple[Kind, int, int], float] = {}
    clock, position = [0.0] * num_stages, [0] * num_stages
    waiting = list(range(num_stages))
    while waiting:
        stage = waiting.pop()
        moved = False
        while position[stage] < len(program[stage]):
            event = program[stage][position[stage]]
            arrival = _arrival(event, num_stages, ends, transfer_s)
            if arrival is None:
                break
            start = max(clock[stage], arrival)
            end = start + seconds(event)
            yield event, start, end
            ends[event.kind, stage, event.slot] = clock[stage] = end
            position[stage] += 1
            moved = True
        if moved:
            waiting += [near for near in (stage - 1, stage + 1) if 0 <= near < num_stages and near not in waiting]
    if any(done < len(events) for done, events in zip(position, program, strict=True)):
        raise PlanError("plan.deadlock", "the events wait for each other", where=f"positions {position}")


def _program(plan: Plan, groups: Sequence[tuple[range, Order]]) -> Program:
    ending: dict[int, list[str]] = {}
    for slot, adapter, _ in plan.batches_ending():
        ending.setdefault(slot, []).append(adapter)
    stages: list[tuple[Event, ...]] = []
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
    complete = {batch for batches in ends.values() for batch in batches}  # those of stopped adapters may not be
    groups: list[range] = []
    start = 0
    for index, slot in enumerate(plan.slots):
        open_batches.update({(ref.adapter, ref.batch) for ref in slot.samples} & complete)
        open_batches.difference_update(ends.get(index, ()))
        if not open_batches and not slot.is_noop:
            groups.append(range(start, index + 1))
            start = index + 1
    return groups


def _arrival(
    event: Event, num_stages: int, ends: dict[tuple[Kind, int, int], float], transfer_s: float
) -> float | None:
    """When the event's input is there; None if it is not known yet."""
    if event.kind == "update":
        return 0.0
    if event.kind == "forward":
        if event.stage == 0:
            return 0.0
        sent = ends.get(("forward", event.stage - 1, event.slot))
    elif event.stage == num_stages - 1:
        return ends.get(("forward", event.stage, event.slot))
    else:
        sent = ends.get(("backward", event.stage + 1, event.slot))
    return None if sent is None else sent + transfer_s
