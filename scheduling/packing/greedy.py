"""Greedy packing in one pass: jobs in an order of the slots that they have left; each slot is filled."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import floor, inf
from typing import Literal

from scheduling.packing.fill import Choose, fill_best, fill_microbatch
from scheduling.packing.problem import Filling, Microbatch, Problem

# (tiles of a capacity -> tokens left of each job, tokens left now, tile, whether a single job is left) -> tiles
ChooseSize = Callable[[Callable[[int], list[int]], Sequence[int], int, bool], int]
Entry = tuple[float, ...]  # what jobs that may run are sorted by; the job is last
# Order of jobs that were served equally, to a few slots: those whose batch is in progress first, or the shortest rests.
Equal = Literal["begun", "shortest"]
# Order without weights: batches in progress first, then the longest chain, or the reverse. With equal batches the first
# is often shorter. With mixed ones it is not: a large batch, once begun, holds up the job with the longest chain.
# "list" is the second without a look at what is begun.
First = Literal["begun", "chain", "list"]
EQUAL_SLOTS = 4.0  # fewer leave microbatches of two or three jobs emptier: 0.955 of an offline plan with 1
MOST_IDLE = 8  # slots in which a job of few may be passed over


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How jobs share the slots by their weights, even if these are equal: the one that was served least goes first.

    Args:
        equal: which of equally served jobs goes first.
        gain: another order is taken for a slot that it fills this many times fuller (inf: never). A sample as long as a
            microbatch can run only where its job goes first; the others alone may leave the slot nearly empty.
        idle: per job, slots since its last one. A job goes first after `MOST_IDLE` of them, or after as many as its
            weight gives it one, if these are more.
    """

    equal: Equal
    gain: float = inf
    idle: Sequence[int]


def greedy(
    problem: Problem,
    *,
    first: First = "begun",
    ahead: Sequence[float] | None = None,
    choose: Choose | None = None,
    size: ChooseSize | None = None,
    shares: Shares | None = None,
    most_slots: int | None = None,
) -> Filling:
    """Fills slot after slot until no sample is left. The result is valid.

    Args:
        first: order without weights.
        ahead: per job, a priority in slots over other jobs (negative: after them), for the whole run. With `shares`,
            slots that it has received too few.
        choose: chooses a part of a batch (None: the subset that fills best).
        size: chooses the capacity of a slot (None: the largest).
        shares: serve jobs by their weights even if these are equal.
        most_slots: stop after this many slots.
    """
    state = _State(problem, ahead or [0.0] * len(problem.jobs), choose or fill_best(problem), shares=shares)
    state.size, state.first = size, first
    filling: Filling = []
    while (state.free or state.waiting) and (most_slots is None or len(filling) < most_slots):
        filling.append(_fill_slot(problem, state, len(filling)))
    return filling


