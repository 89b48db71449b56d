"""Beam search over slots: many partial plans side by side, the most promising kept after each slot.

A partial plan is continued by filling the next slot in several orders of the jobs. Its promise is

    slots used + tokens left / tokens of a slot + Σ_jobs exp((end of the job if it runs alone - that sum) / SOFTNESS),

the end that fluid tokens would reach, made worse by jobs whose chain of batches may outlast it. So jobs stagger
themselves: a state in which all wait for their updates at once, or one is left behind, promises less.

Work is limited by a number of evaluations, not by the clock, so the result depends on the inputs alone unless the
deadline cuts in.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from math import exp

from scheduling.packing.fill import Choose, chooser, fill_microbatch, remembering
from scheduling.packing.problem import Filling, Microbatch, Problem

SOFTNESS = 4.0  # slots; 2 and 8 give the same plans on the shared workloads
ORDERS = 9  # continuations of a partial plan
FIRST_WIDTH, LAST_WIDTH = 4, 512
JITTER = 0.02  # slots; breaks ties differently when a width is searched again


@dataclass(slots=True)
class Budget:
    """What a search may still spend; the deadline is a stop, the evaluations are the plan."""

    evaluations: float
    deadline: float

    @property
    def spent(self) -> bool:
        return self.evaluations <= 0 or time.monotonic() >= self.deadline


@dataclass(slots=True)
class _Node:
    """A partial plan: the state after its slots, and how it came about."""

    promise: float
    end: float  # no continuation has fewer slots
    batch: tuple[int, ...]
    mask: tuple[int, ...]
    tokens: tuple[int, ...]
    ready: tuple[int, ...]
    left: int
    parent: _Node | None
    filled: tuple[Microbatch, ...]


def search(problem: Problem, *, incumbent: Filling, bound: int, budget: Budget, seed: int) -> Filling:
    """Improves a plan until it meets the bound or the budget is spent; wider and wider beams."""
    noise = random.Random(seed)
    choose = remembering(chooser(problem))
    best, width, jitter = incumbent, FIRST_WIDTH, 0.0
    while len(best) > bound and not budget.spent:
        before = budget.evaluations
        found = _beam(problem, width, len(best), choose, budget, noise, jitter)
        best = found or best
        cost = max(1.0, (before - budget.evaluations) / width)
        if width >= LAST_WIDTH or budget.evaluations < cost * 2 * FIRST_WIDTH:
            jitter = JITTER
        width = max(FIRST_WIDTH, min(LAST_WIDTH, int(0.9 * budget.evaluations / cost)))
    return best


def _beam(
    problem: Problem, width: int, slots: int, choose: Choose, budget: Budget, noise: random.Random, jitter: float
) -> Filling | None:
    """The best plan with fewer than `slots` slots that this beam finds."""
    level = [_start(problem)]
    for slot in range(slots - 1):
        found: dict[tuple, _Node] = {}
        for node in level:
            if budget.spent:
                return None
            for child in _children(problem, node, slot, choose, budget):
                child.promise += jitter * noise.random() if jitter else 0.0
                key = (child.batch, child.mask, child.ready)
                rival = found.get(key)
                if rival is None or child.promise < rival.promise:
                    found[key] = child
        level = [child for child in found.values() if child.end <= slots - 1]
        level.sort(key=lambda child: child.promise)
        del level[width:]
        finished = next((child for child in level if not child.left), None)
        if finished is not None:
            return _filling(finished)
        if not level:
            return None
    return None


def _start(problem: Problem) -> _Node:
    first = [batches[0] if batches else None for batches in problem.batches]
    return _Node(
        promise=0.0,
        end=0.0,
        batch=(0,) * len(first),
        mask=tuple(batch.full_mask if batch else 0 for batch in first),
        tokens=tuple(batch.total if batch else 0 for batch in first),
        ready=problem.ready,
        left=sum(batch.total for batches in problem.batches for batch in batches),
        parent=None,
        filled=(),
    )


def _children(problem: Problem, node: _Node, slot: int, choose: Choose, budget: Budget):
    free = [job for job, mask in enumerate(node.mask) if mask and node.ready[job] <= slot]
    for order in _orders(problem, node, free):
        budget.evaluations -= 1 + len(node.batch) / 16
        yield _child(problem, node, slot, order, choose)


def _orders(problem: Problem, node: _Node, free: list[int]) -> list[list[int]]:
    """Begun batches first; longest way to go first; shortest rest first; and each of the first few jobs moved to the front."""
    way = {job: _way(problem, job, node.batch[job], node.tokens[job]) for job in free}
    begun = {job: node.mask[job] != problem.batches[job][node.batch[job]].full_mask for job in free}
    by_begun = sorted(free, key=lambda job: (not begun[job], -way[job], -node.tokens[job]))
    by_way = sorted(free, key=lambda job: (-way[job], not begun[job], -node.tokens[job]))
    orders = [by_begun, by_way, sorted(free, key=lambda job: node.tokens[job])]
    for front in by_begun[1:4]:
        orders += [[front, *(job for job in base if job != front)] for base in (by_begun, by_way)]
    if len(free) > 2:
        orders.append([by_begun[0], by_begun[2], by_begun[1], *by_begun[3:]])
    unique: list[list[int]] = []
    for order in orders:
        if order not in unique:
            unique.append(order)
    return unique[:ORDERS]


def _way(problem: Problem, job: int, batch: int, tokens: int) -> int:
    """Fewest slots from the first free one to the end of the job."""
    return max(1, -(-tokens // problem.slot_tokens)) + problem.batches[job][batch].tail


def _child(problem: Problem, node: _Node, slot: int, order: list[int], choose: Choose) -> _Node:
    batch, mask, tokens, ready = list(node.batch), list(node.mask), list(node.tokens), list(node.ready)
    filled = tuple(
        fill_microbatch(problem, order, batch, mask, tokens, choose) for _ in range(problem.data_parallel)
    )
    left = node.left - sum(node.tokens[job] - tokens[job] for job in order)
    for job in order:
        if not mask[job]:
            batch[job] += 1
            ready[job] = slot + problem.num_stages
            if batch[job] < len(problem.batches[job]):
                following = problem.batches[job][batch[job]]
                mask[job], tokens[job] = following.full_mask, following.total
    fluid_end = slot + 1 + left / problem.slot_tokens
    child = _Node(fluid_end, fluid_end, tuple(batch), tuple(mask), tuple(tokens), tuple(ready), left, node, filled)
    _add_lateness(problem, child, slot + 1)
    return child


def _add_lateness(problem: Problem, node: _Node, now: int) -> None:
    """Σ exp((earliest end of the job - S + 1 - end of fluid tokens) / SOFTNESS) over unfinished jobs."""
    due = node.promise + problem.num_stages - 1
    for job, mask in enumerate(node.mask):
        if mask:
            end = max(now, node.ready[job]) + _way(problem, job, node.batch[job], node.tokens[job])
            node.promise += exp((end - due) / SOFTNESS)
            if end > node.end:
                node.end = end


def _filling(node: _Node) -> Filling:
    filling: Filling = []
    while node.parent is not None:
        filling.append(node.filled)
        node = node.parent
    return filling[::-1]
