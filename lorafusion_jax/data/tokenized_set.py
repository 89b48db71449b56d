"""Tokenised samples of one source, and statistics of them.

T tokens of all samples together · n samples
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lorafusion_jax.data.disk_arrays import blocks, release

SUMMED_SAMPLES = 1024  # at once
QUANTILES = (0.5, 0.9, 0.98, 1.0)


class Fields(NamedTuple):
    """Names of the numbers and values of a sample. Optional ones are in the samples of some files only."""

    objective: str
    numbers: tuple[str, ...]
    values: tuple[str, ...]


def quantiles(lengths: Sequence[int]) -> tuple[int, ...]:
    """Returns the 50, 90, 98 and 100 % quantiles."""
    return tuple(int(length) for length in np.quantile(lengths, QUANTILES, method="inverted_cdf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Statistics of a source and its tokens. Rows are numbered from 0.

    Attributes:
        source: as the job file spells it.
        format: one of the five formats, or the name of the objective that defines the segments.
        columns: role → column.
        loss: which tokens are learned: assistant, completion or all.
        rows: number of rows of the source.
        tokens: number of tokens of the kept samples.
        loss_tokens: number of learned tokens among them.
        longest: number of tokens of the longest kept sample.
        cut: number of rows cut at max_length.
        dropped: rows removed because they have no learned token.
        too_long: rows removed because data.on_long is drop.
        uncut: 50, 90, 98 and 100 % quantiles of the lengths before cutting.
        notes: notes on content that the tokens omit, each with a code: unused columns, text that the chat template
            leaves out.
        parts: of each file, if there are several.
    """

    source: str
    format: str
    columns: dict[str, str]
    loss: str
    rows: int
    tokens: int
    loss_tokens: int
    longest: int
    cut: int
    dropped: tuple[int, ...]
    too_long: tuple[int, ...]
    uncut: tuple[int, ...]
    notes: tuple[str, ...] = ()
    parts: tuple[DataReport, ...] = ()

    @property
    def files(self) -> tuple[DataReport, ...]:
        """The report of each file."""
        return self.parts or (self,)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedSet:
    """Samples of one source, concatenated.

    Attributes:
        tokens: int32 [T].
        loss_mask: bool [T], True where the token is learned, that is, predicted from the tokens before it. Never True
            for the first token of a segment.
        offsets: int64 [n + 1], start of each sample.
        rows: int64 [n], row of the source, from 0.
        segment_lengths: int64 [n, S], tokens of each segment of a sample (None: one segment per sample). A sample of a
            group has the segments of its first row, then those of the second.
        numbers: name → float32 [n] or, for groups of G rows, [n, G]: numbers of the rows; NaN in samples without.
        values: name → float32 [T], numbers of the tokens; 0 outside of answers, NaN in samples without.
        answer: bool [T], whether the token belongs to an answer (None: as `loss_mask`).
        group: rows of a sample.
        parts: int32 [n], number of the source of each sample (None: there is one).
        reference: float32 [T], log p of the learned tokens under a reference (None: no objective needs it, or it is not
            computed yet).
        teacher: [learned tokens, D], the final-normed states of a reference that predict them (None: likewise).
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    report: DataReport
    segment_lengths: np.ndarray | None = None
    numbers: Mapping[str, np.ndarray] = field(default_factory=dict)
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    answer: np.ndarray | None = None
    group: int = 1
    parts: np.ndarray | None = None
    reference: np.ndarray | None = None
    teacher: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and loss mask of one sample."""
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.tokens[span], self.loss_mask[span]

    def select(self, indices: np.ndarray, report: DataReport) -> TokenizedSet:
        """Returns some samples as a set of their own.

        Args:
            report: statistics of the new set, without its numbers of rows and tokens.
        """
        assert self.reference is None, "it is computed later"
        lengths = self.lengths[indices]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(self.offsets.dtype)
        starts = np.repeat(self.offsets[indices] - offsets[:-1], lengths)
        tokens = starts + np.arange(offsets[-1])  # of each token, its place in this set
        loss_mask = self.loss_mask[tokens]
        return replace(
            self,
            tokens=self.tokens[tokens],
            loss_mask=loss_mask,
            offsets=offsets,
            rows=self.rows[indices],
            segment_lengths=None if self.segment_lengths is None else self.segment_lengths[indices],
            numbers={name: array[indices] for name, array in self.numbers.items()},
            values={name: array[tokens] for name, array in self.values.items()},
            answer=None if self.answer is None else self.answer[tokens],
            parts=None if self.parts is None else self.parts[indices],
            report=replace(
                report,
                rows=len(indices) * self.group,
                tokens=len(tokens),
                loss_tokens=int(loss_mask.sum()),
                longest=int(lengths.max()),
            ),
        )

    def segment_lengths_of(self, index: int) -> tuple[int, ...] | None:
        """Returns the length of each segment of a sample; None if samples have one segment."""
        return None if self.segment_lengths is None else tuple(self.segment_lengths[index].tolist())

    def fields_of(self, index: int) -> Fields:
        """Returns which numbers and values a sample has."""
        numbers = (name for name, array in self.numbers.items() if not np.isnan(array[index]).any())
        values = (name for name, array in self.values.items() if not np.isnan(array[self.offsets[index]]))
        return Fields(self.report.format, tuple(sorted(numbers)), tuple(sorted(values)))

    @cached_property
    def fields(self) -> frozenset[Fields]:
        """The fields of all samples."""
        if not self.numbers and not self.values:
            return frozenset([Fields(self.report.format, (), ())])
        columns = [array.reshape(len(self), -1)[:, 0] for array in self.numbers.values()]
        columns += [array[self.offsets[:-1]] for array in self.values.values()]
        _, examples = np.unique(np.isnan(np.stack(columns, axis=1)), axis=0, return_index=True)
        return frozenset(self.fields_of(int(index)) for index in examples)

    @cached_property
    def segment_starts(self) -> np.ndarray:
        """First token of each segment of each sample, int64 [n, S]."""
        if self.segment_lengths is None:
            return self.offsets[:-1, None]
        return self.offsets[:-1, None] + np.cumsum(self.segment_lengths, axis=1) - self.segment_lengths

    @cached_property
    def segment_tokens(self) -> np.ndarray:
        """Number of learned tokens of each segment of each sample, int64 [n, S]."""
        return self.sum_segments(self.loss_mask, np.int64)

    def sum_segments(self, values: np.ndarray, dtype: type = np.float64) -> np.ndarray:
        """Sums numbers of the tokens, [T], over each segment of each sample: [n, S]."""
        starts, sums = self.segment_starts, []
        for first in range(0, len(self), SUMMED_SAMPLES):
            part = starts[first : first + SUMMED_SAMPLES]
            begin, end = self.offsets[first], self.offsets[min(first + SUMMED_SAMPLES, len(self))]
            sums.append(np.add.reduceat(values[begin:end].astype(dtype), part.reshape(-1) - begin).reshape(part.shape))
            release(values)
        return np.concatenate(sums)

    @property
    def largest_token(self) -> int:
        return max((int(block.max()) for block in blocks(self.tokens)), default=-1)

    @cached_property
    def learned_before(self) -> np.ndarray:
        """Number of learned tokens before each sample, int64 [n + 1]."""
        return np.concatenate([[0], np.cumsum(self.segment_tokens.sum(axis=1))])

    @cached_property
    def reference_nll(self) -> np.ndarray:
        """Σ -log p of the learned tokens of each segment under the reference, float32 [n, S]."""
        assert self.reference is not None
        return -self.sum_segments(self.reference).astype(np.float32)

    @cached_property
    def digest(self) -> str:
        """Hash of the samples, 16 hex digits."""
        content = hashlib.sha256()
        more = [array for arrays in (self.numbers, self.values) for _, array in sorted(arrays.items())]
        for array in (self.tokens, self.loss_mask, self.offsets, self.segment_lengths, self.answer, *more):
            for block in () if array is None else blocks(array):
                content.update(np.ascontiguousarray(block).data)
        return content.hexdigest()[:16]
