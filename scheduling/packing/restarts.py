"""Greedy passes of other kinds, and with random priorities of jobs.

They are cheap, and better than a beam search in deep pipelines, where jobs run in lockstep because of the distance
between batches: the order within a round decides which job ends last, and a beam search sees that too late.
"""

from __future__ import annotations

import random

from scheduling.packing.budget import Budget
from scheduling.packing.fill import charged, fill_best, first_fit_decreasing, longest_first
from scheduling.packing.greedy import First, greedy
from scheduling.packing.problem import Filling, Problem

RESTARTS, CHAIN_RESTARTS = 24, 8
AHEAD = (0.05, 0.05, 0.05, 0.3)  # largest priority as a share of the slots, used in turn
PASS_PRICE = 0.7  # of one slot of a greedy pass, in evaluations, besides its choices


def first_filling(problem: Problem, bound: int) -> tuple[Filling, bool]:
    """The shorter of two greedy passes, and whether it is the second: longest chain first, first-fit decreasing."""
    filling = greedy(problem)
    if len(filling) <= bound or problem.weighted:
        return filling, False
    by_chain = greedy(problem, first="list", choose=first_fit_decreasing(problem))
    return (by_chain, True) if len(by_chain) < len(filling) else (filling, False)


def restart(problem: Problem, *, incumbent: Filling, by_chain: bool, bound: int, budget: Budget, seed: int) -> Filling:
    """Improves a plan by greedy passes with random priorities; uses at most half of the budget.

    Args:
        by_chain: also try passes with the longest chain first.
    """
    best, noise = incumbent, random.Random(seed)
    choosers = [charged(choose(problem), budget) for choose in (fill_best, longest_first)]
    counts: tuple[tuple[First, int], ...] = (("begun", RESTARTS), ("chain", CHAIN_RESTARTS if by_chain else 0))
    turns: list[tuple[First, int]] = [(first, index) for first, count in counts for index in range(count)]
    spent = 0.0  # by the last pass
    for first, index in turns:
        price = PASS_PRICE * (len(problem.jobs) + 16) / 20 * len(best)
        if len(best) <= bound or budget.evaluations < 2 * RESTARTS * max(price, spent):
            break
        before = budget.evaluations
        budget.evaluations -= price
        shift = AHEAD[index // 2 % len(AHEAD)] * len(best)
        ahead = [noise.uniform(-shift, shift) for _ in problem.jobs]
        filling = greedy(problem, first=first, ahead=ahead, choose=choosers[index % 2])
        best = filling if len(filling) < len(best) else best
        spent = before - budget.evaluations
    return best
