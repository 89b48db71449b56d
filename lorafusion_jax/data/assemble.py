"""Builds the arrays of one microbatch from a slot of a plan, on the host.

T packed tokens · A adapters · M segments, P adapters (static sizes) ·
K targets of a position whose losses clients choose
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lorafusion_jax.data.prepare import AdapterData
from lorafusion_jax.data.sample_table import (
    PieceTable,
    SampleTable,
    State,
    TableShape,
    empty_table,
    fill_place,
    piece_table,
)
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.objective.rows import MOST_TARGETS, NO_ROW, RowNumbers
from scheduling import SampleRef
from scheduling.simulate import padding_segments

TARGET_SIZES = (1, 4, 16, MOST_TARGETS)  # few, because each compiles the head
MASK64 = (1 << 64) - 1


class AdapterRows(NamedTuple):
    """The adapters in the places of a microbatch, as data: sessions whose adapters change compile nothing for them."""

    windows: np.ndarray  # int32 [leaves, 2, P], first column and width in each leaf; see `pipeline.leaves.windows`
    rank: np.ndarray  # int32 [P]
    scale: np.ndarray  # float32 [P]
    rate: np.ndarray  # float32 [P], dropout
    key: np.ndarray  # uint32 [P], of the dropout
    ratio: np.ndarray  # float32 [targets, L, P], see `pipeline.inputs.layer_ratios`
    objective: np.ndarray  # int32 [A], number of the objective of every adapter of the session; -1: none


class BalanceRows(NamedTuple):
    """Whose choices of experts count in the loss of the routers; see `models.balance`."""

    length: np.ndarray  # int32 [M], rows of each sequence, without padding; 0 where none is
    weight: np.ndarray  # float32 [M], of the sequence's loss


class Microbatch(NamedTuple):
    """Input of one step. Every array has the same shape in every slot of a run.

    The rows of an adapter are contiguous and start at a tile boundary. Rows that pad its last tile belong to the
    segment of its last sample; causal attention keeps them from affecting the sample. The rows after the last adapter
    form a segment of their own.
    """

    tokens: np.ndarray  # int32 [T]
    targets: np.ndarray  # int32 [T], the next token
    positions: np.ndarray  # int32 [T], within the segment
    segment_ids: np.ndarray  # int32 [T]
    segment_offsets: np.ndarray  # int32 [M + 1], -1 where unused
    segment_lengths: np.ndarray  # int32 [M], with the padding of a tile, so not those of samples; -1 where unused
    tile_adapter: np.ndarray  # int32 [T / tile], -1 for padding
    row_adapter: np.ndarray  # int32 [T], -1 for padding
    row_key: np.ndarray  # uint32 [T], dropout key of each row
    weights: np.ndarray  # float32 [T], weight of the token loss where the target is learned, else 0; see `Weights`
    adapters: np.ndarray  # int32 [P], the adapters present, ascending, then -1: a step's cost depends on P, not on A
    samples: SampleTable | None = None  # None: no objective of the run needs it
    lora: AdapterRows | None = None  # None: the adapters are constants of the programs
    balance: BalanceRows | None = None  # None: the routers have no loss
    rows: RowTable | None = None  # None: no client sends rows with losses of their own


class Weights(NamedTuple):
    """Factors of a mean over an adapter's global batch.

    A mean over tokens weights each learned token by 1 / loss tokens of the batch, and has no sample weight. A mean over
    samples weights each token loss by 1 and each sample by 1 / samples of the batch.

    Attributes:
        segments: `Sample.token_weight` of the batch, one for each segment of a sample.
        sequence: of the routers' loss in each segment of a sample.
    """

    token: float
    sample: float | None = None
    segments: tuple[float, ...] = (1.0,)
    sequence: float = 0.0


EACH_ONE = Weights(1.0)  # sums of token losses


class Piece(NamedTuple):
    """One sample of a microbatch.

    Attributes:
        adapter: its position among the stacked adapters; -1: the base alone.
        weight: of its token losses.
        key: for dropout.
        lengths: the lengths of its segments if it has several.
        table: its entry in the table of samples (None: it has none).
        sequence: see `Weights`.
        row: what decides its loss if a client sent it; its `loss_mask` is False everywhere.
    """

    adapter: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    weight: float
    key: int
    lengths: tuple[int, ...] | None = None
    table: PieceTable | None = None
    sequence: float = 0.0
    row: RowNumbers | None = None

    def segments(self) -> list[tuple[int, int]]:
        """Returns the start and end of each segment in the sample."""
        ends = list(itertools.accumulate(self.lengths or (len(self.tokens),)))
        return list(zip([0, *ends], ends, strict=False))


def mix64(value: int) -> int:
    """Applies SplitMix64's finalizer: every input bit affects all 64 output bits."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def sample_key(epoch: int, sample: int) -> int:
    """Returns the 64-bit key of a sample in an epoch. With the adapter's key it determines the sample's dropout."""
    return mix64(mix64(epoch) ^ sample)


