"""Blocks of the cache: who has which, and which beginnings of sequences are in them. Plain numbers.

Sequences that begin alike share full blocks. What is in a block is found by the block before it and by its own tokens,
compared one by one: there are no collisions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count


class BlockPool:
    """A fixed number of blocks.

    A block that nobody has any more keeps its content until it is needed otherwise, the least recently used first.

    Args:
        number: of blocks.
        size: positions of a block.

    >>> pool = BlockPool(3, 2)
    >>> blocks = pool.take(2)
    >>> node = pool.remember(-1, [5, 7], blocks[0])
    >>> pool.release(blocks)
    >>> pool.num_free, pool.find(-1, [5, 7, 9], 2) == ([blocks[0]], node), pool.num_free
    (3, True, 2)
    """

    def __init__(self, number: int, size: int):
        self.number, self.size = number, size
        self._free = list(range(number - 1, -1, -1))
        self._users = [0] * number
        self._idle: OrderedDict[int, None] = OrderedDict()  # without users, with a content that is known
        self._of_key: dict[tuple, tuple[int, int]] = {}  # (node before, tokens) → (block, node)
        self._key_of: dict[int, tuple] = {}
        self._nodes = count(1)

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give."""
        return len(self._free) + len(self._idle)

    def blocks_of(self, tokens: int) -> int:
        """Number of blocks that hold so many tokens."""
        return -(-tokens // self.size)

    def take(self, number: int) -> list[int]:
        """Takes blocks of which nobody else knows."""
        assert number <= self.num_free, "ask num_free first"
        blocks = []
        for _ in range(number):
            if not self._free:
                block, _ = self._idle.popitem(last=False)
                del self._of_key[self._key_of.pop(block)]
                self._free.append(block)
            blocks.append(self._free.pop())
            self._users[blocks[-1]] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a user to blocks."""
        for block in blocks:
            self._idle.pop(block, None)
            self._users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Removes a user of blocks; of those that become idle, the last ones are needed otherwise first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, "a block is released twice"
            if self._users[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """Lets nobody find blocks any more."""
        for block in blocks:
            if block in self._key_of:
                del self._of_key[self._key_of.pop(block)]
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def find(self, root: int, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """Finds the longest known beginning of tokens, and becomes a user of its blocks.

        Args:
            root: a negative number; sequences share blocks under equal roots only.
            most: tokens of the beginning at most.

        Returns:
            The blocks and the node of the last one.
        """
        blocks, node = [], root
        for start in range(0, most - self.size + 1, self.size):
            entry = self._of_key.get((node, tuple(tokens[start : start + self.size])))
            if entry is None:
                break
            blocks.append(entry[0])
            node = entry[1]
        self.share(blocks)
        return blocks, node

    def remember(self, node: int, tokens: Sequence[int], block: int) -> int:
        """Says what a full block holds. Returns its node, which may be that of another block with this content."""
        key = (node, tuple(tokens))
        if key not in self._of_key:
            self._of_key[key] = block, next(self._nodes)
            self._key_of[block] = key
        return self._of_key[key][1]
