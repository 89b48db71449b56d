"""Balances attention work: exchanges samples between microbatches until their sums of squared lengths are similar.

Replicas wait for the slowest replica of a slot, and stages wait when one slot takes longer than the next. Microbatches
of one capacity have equal shapes, so they differ only in attention, whose work grows with Σ length².
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from scheduling.packing.bins import Bins, Key, Place
from scheduling.packing.budget import Budget
from scheduling.packing.problem import Filling, Problem, bits

MOST_SAMPLES = 12  # samples of a microbatch that are considered, evenly spaced from short to long
MOST_MOVED = 3  # samples that move at once; four take twice as long without a better result
TRIES = 32  # exchanges whose tiles are checked
WORTH = 0.01  # minimum share of the squared difference that an exchange must remove
PASSES = 4  # later passes move few samples
# In evaluations of partial plans: of a pair, of one of its exchanges, and of a check of tiles.
PRICE, EXCHANGE_PRICE, TRY_PRICE = 8, 1 / 2000, 0.5


def balance_work(problem: Problem, filling: Filling, budget: Budget) -> Filling:
    """Exchanges samples between the replicas of a slot, and between nearby slots of a pipeline.

    The filling stays valid: samples stay in slots where their batch may run, microbatches stay within capacity, and
    none becomes empty. With one stage and one replica nothing waits, and the filling is returned unchanged.
    """
    if not problem.waits or budget.spent:
        return filling
    bins = Bins(problem, filling)
    work = {at: _squares(problem, parts) for at, parts in bins.parts.items()}
    for number in range(PASSES):
        changed = False
        for first, other in _pairs(problem, bins.shape, work, all_replicas=number > 0):
            if budget.spent:
                return bins.filling()
            heavy, light = (first, other) if work[first] >= work[other] else (other, first)
            changed |= _exchange(bins, work, heavy, light, budget)
        if not changed:
            break
    return bins.filling()


class _Movable(NamedTuple):
    """Samples of one microbatch that may move to another one."""

    keys: list[Key]
    bits: list[int]
    tokens: np.ndarray

    @staticmethod
    def of(bins: Bins, source: Place, target: Place) -> _Movable:
        batches = bins.problem.batches
        movable = [
            (batches[key[0]][key[1]].tokens[bit], key, bit)
            for key, mask in bins.parts[source].items()
            if source[0] == target[0] or bins.may_run(key, target[0])
            for bit in bits(mask)
        ]
        movable.sort()
        if len(movable) > MOST_SAMPLES:
            step = (len(movable) - 1) / (MOST_SAMPLES - 1)
            movable = [movable[round(number * step)] for number in range(MOST_SAMPLES)]
        tokens = np.array([length for length, *_ in movable], np.int64)
        return _Movable([key for _, key, _ in movable], [bit for *_, bit in movable], tokens)


def _squares(problem: Problem, parts: dict[Key, int]) -> int:
    batches = problem.batches
    return sum(batches[job][batch].tokens[bit] ** 2 for (job, batch), mask in parts.items() for bit in bits(mask))


def _pairs(
    problem: Problem, shape: tuple[int, int], work: dict[Place, int], *, all_replicas: bool
) -> Iterator[tuple[Place, Place]]:
    """Pairs of microbatches to balance, heaviest slots first.

    Within a slot: its heaviest and lightest replicas in turn, or all pairs. Then the heaviest of a slot with the
    lightest of nearby slots, and the reverse.

    Empty slots stay empty, because they cost nothing. With weights, samples stay in their slot, which is a job's share;
    where few jobs are open, too, which they are in their slots.
    """
    slots, replicas = shape
    stays = problem.num_stages == 1 or problem.weighted or problem.most_open is not None
    near = 0 if stays else 2 * problem.num_stages
    places = [[(slot, replica) for replica in range(replicas)] for slot in range(slots)]
    has_work = [any(work[at] for at in slot_places) for slot_places in places]
    for slot in sorted(range(slots), key=lambda slot: (-max(work[at] for at in places[slot]), slot)):
        slot_places = places[slot]
        if all_replicas:
            yield from combinations(slot_places, 2)
        else:
            for _ in range(replicas - 1):
                yield max(slot_places, key=work.__getitem__), min(slot_places, key=work.__getitem__)
        later = range(slot + 1, min(slots, slot + near + 1)) if has_work[slot] else ()
        for later_places in [places[other] for other in later if has_work[other]]:
            yield max(slot_places, key=work.__getitem__), min(later_places, key=work.__getitem__)
            if replicas > 1:
                yield min(slot_places, key=work.__getitem__), max(later_places, key=work.__getitem__)


def _exchange(bins: Bins, work: dict[Place, int], heavy: Place, light: Place, budget: Budget) -> bool:
    """Makes the exchange that brings the work of two microbatches closest together, if it is worth it.

    Moving d of the difference g changes the sum of squares of their work by 2 d (d - g).
    """
    gap = work[heavy] - work[light]
    of_heavy, of_light = _Movable.of(bins, heavy, light), _Movable.of(bins, light, heavy)
    if not gap or not (len(of_heavy.bits) or len(of_light.bits)):
        return False
    (goes, out), (comes, back) = _subsets(len(of_heavy.bits)), _subsets(len(of_light.bits))
    budget.evaluations -= PRICE + EXCHANGE_PRICE * len(goes) * len(comes)
    work_moved = (out @ of_heavy.tokens**2)[:, None] - back @ of_light.tokens**2
    tokens = (out @ of_heavy.tokens)[:, None] - back @ of_light.tokens
    room = {at: bins.tiles[at[0]] * bins.problem.tile_tokens - bins.load[at] for at in (heavy, light)}
    fits = (tokens <= room[light]) & (-tokens <= room[heavy])
    change = np.where(fits, work_moved * (work_moved - float(gap)), 0).ravel()  # length⁴ can overflow int64
    worth = np.flatnonzero(change <= -WORTH * gap * gap)
    best = worth[np.argsort(change[worth], kind="stable")[:TRIES]]
    heavy_tokens, light_tokens = bins.tokens_of(heavy), bins.tokens_of(light)
    for flat_index in map(int, best):
        budget.evaluations -= TRY_PRICE
        row, column = divmod(flat_index, len(comes))
        go = [(of_heavy.keys[at], int(of_heavy.tokens[at])) for at in goes[row]]
        come = [(of_light.keys[at], int(of_light.tokens[at])) for at in comes[column]]
        if _has_room(bins, heavy, heavy_tokens, come, go) and _has_room(bins, light, light_tokens, go, come):
            for at in goes[row]:
                bins.move(of_heavy.keys[at], of_heavy.bits[at], heavy, light)
            for at in comes[column]:
                bins.move(of_light.keys[at], of_light.bits[at], light, heavy)
            work[heavy] -= int(work_moved[row, column])
            work[light] += int(work_moved[row, column])
            return True
    return False


def _has_room(
    bins: Bins, at: Place, before: dict[Key, int], come: list[tuple[Key, int]], gone: list[tuple[Key, int]]
) -> bool:
    """Whether a microbatch has enough tiles after the exchange and does not become empty."""
    tokens = dict(before)
    for key, count in come:
        tokens[key] = tokens.get(key, 0) + count
    for key, count in gone:
        tokens[key] -= count
    tiles = 0
    for count in tokens.values():
        tiles -= -count // bins.problem.tile_tokens
    return 0 < tiles <= bins.tiles[at[0]]


@lru_cache(maxsize=64)
def _subsets(count: int) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Subsets of at most MOST_MOVED of `count` samples, and the same as a 0/1 array [subsets, count]."""
    subsets = [places for size in range(MOST_MOVED + 1) for places in combinations(range(count), size)]
    table = np.zeros((len(subsets), count), np.int64)
    for row, places in enumerate(subsets):
        table[row, list(places)] = 1
    return subsets, table
