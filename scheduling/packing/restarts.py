"""Greedy passes of other kinds, and with random priorities of jobs.

They are cheap, and better than a beam search in deep pipelines, where jobs run in lockstep because of the distance
between batches: the order within a round decides which job ends last, and a beam search sees that too late.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from operator import itemgetter

from scheduling.packing.budget import Budget
from scheduling.packing.fill import charged, fill_best, first_fit_decreasing, longest_first, memoised
from scheduling.packing.greedy import Equal, First, Shares, greedy
from scheduling.packing.problem import Filling, Problem, tokens_per_slot

RESTARTS, CHAIN_RESTARTS = 24, 8
EQUAL: tuple[Equal, ...] = ("begun", "shortest")
GAINS = (inf, 1.5, 1.1)  # of a slot, for leaving the fair order; the fairest first
NEARLY = 0.95  # of the tokens of the fullest filling: a fairer one with as many is taken
AHEAD = (0.05, 0.05, 0.05, 0.3)  # largest priority as a share of the slots, used in turn
PASS_PRICE = 0.7  # of one slot of a greedy pass, in evaluations, besides its choices


def fill_in_shares(
    problem: Problem,
    *,
    ahead: Sequence[float],
    idle: Sequence[int],
    most_slots: int | None = None,
    strict: Filling | None = None,
) -> Filling:
    """Returns the fairest of several greedy passes by weights that holds nearly as many tokens a slot as the fullest.

    Args:
        ahead, idle, most_slots: as those of `greedy` and its shares.
        strict: a filling that is fairer than all of them.
    """
    choose = memoised(fill_best(problem))
    fillings: list[tuple[float, Filling]] = [] if strict is None else [(tokens_per_slot(problem, strict), strict)]
    for gain in GAINS:
        if fillings and fillings[-1][0] >= NEARLY * problem.slot_tokens:
            break
        passes: list[tuple[float, Filling]] = []
        for equal in EQUAL:
            shares = Shares(equal=equal, gain=gain, idle=idle)
            filling = greedy(problem, ahead=ahead, choose=choose, shares=shares, most_slots=most_slots)
            passes.append((tokens_per_slot(problem, filling), filling))
        fillings.append(max(passes, key=itemgetter(0)))
    least = NEARLY * max(tokens for tokens, _ in fillings)
    return next(filling for tokens, filling in fillings if tokens >= least)


def first_filling(problem: Problem, bound: int) -> tuple[Filling, bool]:
    """The shorter of two greedy passes, and whether it is the second: longest chain first, first-fit decreasing.

    With weights the fairest pass: jobs in the order of their shares, unless another one is much shorter.
    """
    filling = greedy(problem)
    if problem.weighted:
        nobody = [0] * len(problem.jobs)
        return fill_in_shares(problem, ahead=nobody, idle=nobody, strict=filling), False
    if len(filling) <= bound:
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
