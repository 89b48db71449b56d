"""Filling with slots of several capacities, for the shortest predicted time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from scheduling.bounds import bound_of_rest
from scheduling.cost_model import CostModel
from scheduling.packing.balance_tokens import balance_tokens
from scheduling.packing.budget import Budget
from scheduling.packing.problem import Filling, Problem, make_problem, to_plan
from scheduling.packing.restarts import first_filling, restart
from scheduling.packing.search import search
from scheduling.packing.sizes import Prices, candidates
from scheduling.simulate import simulate


def fill_sizes(problem: Problem, left: Sequence[np.ndarray], budget: Budget, seed: int, costs: CostModel) -> Filling:
    """Returns the filling with the shortest predicted time that it finds within the budget.

    It compares the shortest filling of the best single capacity with fillings that choose the capacity of each slot. In
    all of them each slot takes the smallest capacity that holds it.

    Args:
        left: per job, the positions of its stream that `problem` covers.
    """
    singles = [_with_capacity(problem, size, left) for size in _sizes_for_all(problem)]
    first = [(*first_filling(single, 0), single) for single in singles]
    first += [(balance_tokens(single, filling), by_chain, single) for filling, by_chain, single in first]
    timed = [(_predicted_s(problem, candidate[0], costs), *candidate) for candidate in first]
    best_s, best, by_chain, single = min(timed, key=lambda candidate: candidate[0])
    start = best
    for filling in chain(
        candidates(problem, _slot_prices(problem, costs), _take_half(budget), seed),
        () if problem.weighted else _fewest_slots(single, start, by_chain, left, budget, seed),
    ):
        seconds = _predicted_s(problem, filling, costs)
        if seconds < best_s:
            best, best_s = filling, seconds
    return best


def _take_half(budget: Budget) -> Budget:
    """Takes half of what is left of a budget."""
    budget.evaluations /= 2
    return Budget(budget.evaluations)


def _fewest_slots(
    single: Problem, incumbent: Filling, by_chain: bool, left: Sequence[np.ndarray], budget: Budget, seed: int
) -> Iterator[Filling]:
    """Yields the filling of one capacity with the fewest slots, and the same with tokens balanced."""
    bound = bound_of_rest(single.jobs, left, single.ready, single.limits)
    filling = restart(single, incumbent=incumbent, by_chain=by_chain, bound=bound, budget=budget, seed=seed)
    filling = search(single, incumbent=filling, bound=bound, budget=budget, seed=seed)
    yield from (filling, balance_tokens(single, filling))


def _sizes_for_all(problem: Problem) -> list[int]:
    """Capacities that hold every sample."""
    longest = max(batch.tokens[-1] for batches in problem.batches for batch in batches)
    tile = problem.tile_tokens
    return [size for size in problem.limits.sizes if longest <= size // tile * tile]


def _with_capacity(problem: Problem, size: int, left: Sequence[np.ndarray]) -> Problem:
    """The same problem for one capacity. Its fillings are fillings of the problem."""
    limits = replace(problem.limits, capacity_tokens=size, smaller=())
    return make_problem(problem.jobs, limits, left=[positions.tolist() for positions in left], ready=problem.ready)


def _slot_prices(problem: Problem, costs: CostModel) -> Prices:
    """Seconds of a slot of each capacity on the slowest stage, with samples as long as those of the jobs."""
    lengths = np.concatenate([np.asarray(job.sample_tokens, np.float64) for job in problem.jobs])
    length = float(np.square(lengths).sum() / lengths.sum())  # Σ length² of a token

    def seconds(tokens: int) -> float:
        stages = [costs.stage(stage) for stage in range(problem.num_stages)]
        return max(sum(cost.seconds(tokens, tokens * length) for cost in (s.forward, s.backward)) for s in stages)

    return Prices(problem.sizes, [seconds(size) for size in problem.limits.sizes], problem.data_parallel)


def _predicted_s(problem: Problem, filling: Filling, costs: CostModel) -> float:
    return simulate(to_plan(problem, filling), costs).duration_s
