"""Pipeline schedules: the forward, backward and update events of each stage, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from scheduling.errors import PlanError
from scheduling.plan import Plan
from scheduling.types import Slot

Kind = Literal["forward", "backward", "update"]


class Event(NamedTuple):
    """One forward, backward or update of one stage. A named tuple, because a long run has millions."""

    kind: Kind
    stage: int
    slot: int
    adapters: tuple[str, ...] = ()  # of an update: the adapters that step


class Stream(Protocol):
    """Slots in order, and the batches that end in them: a plan, or a window of a stream without an end."""

    @property
    def slots(self) -> tuple[Slot, ...]: ...
    @property
    def num_stages(self) -> int: ...
    def batches_ending(self) -> Iterable[tuple[int, str, int]]: ...


Program = tuple[tuple[Event, ...], ...]  # per stage, in order
Transfer = Callable[[int, int], tuple[float, float]]
Order = Callable[[Sequence[int], int], Iterator[tuple[Kind, int]]]  # (slots of a group, stages after this one)


def one_forward_one_backward(plan: Stream, *, flush: bool = False) -> Program:
    """Lists 1F1B events. Stage s holds at most S - s microbatches; no-op slots take a place but have no events.

    On each stage, an adapter's update follows the backward of its batch's last slot. The plan keeps a distance of S
    slots, so the update precedes the first forward of the adapter's next batch on every stage.

    Args:
        flush: drain the pipeline whenever no batch is open, as plain pipeline training of one adapter does.
    """
    groups = _groups(plan) if flush else [range(len(plan.slots))]
    return _program(plan, [(group, _interleave) for group in groups])


def forward_then_backward(plan: Plan) -> Program:
    """Lists GPipe events: all forwards of a group of slots, then all backwards, then a flush.

    Groups end where no batch is open. In a plan of several adapters one may begin its next batch before that: its
    forward would use weights from before the update.

    Raises:
        PlanError: `plan.stale`, a group has two batches of an adapter.
    """
    groups = _groups(plan)
    for group in groups:
        batch_of: dict[str, int] = {}
        for ref in (ref for index in group for ref in plan.slots[index].samples):
            if batch_of.setdefault(ref.adapter, ref.batch) != ref.batch:
                raise PlanError(
                    "plan.stale",
                    f"{ref.adapter} would train on old weights: batches {batch_of[ref.adapter]} and {ref.batch} have "
                    "no flush between them",
                    where=f"slots {group.start} to {group.stop - 1}",
                    fix="one_forward_one_backward, or a plan of one adapter",
                )
    return _program(plan, [(group, _all_forward_first) for group in groups])


def issue_order(program: Program, num_stages: int) -> tuple[Event, ...]:
    """Merges the stages' events into one order in which a single host thread can issue them.

    Every event follows its inputs: a forward follows that of the previous stage, a backward that of the next stage,
    and every event follows its predecessors on its own stage. Otherwise events are ordered by their start times, where
    a forward and a backward take one unit each (a frozen base has no weight gradients) and an update takes none.
    O(n log n).

    An event depends on other stages only through its own slot. So the events of the slots up to m, in this order, can
    be issued first to drain the pipeline (for a checkpoint), and the remaining events afterwards.

    Raises:
        PlanError: `plan.deadlock` if events wait for each other, `plan.setting` for another number of stages.

    >>> from scheduling import AdapterJob, make_plan
    >>> plan = make_plan([AdapterJob("law", [128, 128], 2)], capacity_tokens=128, num_stages=2)
    >>> " ".join(f"{e.kind[0]}{e.slot}@{e.stage}" for e in issue_order(one_forward_one_backward(plan), 2))
    'f0@0 f1@0 f0@1 b0@1 b0@0 f1@1 b1@1 b1@0 u1@1 u1@0'
    """
    if len(program) != num_stages:
        raise PlanError("plan.setting", f"a program of {len(program)} stages cannot run on {num_stages}")
    events = list(play(program, lambda event: _UNITS[event.kind]))
    # The sort is stable: events of one stage that start together (an update takes no time) keep their order.
    return tuple(event for event, _, _ in sorted(events, key=lambda entry: (entry[1], entry[0].stage)))


_UNITS = {"forward": 1.0, "backward": 1.0, "update": 0.0}


def play(
    program: Program,
    seconds: Callable[[Event], float],
    transfer: Transfer = lambda stage, slot: (0.0, 0.0),
) -> Iterator[tuple[Event, float, float]]:
    """Yields (event, start, end), where each stage runs its events in order and as early as their inputs arrive.

    Args:
        transfer: (stage, slot) → seconds of the slot's activations, or of their gradients, over the link between the
            stage and the next, and those in which they occupy it in their direction, see `LinkCost`.

    Raises:
        PlanError: `plan.deadlock`, after all events that can run.
    """
    num_stages = len(program)
    arrivals: dict[tuple[Kind, int, int], float] = {}
    links = _Links(transfer)
    clock, position = [0.0] * num_stages, [0] * num_stages
    waiting = list(range(num_stages))
    while waiting:
        stage = waiting.pop()
        moved = False
        while position[stage] < len(program[stage]):
            event = program[stage][position[stage]]
            arrival = _arrival(event, arrivals)
            if arrival is None:
                break
            start = max(clock[stage], arrival)
            end = start + seconds(event)
            yield event, start, end
            clock[stage] = end
            if (reader := _reader(event, num_stages)) is not None:
                arrivals[reader] = end if reader[1] == stage else links.arrival(event, reader[1], end)
            position[stage] += 1
            moved = True
        if moved:
            waiting += [near for near in (stage - 1, stage + 1) if 0 <= near < num_stages and near not in waiting]
    if any(num_done < len(events) for num_done, events in zip(position, program, strict=True)):
        raise PlanError("plan.deadlock", "the events wait for each other", where=f"positions {position}")


class _Links:
    """The links between stages, each of which sends one message at a time in each direction."""

    def __init__(self, transfer: Transfer):
        self._transfer = transfer
        self._free: dict[tuple[Kind, int], float] = {}  # when a link has sent what it was given, by direction

    def arrival(self, event: Event, target: int, end: float) -> float:
        """Time at which what an event computed until `end` is on another stage."""
        link = min(event.stage, target)
        begin = max(end, self._free.get((event.kind, link), 0.0))
        takes_s, occupied_s = self._transfer(link, event.slot)
        self._free[event.kind, link] = begin + occupied_s
        return begin + takes_s


def _program(plan: Stream, groups: Sequence[tuple[range, Order]]) -> Program:
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


def _interleave(slots: Sequence[int], ahead: int) -> Iterator[tuple[Kind, int]]:
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


def _groups(plan: Stream) -> list[range]:
    """Splits the slots where no batch is open."""
    open_batches: set[tuple[str, int]] = set()
    ends: dict[int, list[tuple[str, int]]] = {}
    for slot, adapter, batch in plan.batches_ending():
        ends.setdefault(slot, []).append((adapter, batch))
    complete = {batch for batches in ends.values() for batch in batches}  # stopped adapters may have others
    groups: list[range] = []
    start = 0
    for index, slot in enumerate(plan.slots):
        open_batches.update({(ref.adapter, ref.batch) for ref in slot.samples} & complete)
        open_batches.difference_update(ends.get(index, ()))
        if not open_batches and not slot.is_noop:
            groups.append(range(start, index + 1))
            start = index + 1
    return groups


def _arrival(event: Event, arrivals: dict[tuple[Kind, int, int], float]) -> float | None:
    """Time at which the event's input arrives; None if it is not known yet."""
    if event.kind == "update" or (event.kind == "forward" and event.stage == 0):
        return 0.0
    return arrivals.pop((event.kind, event.stage, event.slot), None)


def _reader(event: Event, num_stages: int) -> tuple[Kind, int, int] | None:
    """The pass that reads what an event computes; None if no pass does."""
    if event.kind == "forward":
        last = event.stage == num_stages - 1
        return ("backward", event.stage, event.slot) if last else ("forward", event.stage + 1, event.slot)
    if event.kind == "backward" and event.stage > 0:
        return "backward", event.stage - 1, event.slot
    return None
