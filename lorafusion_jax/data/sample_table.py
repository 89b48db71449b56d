"""The table of a microbatch's samples, for objectives that take their mean over samples, on the host.

T packed tokens · N samples · S segments of a sample · G rows of a group · L learned tokens of a sample
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lorafusion_jax.data.tokenized_set import Fields, TokenizedSet
from lorafusion_jax.objective.protocol import DIVERGENCE, HIDDEN, LOGPROBS, REFERENCE, SCORE, Chosen


class SampleTable(NamedTuple):
    """Samples of adapters whose objective averages over samples. Unused places have adapter -1.

    What no objective of the run needs is None or empty. Arrays [T] are for the row that predicts a token.
    """

    segments: np.ndarray  # int32 [N, S], ids as in `segment_ids`
    adapter: np.ndarray  # int32 [N]
    weight: np.ndarray  # float32 [N], 1 / samples of the adapter's global batch
    token_weight: np.ndarray  # float32 [N, S], see `Sample`
    numbers: Mapping[str, np.ndarray] = {}  # name -> float32 [N, G], of the rows
    reference: np.ndarray | None = None  # float32 [N, S], nll under the reference
    rows: np.ndarray | None = None  # int32 [N, L], rows of the learned tokens, then T
    in_answer: np.ndarray | None = None  # bool [T]
    reference_logprobs: np.ndarray | None = None  # float32 [T]
    values: Mapping[str, np.ndarray] = {}  # name -> float32 [T]
    last: np.ndarray | None = None  # int32 [N, S], row of each segment's last token
    teacher: np.ndarray | None = None  # [T, D], final-normed state of the reference
    fields: Mapping[Fields, np.ndarray] = {}  # -> bool [N], the samples that have just these numbers and values


class State(NamedTuple):
    """The state of a token after the final norm."""

    width: int
    dtype: np.dtype


class TableShape(NamedTuple):
    """Static sizes of a table, and which of its arrays exist."""

    samples: int
    segments: int
    group: int = 1
    rows: int = 0  # L; 0: no objective needs tokens
    numbers: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()
    reference: bool = False
    last: bool = False
    teacher: bool = False
    fields: frozenset[Fields] = frozenset()

    def union(self, other: TableShape) -> TableShape:
        """Returns a shape with room for the tables of both."""
        return TableShape(
            max(self.samples, other.samples),
            max(self.segments, other.segments),
            max(self.group, other.group),
            max(self.rows, other.rows),
            self.numbers | other.numbers,
            self.values | other.values,
            self.reference or other.reference,
            self.last or other.last,
            self.teacher or other.teacher,
            self.fields | other.fields,
        )


class PieceTable(NamedTuple):
    """What the table holds of one sample. Arrays per token are in the order of its tokens.

    Attributes:
        weight: 1 / samples of the global batch.
        token_weight: [S].
    """

    weight: float
    token_weight: Sequence[float] = (1.0,)
    numbers: Mapping[str, np.ndarray] = {}
    reference: np.ndarray | None = None
    answer: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    values: Mapping[str, np.ndarray] = {}
    teacher: np.ndarray | None = None  # [learned tokens, D]
    fields: Fields | None = None


def table_shape(samples: int, members: Iterable[tuple[Chosen, TokenizedSet]]) -> TableShape | None:
    """Returns the shape of the tables of a run with these objectives and data; None if none takes samples."""
    shape: TableShape | None = None
    for objective, data in members:
        if not objective.of_samples:
            continue
        needs, tokens = objective.needs, LOGPROBS in objective.needs
        member_shape = TableShape(
            samples,
            objective.num_segments,
            objective.group or 1,
            int(data.segment_tokens.sum(axis=1).max(initial=1)) if tokens else 0,
            frozenset(data.numbers),
            frozenset(data.values) if tokens else frozenset(),
            REFERENCE in needs,
            HIDDEN in needs or SCORE in needs,
            DIVERGENCE in needs,
            data.fields if objective.objective.segments is not None else frozenset(),
        )
        shape = member_shape if shape is None else shape.union(member_shape)
    return shape


def piece_table(data: TokenizedSet, sample: int, weight: float, token_weight: Sequence[float]) -> PieceTable:
    """Looks up a sample."""
    tokens, fields = slice(int(data.offsets[sample]), int(data.offsets[sample + 1])), data.fields_of(sample)
    return PieceTable(
        weight,
        token_weight,
        numbers={name: np.atleast_1d(data.numbers[name][sample]) for name in fields.numbers},
        reference=None if data.reference is None else data.reference_nll[sample],
        answer=None if data.answer is None else data.answer[tokens],
        reference_logprobs=None if data.reference is None else data.reference[tokens],
        values={name: data.values[name][tokens] for name in fields.values},
        teacher=None if data.teacher is None else data.teacher[slice(*data.learned_before[sample : sample + 2])],
        fields=fields,
    )


def empty_table(shape: TableShape, tokens: int, state: State | None = None) -> SampleTable:
    """Returns the table of a microbatch of padding.

    Args:
        state: width and dtype of the states of a teacher.
    """
    N, S, G, L = shape[:4]
    by_token = bool(L)
    return SampleTable(
        segments=np.zeros((N, S), np.int32),
        adapter=np.full(N, -1, np.int32),
        weight=np.zeros(N, np.float32),
        token_weight=np.zeros((N, S), np.float32),
        numbers={name: np.zeros((N, G), np.float32) for name in sorted(shape.numbers)},
        reference=np.zeros((N, S), np.float32) if shape.reference else None,
        rows=np.full((N, L), tokens, np.int32) if by_token else None,
        in_answer=np.zeros(tokens, bool) if by_token else None,
        reference_logprobs=np.zeros(tokens, np.float32) if by_token and shape.reference else None,
        values={name: np.zeros(tokens, np.float32) for name in sorted(shape.values)},
        last=np.zeros((N, S), np.int32) if shape.last else None,
        teacher=np.zeros((tokens, state.width), state.dtype) if shape.teacher and state is not None else None,
        fields={fields: np.zeros(N, bool) for fields in sorted(shape.fields)},
    )


def fill_place(
    table: SampleTable, number: int, piece: PieceTable, *, adapter: int, first_segment: int, start: int,
    lengths: Sequence[int], learned: np.ndarray,
) -> None:  # fmt: skip
    """Writes one sample into a table.

    Args:
        first_segment: number of its first segment in the microbatch.
        start: its first row in the microbatch.
        lengths: tokens of its segments.
        learned: bool, of its tokens; never True for the first of a segment.
    """
    S = len(lengths)
    table.segments[number, :S] = range(first_segment, first_segment + S)
    table.adapter[number], table.weight[number] = adapter, piece.weight
    table.token_weight[number, :S] = piece.token_weight
    if piece.fields is not None and piece.fields in table.fields:
        table.fields[piece.fields][number] = True
    for name, numbers in piece.numbers.items():
        table.numbers[name][number, : len(numbers)] = numbers
    if table.reference is not None and piece.reference is not None:
        table.reference[number, :S] = piece.reference
    if table.last is not None:
        table.last[number, :S] = start + np.cumsum(lengths) - 1
    (tokens,) = np.nonzero(learned)
    rows = start + tokens - 1  # the row before a token predicts it
    if table.teacher is not None and piece.teacher is not None:
        table.teacher[rows] = piece.teacher
    if table.rows is None:
        return
    if len(rows) <= table.rows.shape[1]:  # more only if the adapter's objective does not need tokens
        table.rows[number, : len(rows)] = rows
    assert table.in_answer is not None
    table.in_answer[rows] = True if piece.answer is None else piece.answer[tokens]
    if table.reference_logprobs is not None and piece.reference_logprobs is not None:
        table.reference_logprobs[rows] = piece.reference_logprobs[tokens]
    for name, values in piece.values.items():
        if name in table.values:
            table.values[name][rows] = values[tokens]
