"""Restarts of the greedy pass with random priorities of jobs.

They are cheap, and better than a beam search in deep pipelines, where jobs run in lockstep because of the distance
between batches: the order within a round decides which job ends last, and a beam search sees that too late.
"""

from __future__ import annotations

import random

from scheduling.packing.budget import Budget
from scheduling.packing.fill import charged, fill_best, longest_first
from scheduling.packing.greedy import greedy
from scheduling.packing.problem import Filling, Problem

RESTARTS = 24
AHEAD = (0.05, 0.05, 0.05, 0.3)  # largest priority as a share of the slots, used in turn
PASS_PRICE = 0.7  # of one slot of a greedy pass, in evaluations, besides its choices


def restart(problem: Problem, *, incumbent: Filling, bound: int, budget: Budget, seed: int) -> Filling:
    """Improves a plan by greedy passes with random priorities; uses at most half of the budget."""
    best, noise = incumbent, random.Random(seed)
    choosers = [charged(choose(problem), budget) for choose in (fill_best, longest_first)]
    spent = 0.0  # by the last pass
    for index in range(RESTARTS):
        price = PASS_PRICE * (len(problem.jobs) + 16) / 20 * len(best)
        if len(best) <= bound or budget.evaluations < 2 * RESTARTS * max(price, spent):
            break
        before = budget.evaluations
        budget.evaluations -= price
        shift = AHEAD[index // 2 % len(AHEAD)] * len(best)
        ahead = [noise.uniform(-shift, shift) for _ in problem.jobs]
        filling = greedy(problem, ahead=ahead, choose=choosers[index % 2])
        best = filling if len(filling) < len(best) else best
        spent = before - budget.evaluations
    return best