class _State:
    """Progress of each job; changed in place.

    Attributes:
        rank: order of service, smallest first: minus the slots left, or with weights, slots served per weight.
        patience: with `shares`, slots in which the job may be passed over.
        due: with `shares`, the slot in which the job goes first.
        free: sorted entries of jobs that may run.
        waiting: heap of (slot, job): the job may run from that slot on.
        turns: jobs that are still to open, last first.
        num_open: jobs that are open.
    """

    def __init__(self, problem: Problem, ahead: Sequence[float], choose: Choose, *, shares: Shares | None = None):
        self.problem, self.ahead, self.choose, self.shares = problem, ahead, choose, shares
        self.size: ChooseSize | None = None
        self.first: First = "begun"
        self.batch = [0] * len(problem.jobs)
        self.mask = [batches[0].full_mask if batches else 0 for batches in problem.batches]
        self.tokens = [batches[0].total if batches else 0 for batches in problem.batches]
        wait, self.slot_tokens = problem.num_stages - 1, problem.slot_tokens
        slots = [sum(batch.total / self.slot_tokens + wait for batch in batches) for batches in problem.batches]
        self.weighted = problem.weighted or shares is not None
        self.rank = [-slots_left - more for slots_left, more in zip(slots, ahead, strict=True)]
        if self.weighted:
            self.rank = [0.0] * len(slots) if shares is None else [-more for more in ahead]
        self.due = self.patience = [0.0] * len(slots)
        if shares is not None:
            weights = [
                job.weight if batches else 0.0 for job, batches in zip(problem.jobs, problem.batches, strict=True)
            ]
            self.patience = [max(MOST_IDLE, sum(weights) / job.weight) for job in problem.jobs]
            self.due = [wait - idle for wait, idle in zip(self.patience, shares.idle, strict=True)]
        self.free: list[Entry] = []
        self.turns = _turns(problem)
        self.waiting: list[tuple[int, int]] = []
        self.num_open = 0
        self.open(0)

    def open(self, slot: int) -> None:
        """Lets the next jobs run from a slot on, as far as they may be open together."""
        while self.turns and self.num_open != self.problem.most_open:
            job = self.turns.pop()
            self.num_open += 1
            heappush(self.waiting, (max(slot, self.problem.ready[job]), job))

    def add_free(self, job: int, *, begun: bool) -> None:
        rank = self.rank[job]
        if self.first != "begun" and not self.weighted:
            slots = -(-self.tokens[job] // self.slot_tokens) + self.problem.batches[job][self.batch[job]].tail
            insort(self.free, (-slots - self.ahead[job], self.first == "chain" and not begun, job))
        elif self.shares is None:
            insort(self.free, (not begun or self.weighted, rank, job))
        else:
            insort(
                self.free,
                (
                    floor(rank / EQUAL_SLOTS),
                    self.tokens[job] if self.shares.equal == "shortest" else not begun,
                    rank,
                    job,
                ),
            )


def _fill_slot(problem: Problem, state: _State, slot: int) -> tuple[Microbatch, ...]:
    while state.waiting and state.waiting[0][0] <= slot:
        _, job = heappop(state.waiting)
        state.add_free(job, begun=False)
    order = [int(entry[-1]) for entry in state.free]
    if state.shares is not None:
        order = _shared_order(problem, state, state.shares, order, slot)
    before = list(state.tokens)
    tiles = problem.tiles if state.size is None or not order else _size(problem, state, order)
    replicas = tuple(
        fill_microbatch(problem, order, state.batch, state.mask, state.tokens, state.choose, tiles)
        for _ in range(problem.data_parallel)
    )
    jobs = {part[0] for parts in replicas for part in parts}
    for entry in [entry for entry in state.free if entry[-1] in jobs]:
        job = int(entry[-1])
        del state.free[bisect_left(state.free, entry)]
        served = (before[job] - state.tokens[job]) / state.slot_tokens
        state.rank[job] += served / problem.jobs[job].weight if state.weighted else served
        if state.shares is not None:
            state.due[job] = slot + 1 + state.patience[job]
        if state.mask[job]:
            state.add_free(job, begun=True)
        else:
            _next_batch(problem, state, job, slot)
    return replicas


def _shared_order(problem: Problem, state: _State, shares: Shares, order: list[int], slot: int) -> list[int]:
    """The fair order, which is the given one with jobs that are due in front, or another that fills the slot better."""
    due = [job for job in order if state.due[job] <= slot]
    others = [job for job in order if state.due[job] > slot]
    if shares.gain == inf or len(others) < 2:
        return [*due, *others]

    def longest(job: int) -> int:
        return problem.batches[job][state.batch[job]].tokens[state.mask[job].bit_length() - 1]

    def begun(job: int) -> bool:
        return state.mask[job] != problem.batches[job][state.batch[job]].full_mask

    fair, *orders = [
        [*due, *others],
        *([*due, *sorted(others, key=key, reverse=True)] for key in (state.tokens.__getitem__, longest, begun)),
    ]
    left_tokens = {tuple(some): sum(_left_after(problem, state, some, problem.tiles)) for some in (fair, *orders)}
    fullest = min(orders, key=lambda some: left_tokens[tuple(some)])
    tokens = sum(state.tokens)
    return fullest if tokens - left_tokens[tuple(fullest)] > shares.gain * (tokens - left_tokens[tuple(fair)]) else fair


def _left_after(problem: Problem, state: _State, order: Sequence[int], tiles: int) -> list[int]:
    """Tokens of each job that a trial of the next slot leaves."""
    mask, tokens = list(state.mask), list(state.tokens)
    for _ in range(problem.data_parallel):
        fill_microbatch(problem, order, state.batch, mask, tokens, state.choose, tiles)
    return tokens


def _size(problem: Problem, state: _State, order: list[int]) -> int:
    """The tiles of the next slot, after a trial with each capacity."""
    assert state.size is not None

    def left(tiles: int) -> list[int]:
        tokens = _left_after(problem, state, order, tiles)
        return [tokens[job] for job in order]

    alone = len(order) == 1 and not state.waiting
    return state.size(left, [state.tokens[job] for job in order], problem.tile_tokens, alone)


def _next_batch(problem: Problem, state: _State, job: int, slot: int) -> None:
    state.batch[job] += 1
    if not state.weighted:
        state.rank[job] += problem.num_stages - 1
    if state.batch[job] < len(problem.batches[job]):
        batch = problem.batches[job][state.batch[job]]
        state.mask[job], state.tokens[job] = batch.full_mask, batch.total
        heappush(state.waiting, (slot + problem.num_stages, job))
    else:
        state.num_open -= 1
        state.open(slot + 1)


def _turns(problem: Problem) -> list[int]:
    """The jobs to open, last first: those that have begun, then those with the most tokens left."""
    turns: list[tuple[bool, int, int]] = []
    for number, (job, batches) in enumerate(zip(problem.jobs, problem.batches, strict=True)):
        if batches:
            fresh = sum(len(batch.positions) for batch in batches) == job.num_samples
            turns.append((fresh, -sum(batch.total for batch in batches), number))
    return [number for *_, number in sorted(turns, reverse=True)]
