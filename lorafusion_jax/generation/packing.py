"""Packs prompts into the rows of prefill passes, on the host. Prompts of one place share tiles.

T rows of a pass · B sequences
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lorafusion_jax.generation.places import BASE, Places, bucket
from lorafusion_jax.models.segments import Segments

TILE = 128  # rows of a tile, which belong to one place; those of a training run
MOST_ROWS = 8192  # of a pass, but for a longer prompt
MOST_CONTINUED = 512  # rows of a pass that continues a prompt: each has a score for every slot of the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPass:
    """The rows of some prompts.

    Attributes:
        tokens_T, position_T: int32.
        sequence_T: int32, the sequence of each row; B for padding.
        length_T: int32, length of its prompt.
        tile_place: int32 [T / TILE], -1 for tiles of padding.
        last_B: int32, the row of the last token of each sequence's prompt; -1 for sequences without one here.
        continued: see `CachedRows`.
    """

    tokens_T: np.ndarray
    position_T: np.ndarray
    sequence_T: np.ndarray
    length_T: np.ndarray
    segments: Segments
    tile_place: np.ndarray
    last_B: np.ndarray
    continued: bool = False


def pack_prompts(prompts: Mapping[int, Sequence[int]], places: Places) -> list[PromptPass]:
    """Packs the prompts of some sequences.

    Args:
        prompts: tokens by sequence.
    """
    groups: list[dict[int, Sequence[int]]] = [{}]
    for sequence in sorted(prompts):
        joined = groups[-1] | {sequence: prompts[sequence]}
        if groups[-1] and _num_rows(joined, places) > MOST_ROWS:
            groups.append({sequence: prompts[sequence]})
        else:
            groups[-1] = joined
    return [_pack(group, places) for group in groups]


def continue_prompt(sequence: int, tokens: Sequence[int], kept: int, places: Places) -> list[PromptPass]:
    """Packs the rest of a prompt whose first `kept` tokens are in the sequence's cache already."""
    passes = []
    for start in range(kept, len(tokens), MOST_CONTINUED):
        part = tokens[start : start + MOST_CONTINUED]
        packed, stop = _pack({sequence: part}, places), start + len(part)
        last_B = packed.last_B if stop == len(tokens) else np.full_like(packed.last_B, -1)
        position_T, length_T = packed.position_T + start, np.where(packed.length_T > 0, stop, 0)
        passes.append(
            replace(
                packed,
                position_T=position_T.astype(np.int32),
                length_T=length_T.astype(np.int32),
                last_B=last_B,
                continued=True,
            )
        )
    return passes


def _num_rows(prompts: Mapping[int, Sequence[int]], places: Places) -> int:
    lengths: dict[int, int] = {}
    for sequence, tokens in prompts.items():
        index = sequence // places.rows
        lengths[index] = lengths.get(index, 0) + len(tokens)
    return sum(-(-length // TILE) * TILE for length in lengths.values())


def _pack(prompts: Mapping[int, Sequence[int]], places: Places) -> PromptPass:
    T, B = bucket(_num_rows(prompts, places), TILE), places.count
    tokens, position, length = (np.zeros(T, np.int32) for _ in range(3))
    sequence_T, last_B, tile_place = np.full(T, B, np.int32), np.full(B, -1, np.int32), np.full(T // TILE, -1, np.int32)
    runs, start, index = [], 0, None
    for sequence, prompt in prompts.items():
        if index not in (None, sequence // places.rows) and start % TILE:
            runs.append(TILE - start % TILE)
            start += runs[-1]
        index, stop = sequence // places.rows, start + len(prompt)
        tokens[start:stop], position[start:stop] = prompt, np.arange(len(prompt))
        sequence_T[start:stop], length[start:stop], last_B[sequence] = sequence, len(prompt), stop - 1
        tile_place[start // TILE : -(-stop // TILE)] = BASE if places.adapters[index] == BASE else index
        runs.append(len(prompt))
        start = stop
    return PromptPass(
        tokens_T=tokens,
        position_T=position,
        sequence_T=sequence_T,
        length_T=length,
        segments=Segments.from_lengths(runs, T),
        tile_place=tile_place,
        last_B=last_B,
    )
