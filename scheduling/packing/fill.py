"""Fills one microbatch: whole remainders of batches while they fit, then the subset that fills the room best."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduling.packing.budget import Budget
from scheduling.packing.problem import Microbatch, Problem, bits
from scheduling.packing.subsets import first_fit, fullest

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
        longest = next((bit for bit in reversed(bits(mask)) if tokens[bit] <= room), None)
        if longest is None:
            return 0, 0
        others, taken = fullest(tokens, mask & ((1 << longest) - 1), room - tokens[longest])
        return others | 1 << longest, taken + tokens[longest]

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
    known: dict[tuple[int, ...], tuple[int, int]] = {}

    def cached(*arguments: int) -> tuple[int, int]:
        answer = known.get(arguments)
        if answer is None:
            answer = known[arguments] = choose(*arguments)
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
        take, taken = mask[job], tokens[job]
        if not take:
            continue
        if -(-taken // tile) > tiles:
            shortest = problem.batches[job][batch[job]].tokens[(take & -take).bit_length() - 1]
            if shortest > tiles * tile:
                continue  # fast path: with little room left, most jobs end here
            take, taken = choose(job, batch[job], take, tiles * tile)
        if take:
            parts.append((job, batch[job], take))
            mask[job] ^= take
            tokens[job] -= taken
            tiles -= -(-taken // tile)
            if not tiles:
                break
    return tuple(parts)
