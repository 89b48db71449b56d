"""Slot of a plan → static host arrays of one microbatch.

T packed tokens · A adapters · M segments (static bucket)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lorafusion_jax.data.prepare import AdapterData
from lorafusion_jax.data.tokenized import TokenizedSet
from scheduling import SampleRef

MASK64 = (1 << 64) - 1


class Microbatch(NamedTuple):
    """What one step computes; every array has the same shape in every slot of a run.

    Rows of one adapter lie together and start at a tile; rows that fill up its last tile continue the segment of its
    last sample (causal attention keeps them out of the sample); rows after the last adapter are a segment of their own.
    """

    tokens: np.ndarray  # int32 [T]
    targets: np.ndarray  # int32 [T], the token after
    positions: np.ndarray  # int32 [T], inside the sample
    segment_ids: np.ndarray  # int32 [T]
    segment_offsets: np.ndarray  # int32 [M + 1], -1 where unused
    segment_lengths: np.ndarray  # int32 [M], -1 where unused
    tile_adapter: np.ndarray  # int32 [T / tile], -1 for padding
    row_adapter: np.ndarray  # int32 [T], -1 for padding
    row_key: np.ndarray  # uint32 [T], dropout's key of each row
    weights: np.ndarray  # float32 [T], 1 / loss tokens of the adapter's global batch where the target counts, else 0


class Piece(NamedTuple):
    """One sample of a microbatch."""

    adapter: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    weight: float
    key: int


def mix64(value: int) -> int:
    """SplitMix64's finalizer: spreads every input bit over 64 output bits."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def sample_key(epoch: int, sample: int) -> int:
    """64-bit key of a sample in an epoch; with the adapter's key it decides all dropout of the sample."""
    return mix64(mix64(epoch) ^ sample)


def row_keys(key: int, length: int) -> np.ndarray:
    """uint32 key per position of a sample, independent of where it is packed."""
    with np.errstate(over="ignore"):
        value = np.uint64(key) + (np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((value ^ (value >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)


def pieces_of_slot(
    samples: Sequence[SampleRef],
    data: Mapping[str, AdapterData],
    index: Mapping[str, int],
    loss_tokens: Mapping[tuple[str, int], int],
) -> list[Piece]:
    """Looks up the samples of a training slot.

    Args:
        samples: what the plan puts into the slot.
        data: the adapters' samples and order.
        index: position of each adapter in the stacked weights.
        loss_tokens: loss tokens of each (adapter, batch), see `batch_loss_tokens`.
    """
    pieces = []
    for ref in samples:
        own = data[ref.adapter]
        row = int(own.order[ref.sample])
        tokens, mask = own.train.sample(row)
        pieces.append(
            Piece(
                index[ref.adapter],
                tokens,
                mask,
                1.0 / loss_tokens[ref.adapter, ref.batch],
                sample_key(ref.sample // len(own.train.lengths), row),
            )
        )
    return pieces


def pieces_of_evaluation(
    samples: Sequence[SampleRef], sets: Mapping[str, TokenizedSet], index: Mapping[str, int]
) -> list[Piece]:
    """Looks up held-out samples; their weights count tokens, so sums are sums of token losses."""
    return [Piece(index[ref.adapter], *sets[ref.adapter].sample(ref.sample), 1.0, 0) for ref in samples]


def batch_loss_tokens(data: AdapterData, global_batch: int) -> np.ndarray:
    """Counts the loss tokens of every global batch of an adapter."""
    per_sample = np.add.reduceat(data.train.loss_mask.astype(np.int64), data.train.offsets[:-1])[data.order]
    return np.add.reduceat(per_sample, np.arange(0, len(per_sample), global_batch))


def num_segments(num_samples: int) -> int:
    """Static number of segment places for slots of at most `num_samples` samples.

    One more than samples, for the tail; multiples of 8, because packed attention pays for places (cuDNN's backward:
    1.0 ms with tight places, 2.1 ms with 64, 14 samples in 8192 tokens on an H200).
    """
    return -(-(num_samples + 1) // 8) * 8


def assemble(pieces: Sequence[Piece], *, capacity_tokens: int, tile_tokens: int, max_segments: int) -> Microbatch:
    """Lays samples out in one microbatch.

    Args:
        pieces: samples; those of one adapter next to each other.
        capacity_tokens: T.
        tile_tokens: rows of a tile.
        max_segments: M, from `num_segments`.

    Raises:
        ValueError: the samples do not fit (the plan is not for this capacity).
    """
    tokens, targets, positions = (np.zeros(capacity_tokens, np.int32) for _ in range(3))
    row_key = np.zeros(capacity_tokens, np.uint32)
    weights = np.zeros(capacity_tokens, np.float32)
    row_adapter = np.full(capacity_tokens, -1, np.int32)
    starts: list[int] = []
    end = 0
    for number, piece in enumerate(pieces):
        if number and pieces[number - 1].adapter != piece.adapter:
            end = -(-end // tile_tokens) * tile_tokens
        length = len(piece.tokens)
        stop = end + length
        if stop > capacity_tokens:
            raise ValueError(f"{stop} rows do not fit into a microbatch of {capacity_tokens} tokens")
        here = slice(end, stop)
        tokens[here] = piece.tokens
        targets[end : stop - 1] = piece.tokens[1:]
        positions[here] = np.arange(length)
        row_key[here] = row_keys(piece.key, length)
        weights[end : stop - 1] = piece.loss_mask[1:] * np.float32(piece.weight)
        row_adapter[end : -(-stop // tile_tokens) * tile_tokens] = piece.adapter
        starts.append(end)
        end = stop
    filled = -(-end // tile_tokens) * tile_tokens
    starts += [filled] if filled < capacity_tokens else []
    ids, offsets, lengths = _segments(starts, capacity_tokens, max_segments)
    return Microbatch(
        tokens,
        targets,
        positions,
        ids,
        offsets,
        lengths,
        row_adapter[::tile_tokens].copy(),
        row_adapter,
        row_key,
        weights,
    )


def _segments(starts: list[int], total: int, places: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ends = [*starts[1:], total]
    lengths = np.full(places, -1, np.int32)
    lengths[: len(starts)] = np.subtract(ends, starts)
    offsets = np.full(places + 1, -1, np.int32)
    offsets[: len(starts)] = starts
    return np.repeat(np.arange(len(starts), dtype=np.int32), lengths[: len(starts)]), offsets, lengths
