"""Beam search over slots: extends many partial plans by one slot at a time and keeps the best.

A partial plan is extended by filling the next slot in several orders of the jobs. Its score (smaller is better) is

    slots used + tokens left / tokens of a slot
    + Σ_jobs 2^((end of the job if it runs alone - that sum) / DOUBLES) - LONG · Σ_placed samples (length / room)²,

where 2^x is linear between whole x: every operation is exact to IEEE 754, so no processor or C library has another
score. The first sum is the end if samples could be split freely. Jobs whose chain of batches may take longer raise the
score; long samples that are already placed lower it, because they are hard to place later. So jobs become staggered:
states in which all jobs wait for their updates at once, or in which one job lags, score worse.

Work is limited by a number of evaluations instead of time, so the result depends only on the inputs.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import permutations, product
from math import floor, ldexp

from scheduling.packing.budget import Budget
from scheduling.packing.fill import SAMPLES, charged, fill_best, fill_microbatch, longest_first, memoised
from scheduling.packing.problem import Filling, Microbatch, Part, Problem, bits

DOUBLES = 2.75  # slots of delay that double the penalty of a job; results are not sensitive to it
MOST_DOUBLINGS = 1000  # keeps the penalty finite
LONG = 0.1  # in slots; 0 and 1 are both slightly worse
FIRST_WIDTH, LAST_WIDTH = 4, 512
JITTER = 0.02  # in slots; breaks ties differently when a width is searched again


@dataclass(slots=True)
class _Node:
    """A partial plan: the state after its slots, with a link to its parent.

    Args:
        end: lower bound on the slots of any continuation.
        way: per job, minimum number of slots from its first free slot to its end; 0 when it is done.
        left: remaining tokens of all jobs.
        placed: Σ (length / room)² of the samples in the slots.
    """

    score: float
    end: float
    batch: tuple[int, ...]
    mask: tuple[int, ...]
    tokens: tuple[int, ...]
    ready: tuple[int, ...]
    way: tuple[int, ...]
    left: int
    placed: float
    parent: _Node | None
    filled: tuple[Microbatch, ...]


def search(problem: Problem, *, incumbent: Filling, bound: int, budget: Budget, seed: int) -> Filling:
    """Improves a plan until it reaches the bound or the budget is spent: a narrow beam first, then wider ones."""
    beam = _Beam(problem, budget, seed)
    best, width = incumbent, FIRST_WIDTH
    batches = [batch for batches in problem.batches for batch in batches]
    reading = sum(len(batch.tokens) for batch in batches) / len(batches) / 2 / SAMPLES  # a choice from half a batch
    if budget.evaluations < 2 * FIRST_WIDTH * (beam.price + reading) * len(best):  # two children per partial plan
        return best
    while len(best) > bound and not budget.spent:
        better = beam.run(width, len(best))
        if better is None and not beam.cut:  # nothing was pruned, so a wider beam finds the same
            if beam.thorough:
                break
            beam.thorough = True
        best = better or best
        beam.jitter = JITTER if width == LAST_WIDTH else 0.0
        width = LAST_WIDTH
    return best


class _Beam:
    """The search and its tables. Cached subset choices are shared by all widths."""

    def __init__(self, problem: Problem, budget: Budget, seed: int):
        self.problem, self.budget = problem, budget
        self.choosers = [memoised(charged(choose(problem), budget)) for choose in (fill_best, longest_first)]
        self.squares: dict[Part, float] = {}
        self.noise = random.Random(seed)
        self.jitter, self.cut, self.thorough = 0.0, False, False
        self.slot_tokens = problem.slot_tokens
        self.price = (1 + len(problem.jobs) / 16) * (3 + problem.data_parallel) / 4  # of a child

    def run(self, width: int, slots: int) -> Filling | None:
        """Returns the best plan with fewer than `slots` slots that the beam finds within the budget."""
        level, self.cut = [self._root()], False
        for slot in range(slots - 1):
            before = self.budget.evaluations
            children: dict[tuple[tuple[int, ...], ...], _Node] = {}
            for node in level:
                for child in self._children(node, slot):
                    key = (child.batch, child.mask, child.ready)
                    rival = children.get(key)
                    if rival is None or child.score < rival.score:
                        children[key] = child
            cost = (before - self.budget.evaluations) / len(level)
            affordable = max(1, int(self.budget.evaluations / cost / (slots - slot)))
            level = sorted((child for child in children.values() if child.end <= slots - 1), key=_score)
            self.cut |= len(level) > min(width, affordable)
            del level[min(width, affordable) :]
            if not level:
                return None
            leaf = next((child for child in level if not child.left), None)
            if leaf is not None:
                return _filling(leaf)
        return None

    def _root(self) -> _Node:
        first = [batches[0] if batches else None for batches in self.problem.batches]
        return _Node(
            score=0.0,
            end=0.0,
            batch=(0,) * len(first),
            mask=tuple(batch.full_mask if batch else 0 for batch in first),
            tokens=tuple(batch.total if batch else 0 for batch in first),
            ready=self.problem.ready,
            way=tuple(batch.slots + batch.tail if batch else 0 for batch in first),
            left=sum(batch.total for batches in self.problem.batches for batch in batches),
            placed=0.0,
            parent=None,
            filled=(),
        )

    def _children(self, node: _Node, slot: int) -> Iterator[_Node]:
        free = [job for job, mask in enumerate(node.mask) if mask and node.ready[job] <= slot]
        states: set[Hashable] = set()
        orders = self._orders(node, free)
        for order, choose in product(orders, self.choosers):
            mask, tokens = list(node.mask), list(node.tokens)
            fillings = tuple(
                fill_microbatch(self.problem, order, node.batch, mask, tokens, choose)
                for _ in range(self.problem.data_parallel)
            )
            fills = frozenset(fillings[0]) if len(fillings) == 1 else fillings
            if fills not in states:
                states.add(fills)
                self.budget.evaluations -= self.price
                yield self._child(node, slot, fillings, mask, tokens)

    def _orders(self, node: _Node, free: list[int]) -> list[list[int]]:
        """Orders to try: batches in progress, longest way, shortest rest, or one of the first few jobs first."""
        way, tokens, batches = node.way, node.tokens, self.problem.batches
        begun_jobs = [job for job in free if node.mask[job] != batches[job][node.batch[job]].full_mask]
        by_way = sorted(free, key=lambda job: (-way[job], job not in begun_jobs, -tokens[job]))
        by_begun = sorted(by_way, key=lambda job: job not in begun_jobs)
        orders = [by_begun]
        if self.thorough:
            return [[*front, *by_begun[4:]] for front in permutations(by_begun[:4])] + [
                [job for job in by_begun if job != idle] for idle in by_begun
            ]
        if len(free) > 1:
            orders += [by_way, sorted(free, key=tokens.__getitem__)]
        for front in by_begun[1:4]:
            orders += [[front, *(job for job in base if job != front)] for base in (by_begun, by_way)]
        if len(free) > 2:
            orders.append([by_begun[0], by_begun[2], by_begun[1], *by_begun[3:]])
        return orders

    def _child(
        self, node: _Node, slot: int, filled: tuple[Microbatch, ...], mask: list[int], tokens: list[int]
    ) -> _Node:
        batch, ready, way, tokens_left = list(node.batch), list(node.ready), list(node.way), node.left
        for job in {part[0] for parts in filled for part in parts}:
            tokens_left -= node.tokens[job] - tokens[job]
            batches, current = self.problem.batches[job], batch[job]
            if mask[job]:
                way[job] = -(-tokens[job] // self.slot_tokens) + batches[current].tail
                continue
            batch[job] = current = current + 1
            ready[job] = slot + self.problem.num_stages
            way[job] = 0
            if current < len(batches):
                following = batches[current]
                mask[job], tokens[job] = following.full_mask, following.total
                way[job] = following.slots + following.tail
        score, end = self._score(slot + 1, tokens_left, mask, ready, way)
        squares = node.placed + sum(self._squares(part) for parts in filled for part in parts)
        return _Node(
            score=score - LONG * squares,
            end=end,
            batch=tuple(batch),
            mask=tuple(mask),
            tokens=tuple(tokens),
            ready=tuple(ready),
            way=tuple(way),
            left=tokens_left,
            placed=squares,
            parent=node,
            filled=filled,
        )

    def _squares(self, part: Part) -> float:
        squares = self.squares.get(part)
        if squares is None:
            job, batch, mask = part
            tokens, room = self.problem.batches[job][batch].tokens, self.problem.tiles * self.problem.tile_tokens
            squares = self.squares[part] = sum((tokens[bit] / room) ** 2 for bit in bits(mask))
        return squares

    def _score(
        self, now: int, tokens_left: int, mask: list[int], ready: list[int], way: list[int]
    ) -> tuple[float, float]:
        """The score (see the module docstring), and a lower bound on the slots."""
        score = end = now + tokens_left / self.slot_tokens
        due = end + self.problem.num_stages - 1
        for job, job_mask in enumerate(mask):
            if job_mask:
                alone = (ready[job] if ready[job] > now else now) + way[job]
                score += _power_of_two((alone - due) / DOUBLES)
                if alone > end:
                    end = alone
        return score + self.jitter * self.noise.random() if self.jitter else score, end


def _power_of_two(exponent: float) -> float:
    """2^x at whole x, and the straight line between them."""
    doublings = min(floor(exponent), MOST_DOUBLINGS)
    return ldexp(1.0 + exponent - doublings, doublings)


def _score(node: _Node) -> float:
    return node.score


def _filling(node: _Node) -> Filling:
    filling: Filling = []
    while node.parent is not None:
        filling.append(node.filled)
        node = node.parent
    return filling[::-1]
