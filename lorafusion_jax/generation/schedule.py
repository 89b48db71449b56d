"""Which sequences run: rows and blocks for those that wait, and who gives way where blocks are short. Plain numbers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lorafusion_jax.generation.blocks import BlockPool


@dataclass(slots=True, eq=False, kw_only=True)
class Running:
    """A sequence.

    Attributes:
        tokens: of its prompt and of its answer so far.
        most: tokens that it can have at most.
        arrival: its number in the order of requests.
        root: see `BlockPool.find`; of the weights with which it runs.
        request: whatever belongs to it.
        stops: tokens that end it.
        reusable: tokens of its beginning that may be in blocks already.
        findable: whether others may find what its blocks hold.
        shares: whether equal prompts may be read once.
        row, slot: of the engine and of its adapter, while it runs.
        blocks: of the cache.
        node, known: of its last block that others can find, and number of these.
        stored: tokens in its blocks.
        ahead: tokens that passes choose, and that nobody has looked at.
    """

    tokens: list[int]
    most: int
    arrival: int
    root: int
    request: Any = None
    stops: frozenset[int] = frozenset()
    reusable: int = 0
    findable: bool = True
    shares: bool = True
    row: int = -1
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    node: int = 0
    known: int = 0
    stored: int = 0
    ahead: int = 0

    @property
    def length(self) -> int:
        """Tokens once all issued passes have run."""
        return len(self.tokens) + self.ahead


@dataclass(slots=True, kw_only=True)
class Admission:
    """A sequence that starts.

    Attributes:
        start: tokens that are in its blocks already.
        leader: one that starts with the same tokens, which reads them for both (None: it reads its own).
    """

    sequence: Running
    start: int
    leader: Running | None = None


class Scheduler:
    """Gives rows and blocks to sequences in the order of their arrival.

    Where blocks are short, the sequence that came last gives its own back, waits, and is read again later.

    Args:
        rows: sequences that run at a time.
        acquire: gives a slot to the adapter of a sequence; None: all are in use.
        release: tells that a sequence does not run any more.
    """

    def __init__(
        self,
        pool: BlockPool,
        rows: int,
        acquire: Callable[[Running], int | None] = lambda sequence: -1,
        release: Callable[[Running], None] = lambda sequence: None,
    ):
        self.pool = pool
        self.running: dict[int, Running] = {}  # by row
        self._acquire, self._release = acquire, release
        self._free_rows = list(range(rows))  # a heap: low rows first, so that passes are small
        self._waiting: list[tuple[int, Running]] = []

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def sequences(self) -> list[Running]:
        """Those that run, and those that wait."""
        return [*self.running.values(), *(sequence for _, sequence in self._waiting)]

    def add(self, sequence: Running) -> None:
        """Lets a sequence wait for its turn."""
        heapq.heappush(self._waiting, (sequence.arrival, sequence))

    def remove(self, sequence: Running) -> None:
        """Takes a sequence out, wherever it is. What its blocks hold can be found by others."""
        if self.running.get(sequence.row) is not sequence:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)
            return
        self.remember(sequence)
        self.pool.release(sequence.blocks)
        del self.running[sequence.row]
        heapq.heappush(self._free_rows, sequence.row)
        self._release(sequence)
        sequence.blocks, sequence.row, sequence.slot, sequence.known, sequence.stored = [], -1, -1, 0, 0
        sequence.ahead = 0

    def can_reserve(self, steps: int) -> bool:
        """Whether `reserve` has blocks for all."""
        return sum(self._missing(sequence, steps) for sequence in self.running.values()) <= self.pool.num_free

    def reserve(self, steps: int) -> list[Running]:
        """Gives running sequences the blocks of their next tokens. Returns those that have to wait instead."""
        preempted: list[Running] = []
        for sequence in sorted(self.running.values(), key=lambda sequence: sequence.arrival):
            if sequence in preempted:
                continue
            missing = self._missing(sequence, steps)
            while missing > self.pool.num_free:
                youngest = max(self.running.values(), key=lambda other: other.arrival)
                self.remove(youngest)
                self.add(youngest)
                preempted.append(youngest)
                if youngest is sequence:
                    break
            else:
                sequence.blocks += self.pool.take(missing)
        return preempted

    def admit(self, steps: int, most_tokens: int) -> list[Admission]:
        """Starts sequences that wait, while there are rows, slots and blocks for them and their next tokens.

        Args:
            most_tokens: that are read before others get their next token, but for one longer prompt.
        """
        admissions: list[Admission] = []
        leaders: dict[tuple, Running] = {}
        prompt_tokens = 0
        while self._waiting and self._free_rows:
            sequence = self._waiting[0][1]
            key = (sequence.root, tuple(sequence.tokens))
            leader = leaders.get(key) if sequence.shares else None
            if leader is None:
                blocks, node = self.pool.find(sequence.root, sequence.tokens, sequence.reusable)
                start = len(blocks) * self.pool.size
            else:
                full = len(sequence.tokens) // self.pool.size
                blocks, node, start = leader.blocks[:full], leader.node, len(sequence.tokens)
                self.pool.share(blocks)
            missing = self._num_blocks(sequence, steps) - len(blocks)
            too_long = prompt_tokens and prompt_tokens + len(sequence.tokens) - start > most_tokens
            slot = None if too_long or missing > self.pool.num_free else self._acquire(sequence)
            if slot is None:
                self.pool.release(blocks)
                break
            heapq.heappop(self._waiting)
            sequence.slot, sequence.row = slot, heapq.heappop(self._free_rows)
            sequence.node, sequence.known = node, len(blocks)
            sequence.blocks = [*blocks, *self.pool.take(missing)]
            sequence.stored = len(sequence.tokens)
            self.running[sequence.row] = sequence
            admissions.append(Admission(sequence=sequence, start=start, leader=leader))
            prompt_tokens += len(sequence.tokens) - start
            if leader is None:
                self.remember(sequence)
                leaders[key] = sequence
        return admissions

    def remember(self, sequence: Running) -> None:
        """Lets others find what the sequence has stored in full blocks."""
        size = self.pool.size
        while sequence.findable and (sequence.known + 1) * size <= min(sequence.stored, len(sequence.tokens)):
            tokens = sequence.tokens[sequence.known * size : (sequence.known + 1) * size]
            sequence.node = self.pool.remember(sequence.node, tokens, sequence.blocks[sequence.known])
            sequence.known += 1

    def _missing(self, sequence: Running, steps: int) -> int:
        """Blocks that the next tokens of a sequence need."""
        return max(self._num_blocks(sequence, steps - 1) - len(sequence.blocks), 0)  # the newest is not stored yet

    def _num_blocks(self, sequence: Running, more: int) -> int:
        return self.pool.blocks_of(min(sequence.length + more, sequence.most))


def order_copies(admissions: Sequence[Admission], size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Blocks and rows that are copied, (from, to), for sequences whose tokens another one reads.

    The last block of a prompt is shared by nobody, unless it is full: each writes on into its own.
    """
    blocks, rows = [], []
    for admission in admissions:
        leader, sequence = admission.leader, admission.sequence
        if leader is not None:
            full = len(sequence.tokens) // size
            if len(sequence.tokens) % size:
                blocks.append((leader.blocks[full], sequence.blocks[full]))
            rows.append((leader.row, sequence.row))
    return blocks, rows
