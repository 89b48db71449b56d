"""One-pass plans with some jobs put ahead of others.

Cheap, and better than a beam where jobs run in step because their updates take long (deep pipelines): who goes first in
a round decides who is last at the end, and a beam sees that too late.
"""

from __future__ import annotations

import random

from scheduling.packing.budget import Budget
from scheduling.packing.fill import fill_best, longest_first
from scheduling.packing.greedy import greedy
from scheduling.packing.problem import Filling, Problem

RESTARTS = 24
AHEAD = (0.05, 0.05, 0.05, 0.3)  # largest shift as a part of the slots, in turn
PASS_PRICE = 0.7  # of a slot in one pass, in evaluations


def restart(problem: Problem, *, incumbent: Filling, bound: int, budget: Budget, seed: int) -> Filling:
    """Improves a plan by one-pass plans, each with other jobs ahead, for at most half of the budget."""
    best, noise = incumbent, random.Random(seed)
    choosers = (fill_best(problem), longest_first(problem))
    for index in range(RESTARTS):
        price = PASS_PRICE * (len(problem.jobs) + 16) / 20 * len(best)
        if len(best) <= bound or budget.late or budget.evaluations < 2 * RESTARTS * price:
            break
        budget.evaluations -= price
        shift = AHEAD[index // 2 % len(AHEAD)] * len(best)
        ahead = [noise.uniform(-shift, shift) for _ in problem.jobs]
        found = greedy(problem, ahead=ahead, choose=choosers[index % 2])
        best = found if len(found) < len(best) else best
    return best
