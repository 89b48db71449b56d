"""Tokenised samples of one source, and statistics of them.

T tokens of all samples together · n samples
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np


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
        template_hash: hash of the chat template, `plain` if none was used.
        data_hash: hash of the source's content.
        notes: notes on content that the tokens omit, each with a code: unused columns, text that the chat template
            leaves out.
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
    template_hash: str
    data_hash: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedSet:
    """Samples of one source, concatenated.

    Attributes:
        tokens: int32 [T].
        loss_mask: bool [T], True where the token is learned, that is, predicted from the tokens before it. Never True
            for the first token of a sample; True at least once per sample.
        offsets: int64 [n + 1], start of each sample.
        rows: int64 [n], row of the source, from 0.
        segment_lengths: int64 [n, S], tokens of each segment of a sample (None: one segment per sample).
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    report: DataReport
    segment_lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and loss mask of one sample."""
        here = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.tokens[here], self.loss_mask[here]

    def segment_lengths_of(self, index: int) -> tuple[int, ...] | None:
        """Returns the length of each segment of a sample; None if samples have one segment."""
        return None if self.segment_lengths is None else tuple(self.segment_lengths[index].tolist())

    @cached_property
    def digest(self) -> str:
        """Hash of the samples, 16 hex digits."""
        content = hashlib.sha256()
        for array in (self.tokens, self.loss_mask, self.offsets, self.segment_lengths):
            if array is not None:
                content.update(np.ascontiguousarray(array).tobytes())
        return content.hexdigest()[:16]
