"""Packs prompts into the rows of prefill passes, on the host. Prompts of one adapter share tiles.

T rows of a pass · B rows of the engine · M blocks of a table · W scored rows
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lorafusion_jax.models.segments import Segments

BASE = -1  # the adapter of rows that have none, and their slot
TILE = 128  # rows of a tile, which belong to one adapter; those of a training run
MOST_ROWS = 2048  # of a pass, but for a longer prompt: more rows are not read faster
SIZES = (TILE, 512, 1024)  # of passes, which compile once each; and every power of two from `MOST_ROWS` on
MOST_CONTINUED = 512  # rows of a pass that continues prompts: each has a score for every position of its blocks
NOWHERE = np.iinfo(np.int32).max  # a cell or a row that keeps nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The part of a sequence that is read.

    Attributes:
        tokens: of the whole sequence.
        start: tokens that are in its blocks already.
        blocks: of the cache, in order.
        row: of the engine.
        slot: of its adapter.
        others: rows of equal prompts, which get their next tokens from it.
        first_scored: index of the first token that is scored (None: none is).
        targets: further tokens that are scored, by index.
        listed: most probable tokens that are returned.
    """

    tokens: Sequence[int]
    blocks: Sequence[int]
    row: int
    slot: int
    start: int = 0
    others: tuple[int, ...] = ()
    first_scored: int | None = None
    targets: Sequence[Sequence[int]] = ()
    listed: int = 0


