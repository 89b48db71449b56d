"""Balances tokens: moves samples from full microbatches to emptier ones. The number of slots stays the same."""

from __future__ import annotations

from scheduling.packing.bins import Bins
from scheduling.packing.problem import Filling, Problem, bits

LIGHT = 0.85  # of the mean load; microbatches below it receive samples


def balance_tokens(problem: Problem, filling: Filling) -> Filling:
    """Moves samples to light microbatches where their batch may run. The filling stays valid."""
    bins = Bins(problem, filling)
    loads = [load for load in bins.load.values() if load]
    limit = LIGHT * sum(loads) / max(1, len(loads))
    light = sorted((load, at) for at, load in bins.load.items() if 0 < load < limit)
    for _, at in light:
        _top_up(bins, at)
    return bins.filling()


def _top_up(bins: Bins, target: tuple[int, int]) -> None:
    """Moves samples here while that brings the two loads closer together."""
    moved = True
    while moved:
        moved = False
        for key, bit, source in _candidates(bins, target):
            length = bins.problem.batches[key[0]][key[1]].tokens[bit]
            if bins.load[source] - length > bins.load[target] and length <= bins.room_for(target, key):
                bins.move(key, bit, source, target)
                moved = True
                break


def _candidates(bins: Bins, target: tuple[int, int]) -> list[tuple[tuple[int, int], int, tuple[int, int]]]:
    """Samples of heavier microbatches nearby that may run here; heaviest microbatch and longest sample first."""
    slot, near = target[0], 2 * bins.problem.num_stages
    slot_batches = set(bins.parts[slot, 0]).union(*(bins.parts[slot, replica] for replica in range(bins.shape[1])))
    batch_here = dict(slot_batches)
    sources = [
        (other, replica)
        for other in range(max(0, slot - near), min(bins.shape[0], slot + near + 1))
        for replica in range(bins.shape[1])
        if bins.load[other, replica] > bins.load[target]
    ]
    sources.sort(key=lambda at: (-bins.load[at], at))
    return [
        (key, bit, source)
        for source in sources
        for key, mask in bins.parts[source].items()
        if batch_here.get(key[0], key[1]) == key[1] and bins.may_run(key, slot)
        for bit in reversed(bits(mask))
    ]
