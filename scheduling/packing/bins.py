"""A mutable filling: moves samples between microbatches within the rules of a plan."""

from __future__ import annotations

from scheduling.packing.problem import Filling, Problem, bits, smallest_size

Key = tuple[int, int]  # (job, batch)
Place = tuple[int, int]  # (slot, replica)


class Bins:
    """Microbatches by (slot, replica): their load, and per (job, batch) the mask of its samples.

    A slot keeps its capacity: the smallest one that held it at first.
    """

    def __init__(self, problem: Problem, filling: Filling):
        self.problem = problem
        self.shape = (len(filling), problem.data_parallel)
        self.parts = {
            (slot, replica): {(job, batch): mask for job, batch, mask in parts}
            for slot, replicas in enumerate(filling)
            for replica, parts in enumerate(replicas)
        }
        sizes = problem.sizes
        self.tiles = (
            [sizes[smallest_size(problem, replicas)] for replicas in filling]
            if len(sizes) > 1
            else [problem.tiles] * len(filling)
        )
        self.load = {at: sum(map(self.tokens, parts, parts.values())) for at, parts in self.parts.items()}
        self.first: dict[Key, int] = {}
        self.last: dict[Key, int] = {}
        for (slot, _), parts in self.parts.items():
            for key in parts:
                self.first.setdefault(key, slot)
                self.last[key] = slot

    def tokens(self, key: Key, mask: int) -> int:
        tokens = self.problem.batches[key[0]][key[1]].tokens
        return sum(tokens[bit] for bit in bits(mask))

    def tokens_of(self, at: Place) -> dict[Key, int]:
        """Tokens of each batch in a microbatch."""
        return {key: self.tokens(key, mask) for key, mask in self.parts[at].items()}

    def may_run(self, key: Key, slot: int) -> bool:
        """Whether a sample of the batch may run in that slot, given the slots of the neighbouring batches."""
        job, batch = key
        distance = self.problem.num_stages
        after = self.last[job, batch - 1] + distance if batch else self.problem.ready[job]
        before = self.first[job, batch + 1] - distance if (job, batch + 1) in self.first else self.shape[0] - 1
        return after <= slot <= before

    def room_for(self, at: Place, key: Key) -> int:
        """Tokens of that batch that still fit in a microbatch."""
        tile, tiles = self.problem.tile_tokens, self.tiles[at[0]]
        other_tokens = 0
        for other, mask in self.parts[at].items():
            if other == key:
                other_tokens = self.tokens(other, mask)
            else:
                tiles -= -(-self.tokens(other, mask) // tile)
        return tiles * tile - other_tokens

    def move(self, key: Key, bit: int, source: Place, target: Place) -> None:
        length = self.problem.batches[key[0]][key[1]].tokens[bit]
        self.parts[source][key] ^= 1 << bit
        if not self.parts[source][key]:
            del self.parts[source][key]
        self.parts[target][key] = self.parts[target].get(key, 0) | 1 << bit
        self.load[source] -= length
        self.load[target] += length
        self.first[key], self.last[key] = min(self.first[key], target[0]), max(self.last[key], target[0])
        while not self._contains(key, self.first[key]):
            self.first[key] += 1
        while not self._contains(key, self.last[key]):
            self.last[key] -= 1

    def _contains(self, key: Key, slot: int) -> bool:
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
