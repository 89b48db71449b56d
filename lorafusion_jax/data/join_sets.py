"""Joins tokenised sets: blocks of one source, or several sources. Large sets stay on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lorafusion_jax.data.disk_arrays import GrowingArrays, release
from lorafusion_jax.data.join_messages import join_notes
from lorafusion_jax.data.tokenized_set import SUMMED_SAMPLES, DataReport, TokenizedSet
from lorafusion_jax.files import user_cache

OF_TOKENS, OF_SAMPLES = "values.", "numbers."


class SetBuilder:
    """Appends sets. Only numbers of samples stay in memory, and tokens of small sets.

    Args:
        folder: for large sets, see `GrowingArrays`.
    """

    def __init__(self, folder: Path):
        self._arrays = GrowingArrays(folder)
        self._lengths: list[np.ndarray] = []
        self._first: TokenizedSet | None = None
        self._tokens, self._samples = 0, 0
        self._named: dict[str, tuple[int, ...]] = {}  # arrays of numbers and values: their shape of a sample or token
        self._has_answer = False

    def append(self, samples: TokenizedSet, part: int | None = None) -> None:
        """Adds samples at the end.

        Args:
            part: number of their source.
        """
        self._first = samples if self._first is None else self._first
        self._lengths.append(samples.lengths)
        append = self._arrays.append
        append("tokens", samples.tokens)
        append("loss_mask", samples.loss_mask)
        append("rows", samples.rows)
        parts = samples.parts if part is None else np.full(len(samples), part, np.int32)
        if parts is not None:
            append("parts", parts)
        if samples.segment_lengths is not None:
            append("segment_lengths", samples.segment_lengths)
            append("answer", samples.loss_mask if samples.answer is None else samples.answer)
            self._has_answer |= samples.answer is not None
        self._append_named(samples)
        self._tokens += len(samples.tokens)
        self._samples += len(samples)

    def _append_named(self, samples: TokenizedSet) -> None:
        """Adds numbers and values. Samples without have NaN: what other sets hold must not reach them."""
        arrays = {f"{OF_SAMPLES}{name}": array for name, array in samples.numbers.items()}
        arrays |= {f"{OF_TOKENS}{name}": array for name, array in samples.values.items()}

        def missing(name: str, num_samples: int, tokens: int) -> np.ndarray:
            count = tokens if name.startswith(OF_TOKENS) else num_samples
            return np.full((count, *self._named[name]), np.nan, np.float32)

        for name, array in arrays.items():
            if name not in self._named:
                self._named[name] = array.shape[1:]
                self._arrays.append(name, missing(name, self._samples, self._tokens))
        for name in self._named:
            array = arrays.get(name)
            self._arrays.append(name, missing(name, len(samples), len(samples.tokens)) if array is None else array)

    def finish(self, report: DataReport) -> tuple[TokenizedSet, Path | None]:
        """Returns the joined set, and the folder of its arrays if they are on disk."""
        assert self._first is not None
        arrays, folder = self._arrays.finish()
        lengths = np.concatenate(self._lengths)
        joined = replace(
            self._first,
            tokens=arrays["tokens"],
            loss_mask=arrays["loss_mask"],
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(self._first.offsets.dtype),
            rows=np.array(arrays["rows"]),
            report=report,
            segment_lengths=_in_memory(arrays.get("segment_lengths")),
            numbers=_named(arrays, OF_SAMPLES),
            values=_named(arrays, OF_TOKENS),
            answer=arrays["answer"] if self._has_answer else None,
            parts=_in_memory(arrays.get("parts")),
        )
        return joined, folder

    def finish_temporary(self, report: DataReport) -> TokenizedSet:
        """`finish`, without a name on disk: the arrays live as long as the set."""
        joined, _ = self.finish(report)
        self._arrays.discard()
        return joined

    def discard(self) -> None:
        self._arrays.discard()


def join_sources(sets: Sequence[TokenizedSet], folder: Path) -> TokenizedSet:
    """Joins the sets of several sources, in order."""
    builder = SetBuilder(folder)
    for part, samples in enumerate(sets):
        builder.append(samples, part)
    reports = [samples.report for samples in sets]
    first = reports[0]
    name = first.source if len(reports) == 1 else f"{first.source} and {len(reports) - 1} more"
    report = replace(join_reports(reports), source=name, dropped=(), too_long=(), notes=(), parts=tuple(reports))
    return builder.finish_temporary(report)


def select_samples(samples: TokenizedSet, indices: np.ndarray, report: DataReport) -> TokenizedSet:
    """`TokenizedSet.select`, a few samples after the other, so that a large set stays on disk."""
    builder = SetBuilder(user_cache("tokens"))
    longest, learned = 0, 0
    for start in range(0, len(indices), SUMMED_SAMPLES):
        block = samples.select(indices[start : start + SUMMED_SAMPLES], report)
        longest, learned = max(longest, block.report.longest), learned + block.report.loss_tokens
        builder.append(block)
        release(samples.tokens)
        release(samples.loss_mask)
    selection = builder.finish_temporary(report)
    of_selection = replace(
        report,
        rows=len(indices) * samples.group,
        tokens=len(selection.tokens),
        loss_tokens=learned,
        longest=longest,
    )
    return replace(selection, report=of_selection)


def join_reports(reports: Iterable[DataReport]) -> DataReport:
    """Adds the statistics of blocks of a source. Quantiles are upper bounds: the largest of the blocks."""
    reports = list(reports)
    first = reports[0]
    return replace(
        first,
        columns={role: name for report in reports for role, name in report.columns.items()},
        rows=sum(report.rows for report in reports),
        tokens=sum(report.tokens for report in reports),
        loss_tokens=sum(report.loss_tokens for report in reports),
        longest=max(report.longest for report in reports),
        cut=sum(report.cut for report in reports),
        dropped=tuple(row for report in reports for row in report.dropped),
        too_long=tuple(row for report in reports for row in report.too_long),
        uncut=tuple(max(lengths) for lengths in zip(*(report.uncut for report in reports), strict=True)),
        notes=join_notes((note for report in reports for note in report.notes), sum(report.rows for report in reports)),
    )


def _named(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _in_memory(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else np.array(array)
