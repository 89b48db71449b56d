"""An even load: samples move from full microbatches to emptier ones, without a change in the number of slots."""

from __future__ import annotations

from scheduling.packing.problem import Filling, Problem, bits

LIGHT = 0.85  # of the mean load: microbatches below are topped up


def even_out(problem: Problem, filling: Filling) -> Filling:
    """Tops up light microbatches with samples whose batch may run there; every rule stays kept."""
    bins = _Bins(problem, filling)
    used = [load for load in bins.load.values() if load]
    limit = LIGHT * sum(used) / max(1, len(used))
    light = sorted((load, at) for at, load in bins.load.items() if 0 < load < limit)
    for _, at in light:
        _top_up(bins, at)
    return bins.filling()


class _Bins:
    """Microbatches by (slot, replica): load, and per (job, batch) the mask of its samples."""

    def __init__(self, problem: Problem, filling: Filling):
        self.problem = problem
        self.shape = (len(filling), problem.data_parallel)
        self.parts = {
            (slot, replica): {(job, batch): mask for job, batch, mask in parts}
            for slot, replicas in enumerate(filling)
            for replica, parts in enumerate(replicas)
        }
        self.load = {at: sum(map(self.tokens, parts, parts.values())) for at, parts in self.parts.items()}
        self.first: dict[tuple[int, int], int] = {}
        self.last: dict[tuple[int, int], int] = {}
        for (slot, _), parts in self.parts.items():
            for key in parts:
                self.first.setdefault(key, slot)
                self.last[key] = slot

    def tokens(self, key: tuple[int, int], mask: int) -> int:
        tokens = self.problem.batches[key[0]][key[1]].tokens
        return sum(tokens[bit] for bit in bits(mask))

    def may_run(self, key: tuple[int, int], slot: int) -> bool:
        """Whether a sample of the batch may be in that slot, given where its neighbours are."""
        job, batch = key
        distance = self.problem.num_stages
        after = self.last[job, batch - 1] + distance if batch else self.problem.ready[job]
        before = self.first[job, batch + 1] - distance if (job, batch + 1) in self.first else self.shape[0] - 1
        return after <= slot <= before

    def room_for(self, at: tuple[int, int], key: tuple[int, int]) -> int:
        """Tokens of that batch that still fit."""
        tile, tiles = self.problem.tile_tokens, self.problem.tiles
        own = 0
        for other, mask in self.parts[at].items():
            if other == key:
                own = self.tokens(other, mask)
            else:
                tiles -= -(-self.tokens(other, mask) // tile)
        return tiles * tile - own

    def move(self, key: tuple[int, int], bit: int, source: tuple[int, int], target: tuple[int, int]) -> None:
        length = self.problem.batches[key[0]][key[1]].tokens[bit]
        self.parts[source][key] ^= 1 << bit
        if not self.parts[source][key]:
            del self.parts[source][key]
        self.parts[target][key] = self.parts[target].get(key, 0) | 1 << bit
        self.load[source] -= length
        self.load[target] += length
        slots = [at[0] for at in (source, target)] + [self.first[key], self.last[key]]
        held = [slot for slot in range(min(slots), max(slots) + 1) if self._holds(key, slot)]
        self.first[key], self.last[key] = held[0], held[-1]

    def _holds(self, key: tuple[int, int], slot: int) -> bool:
        return any(key in self.parts[slot, replica] for replica in range(self.shape[1]))

    def filling(self) -> Filling:
        slots, replicas = self.shape
        return [
            tuple(
                tuple((job, batch, mask) for (job, batch), mask in self.parts[slot, replica].items())
                for replica in range(replicas)
            )
            for slot in range(slots)
        ]


def _top_up(bins: _Bins, target: tuple[int, int]) -> None:
    """Moves samples here while that brings the two loads nearer to each other."""
    moved = True
    while moved:
        moved = False
        for key, bit, source in _candidates(bins, target):
            length = bins.problem.batches[key[0]][key[1]].tokens[bit]
            if bins.load[source] - length > bins.load[target] and length <= bins.room_for(target, key):
                bins.move(key, bit, source, target)
                moved = True
                break


def _candidates(bins: _Bins, target: tuple[int, int]) -> list[tuple[tuple[int, int], int, tuple[int, int]]]:
    """Samples of heavier microbatches nearby that may run here; from the heaviest, the longest first."""
    slot, near = target[0], 2 * bins.problem.num_stages
    here = set(bins.parts[slot, 0]).union(*(bins.parts[slot, replica] for replica in range(bins.shape[1])))
    batch_here = dict(here)
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