def segment_key(key: int, segment: int) -> int:
    """Returns the key of a segment. The first segment has the sample's key."""
    return mix64(key ^ segment) if segment else key


def row_keys(key: int, length: int) -> np.ndarray:
    """Returns a uint32 key per position of a sample, independent of where the sample is packed."""
    with np.errstate(over="ignore"):
        value = np.uint64(key) + (np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((value ^ (value >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)


def pieces_of(samples: Sequence[SampleRef], data: AdapterData, adapter: int, weights: Sequence[Weights]) -> list[Piece]:
    """Looks up training samples of an adapter.

    Args:
        adapter: its position in the stacked weights.
        weights: of each of its global batches.
    """
    rows = [(ref, *data.sample_at(ref.sample)) for ref in samples]
    return [
        piece_of(data.train, row, adapter, weights[ref.batch], key=sample_key(epoch, row)) for ref, epoch, row in rows
    ]


def piece_of(data: TokenizedSet, sample: int, adapter: int, weights: Weights, *, key: int) -> Piece:
    """Looks up one sample of a set."""
    table = None
    if weights.sample is not None:
        table = piece_table(data, sample, weights.sample, weights.segments)
    lengths = data.segment_lengths_of(sample)
    return Piece(adapter, *data.sample(sample), weights.token, key, lengths, table, weights.sequence)


def segment_weights(data: TokenizedSet, samples: np.ndarray | None = None) -> tuple[float, ...]:
    """Returns `Sample.token_weight` of a global batch for each segment of a sample; 0 if nothing of it is learned.

    Args:
        samples: of the batch (None: all).
    """
    counts = data.segment_tokens if samples is None else data.segment_tokens[samples]
    by_segment = counts.reshape(len(counts), data.group, -1).sum(axis=(0, 1))
    shares = np.divide(len(counts), by_segment, out=np.zeros(len(by_segment)), where=by_segment > 0)
    return tuple(np.tile(shares, data.group).tolist())


def batch_loss_tokens(data: AdapterData, global_batch: int) -> np.ndarray:
    """Counts the loss tokens of every global batch of an adapter."""
    per_sample = data.train.segment_tokens.sum(axis=1)[data.order]
    return np.add.reduceat(per_sample, data.batch_starts(global_batch))


def num_segments(num_samples: int) -> int:
    """Returns the static number of segment places for slots with at most this many segments.

    One place is added for the tail, and the sum is rounded up to a multiple of 8. Unused places cost time in packed
    attention: cuDNN's backward takes 1.0 ms with a tight number and 2.1 ms with 64 places (14 samples in 8192 tokens on
    an H200).
    """
    return -(-(num_samples + 1) // 8) * 8


def adapter_places(most: int, num_adapters: int) -> int:
    """Returns the static number of adapter places for slots with at most this many adapters.

    It is a power of two or all adapters, so that few programs compile.

    >>> [adapter_places(most, 6) for most in (0, 1, 3, 5)]
    [1, 1, 4, 6]
    """
    return min(1 << (max(most, 1) - 1).bit_length(), num_adapters)


def assemble(
    pieces: Sequence[Piece],
    *,
    capacity_tokens: int,
    tile_tokens: int,
    max_segments: int,
    max_adapters: int,
    table: TableShape | None = None,
    state: State | None = None,
    balanced: bool = False,
    targets: int = 0,
) -> Microbatch:
    """Packs samples into one microbatch.

    Args:
        pieces: samples, grouped by adapter.
        capacity_tokens: T.
        tile_tokens: rows of a tile.
        max_segments: M, from `num_segments`.
        max_adapters: P, from `adapter_places`.
        table: shape of the table of samples (None: no table).
        state: width and dtype of a teacher's states, where the table has them.
        balanced: whether the routers have a loss.
        targets: K of the table of clients' rows (0: no table).

    Raises:
        ValueError: the samples or adapters do not fit (the plan is not for this capacity).
    """
    starts = first_rows([(piece.adapter, len(piece.tokens)) for piece in pieces], capacity_tokens, tile_tokens)
    rows = _Rows.empty(capacity_tokens)
    for piece, start in zip(pieces, starts, strict=True):
        rows.put(piece, start, tile_tokens)
    end = starts[-1] + len(pieces[-1].tokens) if pieces else 0
    tile_end = -(-end // tile_tokens) * tile_tokens
    offsets = [start + first for piece, start in zip(pieces, starts, strict=True) for first, _ in piece.segments()]
    padding = padding_segments(capacity_tokens - tile_end, capacity_tokens, max_segments - len(offsets))
    offsets += itertools.accumulate(padding[:-1], initial=tile_end) if padding else []
    ids, segment_offsets, lengths = _segments(offsets, capacity_tokens, max_segments)
    return Microbatch(
        rows.tokens,
        rows.targets,
        rows.positions,
        ids,
        segment_offsets,
        lengths,
        rows.adapter[::tile_tokens].copy(),
        rows.adapter,
        rows.key,
        rows.weights,
        _present_adapters(pieces, max_adapters),
        None if table is None else _filled_table(pieces, starts, table, capacity_tokens, state),
        balance=_balance_rows(pieces, max_segments) if balanced else None,
        rows=_row_table(pieces, starts, capacity_tokens, targets) if targets else None,
    )


class _Rows(NamedTuple):
    """Arrays of a microbatch that have one entry a row; see `Microbatch`."""

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    key: np.ndarray
    weights: np.ndarray
    adapter: np.ndarray

    @classmethod
    def empty(cls, capacity_tokens: int) -> _Rows:
        tokens, targets, positions = (np.zeros(capacity_tokens, np.int32) for _ in range(3))
        key, weights = np.zeros(capacity_tokens, np.uint32), np.zeros(capacity_tokens, np.float32)
        return cls(tokens, targets, positions, key, weights, np.full(capacity_tokens, -1, np.int32))

    def put(self, piece: Piece, start: int, tile_tokens: int) -> None:
        """Writes a sample's rows. Its adapter also has the rest of the last tile, until another sample begins there."""
        stop = start + len(piece.tokens)
        self.tokens[start:stop] = piece.tokens
        self.adapter[start : -(-stop // tile_tokens) * tile_tokens] = piece.adapter
        for segment, (first, last) in enumerate(piece.segments()):
            span, before_last = slice(start + first, start + last), slice(start + first, start + last - 1)
            self.targets[before_last] = piece.tokens[first + 1 : last]
            self.positions[span] = np.arange(last - first)
            self.key[span] = row_keys(segment_key(piece.key, segment), last - first)
            self.weights[before_last] = piece.loss_mask[first + 1 : last] * np.float32(piece.weight)


def first_rows(samples: Sequence[tuple[Hashable, int]], capacity_tokens: int, tile_tokens: int) -> list[int]:
    """Returns the first row of each sample: right after the one before, or at the next tile for another adapter.

    Args:
        samples: adapter and length of each.

    >>> first_rows([("law", 5), ("law", 4), ("med", 3)], capacity_tokens=32, tile_tokens=8)
    [0, 5, 16]
    """
    starts: list[int] = []
    end = 0
    for number, (adapter, length) in enumerate(samples):
        if number and samples[number - 1][0] != adapter:
            end = -(-end // tile_tokens) * tile_tokens
        starts.append(end)
        end += length
        if end > capacity_tokens:
            raise ValueError(f"{end} rows do not fit into a microbatch of {capacity_tokens} tokens")
    return starts


def _filled_table(
    pieces: Sequence[Piece], starts: Sequence[int], shape: TableShape, capacity_tokens: int, state: State | None
) -> SampleTable:
    samples = empty_table(shape, capacity_tokens, state)
    filled_places, num_segments_before = 0, 0
    for piece, start in zip(pieces, starts, strict=True):
        lengths = piece.lengths or (len(piece.tokens),)
        if piece.table is not None:
            fill_place(
                samples,
                filled_places,
                piece.table,
                adapter=piece.adapter,
                first_segment=num_segments_before,
                start=start,
                lengths=lengths,
                learned=piece.loss_mask,
            )
            filled_places += 1
        num_segments_before += len(lengths)
    return samples


def _row_table(pieces: Sequence[Piece], starts: Sequence[int], capacity_tokens: int, targets: int) -> RowTable:
    table = RowTable.empty(capacity_tokens, targets)
    for piece, start in zip(pieces, starts, strict=True):
        if piece.row is not None:
            table.put(piece.row, start)
    return table


def _balance_rows(pieces: Sequence[Piece], max_segments: int) -> BalanceRows:
    rows = BalanceRows(np.zeros(max_segments, np.int32), np.zeros(max_segments, np.float32))
    segments = [(last - first, piece.sequence) for piece in pieces for first, last in piece.segments()]
    for number, (length, weight) in enumerate(segments):
        rows.length[number], rows.weight[number] = length, weight
    return rows


def stacked(trees: Sequence[Any]) -> Any:
    """Stacks arrays in equal tuples and dictionaries, such as microbatches of replicas: [replicas, ...]."""
    first = trees[0]
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {name: stacked([tree[name] for tree in trees]) for name in first}
    if isinstance(first, tuple):
        return type(first)(*map(stacked, zip(*trees, strict=True)))
    return np.stack(trees)


def _present_adapters(pieces: Sequence[Piece], places: int) -> np.ndarray:
    present = sorted({piece.adapter for piece in pieces if piece.adapter >= 0})
    if len(present) > places:
        raise ValueError(f"{len(present)} adapters do not fit into {places} places")
    return np.array([*present, *[-1] * (places - len(present))], np.int32)


def _segments(starts: list[int], total: int, places: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ends = [*starts[1:], total]
    lengths = np.full(places, -1, np.int32)
    lengths[: len(starts)] = np.subtract(ends, starts)
    offsets = np.full(places + 1, -1, np.int32)
    offsets[: len(starts)] = starts
    return np.repeat(np.arange(len(starts), dtype=np.int32), lengths[: len(starts)]), offsets, lengths


class RowTable(NamedTuple):
    """What decides the losses of positions, see `RowNumbers`. Positions of other samples have the kind `NO_ROW`."""

    kind: np.ndarray  # int32 [T]
    targets: np.ndarray  # int32 [T, K]
    factors: np.ndarray  # float32 [T, K]
    old: np.ndarray  # float32 [T]
    low: np.ndarray  # float32 [T]
    high: np.ndarray  # float32 [T]
    beta: np.ndarray  # float32 [T]
    in_ratio: np.ndarray  # bool [T]
    learned: np.ndarray  # bool [T], whether the position has a gradient

    @classmethod
    def empty(cls, capacity_tokens: int, targets: int) -> RowTable:
        by_target = (capacity_tokens, targets)
        old, low, high, beta = (np.zeros(capacity_tokens, np.float32) for _ in range(4))
        return cls(
            kind=np.full(capacity_tokens, NO_ROW, np.int32),
            targets=np.zeros(by_target, np.int32),
            factors=np.zeros(by_target, np.float32),
            old=old,
            low=low,
            high=high,
            beta=beta,
            in_ratio=np.zeros(capacity_tokens, bool),
            learned=np.zeros(capacity_tokens, bool),
        )

    def put(self, row: RowNumbers, start: int) -> None:
        """Writes a row that begins at a position."""
        length, targets = row.targets.shape
        span = slice(start, start + length)
        self.kind[span] = row.kind
        self.targets[span, :targets], self.factors[span, :targets] = row.targets, row.factors
        for name in ("old", "low", "high", "beta", "in_ratio", "learned"):
            getattr(self, name)[span] = getattr(row, name)


def target_size(targets: int) -> int:
    """Returns the size of a table that holds so many targets.

    >>> [target_size(targets) for targets in (1, 2, 20)]
    [1, 4, 64]
    """
    return next(size for size in TARGET_SIZES if size >= targets)
