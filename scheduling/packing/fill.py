"""Fills one microbatch: whole remainders of batches while they fit, then the subset that fills the room best."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache

from scheduling.packing.budget import Budget
from scheduling.packing.problem import Microbatch, Problem, bit_array, bits

# Subset sums of sample lengths as one big integer: bit n is set if some subset has n tokens.

EXACT = 18  # samples searched exactly; 2^18 subsets reach practically any sum


def fullest(tokens: tuple[int, ...], mask: int, room: int) -> tuple[int, int]:
    """Finds the subset of the masked samples that fills `room` best; prefers long samples among equals.

    Returns:
        (mask of the subset, its tokens).
    """
    fitting = mask & low_bits(bisect_right(tokens, room))
    subset, total = 0, 0
    while fitting.bit_count() > EXACT and tokens[bit := fitting.bit_length() - 1] * 4 <= room - total:
        subset, total = subset | 1 << bit, total + tokens[bit]  # many samples: long ones first, then an exact search
        fitting = (fitting ^ 1 << bit) & low_bits(bisect_right(tokens, room - total))
    more, best = _exact([(bit, tokens[bit]) for bit in _spread(fitting)], room - total)
    return subset | more, total + best


def first_fit(tokens: tuple[int, ...], mask: int, room: int) -> tuple[int, int]:
    """Takes the longest masked sample that still fits, again and again.

    Returns:
        (mask of the subset, its tokens).
    """
    subset, total = 0, 0
    while fitting := mask & low_bits(bisect_right(tokens, room - total)):
        bit = fitting.bit_length() - 1
        subset, total, mask = subset | 1 << bit, total + tokens[bit], mask ^ 1 << bit
    return subset, total


def _spread(mask: int) -> list[int]:
    """At most EXACT samples, evenly spaced from short to long, including the longest."""
    if (count := mask.bit_count()) <= EXACT:
        return bits(mask)
    step, samples = (count - 1) / (EXACT - 1), bits(mask) if count < SAMPLES else bit_array(mask)
    return [int(samples[round(i * step)]) for i in range(EXACT)]


def _exact(pending: list[tuple[int, int]], room: int) -> tuple[int, int]:
    reach = [1]
    for _, length in pending:
        reach.append(reach[-1] | reach[-1] << length)
    best = (reach[-1] & low_bits(room + 1)).bit_length() - 1
    subset, room_left = 0, best
    for index in range(len(pending) - 1, -1, -1):
        bit, length = pending[index]
        if length <= room_left and reach[index] >> (room_left - length) & 1:
            subset |= 1 << bit
            room_left -= length
    return subset, best


@lru_cache(maxsize=4096)
def low_bits(count: int) -> int:
    return (1 << count) - 1


Choose = Callable[[int, int, int, int], tuple[int, int]]  # (job, batch, mask, room) -> (chosen mask, tokens)

CHOICE_PRICE = 1.0  # in evaluations of partial plans
SAMPLES = 256  # that raise the price of a choice by one evaluation: it reads all that are left of a batch


def fill_best(problem: Problem) -> Choose:
    """Chooses the subset with the most tokens."""

    def choose(job: int, batch: int, mask: int, room: int) -> tuple[int, int]:
        return fullest(problem.batches[job][batch].tokens, mask, room)

    return choose


def longest_first(problem: Problem) -> Choose:
    """Chooses the longest sample that fits, then the subset that fills the remaining room best."""

    def choose(job: int, batch: int, mask: int, room: int) -> tuple[int, int]:
        tokens = problem.batches[job][batch].tokens
        if not (fitting := mask & low_bits(bisect_right(tokens, room))):
            return 0, 0
        longest = fitting.bit_length() - 1
        others, total = fullest(tokens, mask & ((1 << longest) - 1), room - tokens[longest])
        return others | 1 << longest, total + tokens[longest]

    return choose


def first_fit_decreasing(problem: Problem) -> Choose:
    """Chooses the longest sample that fits, again and again: the best of the three for batches of very many samples."""

    def choose(job: int, batch: int, mask: int, room: int) -> tuple[int, int]:
        return first_fit(problem.batches[job][batch].tokens, mask, room)

    return choose


def charged(choose: Choose, budget: Budget) -> Choose:
    """Takes the price of each choice from a budget."""

    def paid(job: int, batch: int, mask: int, room: int) -> tuple[int, int]:
        budget.evaluations -= CHOICE_PRICE + mask.bit_count() // SAMPLES
        return choose(job, batch, mask, room)

    return paid


def memoised(choose: Choose) -> Choose:
    """Caches the choices; a search repeats many of them."""
    fill_of: dict[tuple[int, ...], tuple[int, int]] = {}

    def cached(*arguments: int) -> tuple[int, int]:
        answer = fill_of.get(arguments)
        if answer is None:
            answer = fill_of[arguments] = choose(*arguments)
        return answer

    return cached


def fill_microbatch(
    problem: Problem,
    order: Sequence[int],
    batch: Sequence[int],
    mask: list[int],
    tokens: list[int],
    choose: Choose,
    tiles: int | None = None,
) -> Microbatch:
    """Takes samples of the jobs in `order` until the microbatch is full; changes `mask` and `tokens` in place.

    Args:
        batch: per job, its current batch.
        mask: per job, the samples of the current batch that are left.
        tokens: per job, tokens of these samples.
        tiles: of the microbatch (None: of the largest capacity).
    """
    tile, tiles = problem.tile_tokens, problem.tiles if tiles is None else tiles
    parts: list[tuple[int, int, int]] = []
    for job in order:
        take, total = mask[job], tokens[job]
        if not take:
            continue
        if -(-total // tile) > tiles:
            shortest = problem.batches[job][batch[job]].tokens[(take & -take).bit_length() - 1]
            if shortest > tiles * tile:
                continue  # fast path: with little room left, most jobs end here
            take, total = choose(job, batch[job], take, tiles * tile)
        if take:
            parts.append((job, batch[job], take))
            mask[job] ^= take
            tokens[job] -= total
            tiles -= -(-total // tile)
            if not tiles:
                break
    return tuple(parts)
