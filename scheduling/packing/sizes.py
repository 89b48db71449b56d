"""Several capacities: fills slots of different sizes for the shortest predicted time.

Candidates are the plan of the largest capacity and greedy passes that choose the capacity of each slot. Afterwards
every slot takes the smallest capacity that holds it (`problem.to_slots`), so the tail of a run costs what it holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from scheduling.packing.budget import Budget
from scheduling.packing.fill import charged, fill_best, longest_first
from scheduling.packing.greedy import greedy
from scheduling.packing.problem import Filling, Problem
from scheduling.packing.restarts import AHEAD

RESTARTS = 4  # orders of the jobs
PASS_PRICE = 2.0  # of one slot of such a pass, in evaluations


class Prices:
    """Predicted seconds of a slot of each capacity.

    Args:
        tiles: of a microbatch of each capacity, ascending.
        seconds: of each.
        replicas: microbatches of a slot.
    """

    def __init__(self, tiles: Sequence[int], seconds: Sequence[float], replicas: int):
        self.tiles, self.seconds, self._replicas = tuple(tiles), tuple(seconds), replicas
        self._known = [0.0]

    def cover(self, tiles: int) -> float:
        """Least seconds of slots that together have room for that many tiles."""
        most = self.tiles[-1] * self._replicas
        full_slots = max(0, tiles // most - 1)  # of many tiles, all but the last ones go into the largest slots
        return full_slots * self.seconds[-1] + self._cover(tiles - full_slots * most)

    def _cover(self, tiles: int) -> float:
        for count in range(len(self._known), tiles + 1):
            ends = (self._known[max(0, count - size * self._replicas)] for size in self.tiles)
            self._known.append(min(slot_s + end_s for slot_s, end_s in zip(self.seconds, ends, strict=True)))
        return self._known[max(0, tiles)]


class SizeChoice:
    """Chooses the capacity of a slot from what each would hold.

    Several jobs: fewest seconds per token, as later slots can be filled as well. A job that is left on its own cannot
    mix its batches: fewest seconds for the slot and the rest of the batch.

    Args:
        most: index of the largest capacity that is taken by choice; larger ones only hold what fits nowhere else.
    """

    def __init__(self, prices: Prices, most: int):
        self._prices, self._most = prices, most

    def __call__(self, tokens: Callable[[int], list[int]], before: Sequence[int], tile: int, alone: bool) -> int:
        """Returns the tiles of the slot.

        Args:
            tokens: tiles of a capacity → tokens of each job that would be left.
            before: tokens of each job that are left now, of its current batch.
            alone: a single job is left.
        """
        prices, best = self._prices, (float("inf"), 0)
        for index, tiles in enumerate(prices.tiles):
            if index > self._most and best[1]:
                break
            left_tokens = tokens(tiles)
            placed_tokens = sum(before) - sum(left_tokens)
            if not placed_tokens:
                continue
            left_tiles = sum(-(-count // tile) for count in left_tokens) if alone else 0
            score = prices.seconds[index] + prices.cover(left_tiles) if alone else prices.seconds[index] / placed_tokens
            best = min(best, (score, tiles))
        return best[1]


def candidates(problem: Problem, prices: Prices, budget: Budget, seed: int) -> Iterator[Filling]:
    """Yields fillings by greedy passes: in several orders of the jobs, each capacity in turn the largest to prefer.

    The first one is free, so there always is one.
    """
    choosers = [charged(choose(problem), budget) for choose in (fill_best, longest_first)]
    kinds = [(most, choose) for choose in choosers for most in reversed(range(len(prices.tiles)))]
    turns = len(kinds) * (1 if problem.weighted or len(problem.jobs) == 1 else RESTARTS)
    noise, length = random.Random(seed), 0
    for turn in range(turns):
        price = PASS_PRICE * len(prices.tiles) * (len(problem.jobs) + 16) / 20 * length
        if turn and budget.evaluations < price:
            return
        budget.evaluations -= price
        most, choose = kinds[turn % len(kinds)]
        shift = 0.0 if turn < len(kinds) else AHEAD[turn // len(kinds) % len(AHEAD)] * length
        ahead = [noise.uniform(-shift, shift) for _ in problem.jobs]
        filling = greedy(problem, ahead=ahead, choose=choose, size=SizeChoice(prices, most))
        length = max(length, len(filling))
        yield filling