@dataclass(slots=True, kw_only=True)
class Scored:
    """Rows of a pass whose next tokens are scored.

    Attributes:
        owners: row of the engine and index of the token, of each row.
    """

    row_W: np.ndarray
    targets_Wk: np.ndarray
    slot_W: np.ndarray
    listed: int
    owners: list[tuple[int, int]] = field(default_factory=list)

    def parts(self, most: int) -> Iterator[Scored]:
        """Cuts them into parts of few sizes; the last one may end in rows that nobody asked for."""
        for start in range(0, len(self.row_W), most):
            size = min(bucket(len(self.row_W) - start, 16), most)
            arrays = {}
            for name in ("row_W", "targets_Wk", "slot_W"):
                array = getattr(self, name)[start : start + size]
                arrays[name] = np.pad(array, [(0, size - len(array)), *[(0, 0)] * (array.ndim - 1)])
            yield Scored(**arrays, listed=self.listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPass:
    """The rows of some prompts.

    Attributes:
        tokens_T, position_T: int32; position -1 for padding.
        cell_T: int32, see `CachedRows`.
        slot_T: int32, slot of the row's adapter, -1 for none.
        tile_slot: int32 [T / TILE], the same by tile.
        state_M: int32, row of the engine that each segment belongs to.
        last_B: int32, the row of the pass that gives the next token of each row of the engine; -1 for none.
        tables_GM: int32, blocks by tile, where prompts are continued (None: they begin).
        scored: None: no token is scored.
    """

    tokens_T: np.ndarray
    position_T: np.ndarray
    cell_T: np.ndarray
    slot_T: np.ndarray
    segments: Segments
    tile_slot: np.ndarray
    state_M: np.ndarray
    last_B: np.ndarray
    tables_GM: np.ndarray | None = None
    scored: Scored | None = None


def pack_prompts(prompts: Sequence[Prompt], rows: int, block: int) -> list[PromptPass]:
    """Packs prompts that begin, and those that go on.

    Args:
        rows: of the engine.
        block: positions of a block.
    """
    beginning = [(prompt, 0, len(prompt.tokens)) for prompt in prompts if not prompt.start]
    beginning.sort(key=lambda part: part[0].slot)
    parts = [
        (prompt, start, min(start + MOST_CONTINUED, len(prompt.tokens)))
        for prompt in prompts
        if prompt.start
        for start in range(prompt.start, len(prompt.tokens), MOST_CONTINUED)
    ]
    begun, continued = _groups(beginning, MOST_ROWS, shared=True), _groups(parts, MOST_CONTINUED, shared=False)
    return [
        *(_pack(group, rows, block, continued=False) for group in begun),
        *(_pack(group, rows, block, continued=True) for group in continued),
    ]


type Part = tuple[Prompt, int, int]  # from its first to its last token


def _groups(parts: Sequence[Part], most: int, *, shared: bool) -> Iterator[list[Part]]:
    """Puts parts into passes. A sequence has one part in a pass, because later ones read what earlier ones store."""
    group: list[Part] = []
    for part in parts:
        if group and (_num_rows([*group, part], shared) > most or part[0] is group[-1][0]):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _num_rows(parts: Sequence[Part], shared: bool) -> int:
    """Rows of a pass; prompts of a slot share tiles if `shared`."""
    lengths: dict[int, int] = {}
    for number, (prompt, start, stop) in enumerate(parts):
        key = prompt.slot if shared else number
        lengths[key] = lengths.get(key, 0) + stop - start
    return sum(-(-length // TILE) * TILE for length in lengths.values())


def _pack(parts: Sequence[Part], rows: int, block: int, *, continued: bool) -> PromptPass:
    num_rows = _num_rows(parts, not continued)
    T = next((size for size in SIZES if num_rows <= size), power_of_two(num_rows))
    tokens_T, slot_T, tile_slot = np.zeros(T, np.int32), np.full(T, BASE, np.int32), np.full(T // TILE, BASE, np.int32)
    position_T, cell_T = np.full(T, -1, np.int32), np.full(T, NOWHERE, np.int32)
    last_B = np.full(rows, -1, np.int32)
    widest = max(len(prompt.blocks) for prompt, _, _ in parts)
    tables_GM = np.zeros((T // TILE, bucket(widest, 2)), np.int32)
    runs: list[int] = []
    state_M, scored, at, before = [], [], 0, None
    for prompt, start, stop in parts:
        if at % TILE and (continued or prompt.slot != before):
            runs.append(TILE - at % TILE)
            state_M.append(NOWHERE)
            at += runs[-1]
        end, positions, before = at + stop - start, np.arange(start, stop), prompt.slot
        tokens_T[at:end], position_T[at:end], slot_T[at:end] = prompt.tokens[start:stop], positions, prompt.slot
        cell_T[at:end] = np.asarray(prompt.blocks, np.int32)[positions // block] * block + positions % block
        tiles = slice(at // TILE, -(-end // TILE))
        tile_slot[tiles], tables_GM[tiles, : len(prompt.blocks)] = prompt.slot, prompt.blocks
        runs.append(end - at)
        state_M.append(prompt.row)
        if stop == len(prompt.tokens):
            last_B[[prompt.row, *prompt.others]] = end - 1
        if prompt.first_scored is not None:
            scored += [(prompt, at - start + n - 1, n) for n in range(max(prompt.first_scored, start + 1), stop + 1)
                       if n < len(prompt.tokens)]  # fmt: skip
        at = end
    segments = Segments.from_lengths(runs, T)
    state_M += [NOWHERE] * (len(segments.lengths) - len(state_M))
    return PromptPass(
        tokens_T=tokens_T,
        position_T=position_T,
        cell_T=cell_T,
        slot_T=slot_T,
        segments=segments,
        tile_slot=tile_slot,
        state_M=np.array(state_M, np.int32),
        last_B=last_B,
        tables_GM=tables_GM if continued else None,
        scored=_scored(scored) if scored else None,
    )


def _scored(rows: Sequence[tuple[Prompt, int, int]]) -> Scored:
    def targets(prompt: Prompt, index: int) -> list[int]:
        return [prompt.tokens[index], *(prompt.targets[index] if index < len(prompt.targets) else ())]

    token_lists = [targets(prompt, index) for prompt, _, index in rows]
    targets_Wk = np.full((len(rows), power_of_two(max(map(len, token_lists)))), -1, np.int32)
    for row, tokens in zip(targets_Wk, token_lists, strict=True):
        row[: len(tokens)] = tokens
    return Scored(
        row_W=np.array([row for _, row, _ in rows], np.int32),
        targets_Wk=targets_Wk,
        slot_W=np.array([prompt.slot for prompt, _, _ in rows], np.int32),
        listed=power_of_two(most) if (most := max(prompt.listed for prompt, _, _ in rows)) else 0,
        owners=[(prompt.row, index) for prompt, _, index in rows],
    )


def power_of_two(number: int) -> int:
    """The smallest power of two from `number` on."""
    return 1 << max(number - 1, 0).bit_length()


def bucket(number: int, least: int) -> int:
    """The smallest of 2^n and 3 · 2^(n-1), from `least` on, that holds `number`, so that few shapes are compiled.

    >>> [bucket(number, 64) for number in (5, 65, 97, 200)]
    [64, 96, 128, 256]
    """
    size = max(power_of_two(number), least)
    return size * 3 // 4 if size > least and number <= size * 3 // 4 else size
