"""Tokenises a source: tokens with a loss mask, cut to length, and a report.

T tokens of all samples together · n samples
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data import cache
from lorafusion_jax.data.formats import Layout, detect_layout
from lorafusion_jax.data.parse_examples import parse_examples, refuse_shortened
from lorafusion_jax.data.render import EncodedRows, encode_examples
from lorafusion_jax.data.segments import code_of, columns_of, read_segments
from lorafusion_jax.data.sources import RawSource, Rows, open_source, parse_rows
from lorafusion_jax.data.tokenizer import Encoded, Tokenizer
from lorafusion_jax.errors import DataError
from lorafusion_jax.objective.protocol import SFT, Chosen

MOST_LOST = 0.01  # largest share of rows without a learned token that is not an error
CHARACTERS_PER_TOKEN = 256
QUANTILES = (0.5, 0.9, 0.98, 1.0)


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


def load_samples(
    source: str,
    *,
    settings: DataSettings,
    tokenizer: Tokenizer,
    adapter: str,
    base_dir: str | Path = ".",
    cache_dir: Path | None = None,
    objective: Chosen = SFT,
) -> TokenizedSet:
    """Reads, renders and tokenises a source, or loads it from the cache.

    Args:
        source: path or `hf:org/set[:split]`, see `open_source`.
        adapter: adapter name for messages.
        base_dir: folder for relative paths.
        cache_dir: folder of the token cache (None: the user's cache folder).
        objective: the objective; it may define the segments of a sample.

    Raises:
        DataError, ErrorList: all problems of the source, with their rows.
    """
    raw = open_source(source, Path(base_dir))
    own = objective.objective.segments is not None
    code = code_of(objective) if own else ""
    if code is None:  # a cache key could not reflect changes of the objective's code
        return _tokenize_segments(raw, settings, tokenizer, adapter, objective)
    entry = cache.entry_path(raw, settings, tokenizer, cache_dir, reader=f"{objective.name} {code}" if own else "")
    stored = cache.load(entry)
    if stored is not None:
        arrays, report = stored
        lists = {name: tuple(report[name]) for name in ("dropped", "too_long", "uncut", "notes")}
        return TokenizedSet(**arrays, report=DataReport(**{**report, **lists, "source": source}))
    if own:
        samples = _tokenize_segments(raw, settings, tokenizer, adapter, objective)
    else:
        samples = _tokenize(raw, settings, tokenizer, adapter)
    cache.store(entry, samples)
    return samples


def _tokenize(raw: RawSource, settings: DataSettings, tokenizer: Tokenizer, adapter: str) -> TokenizedSet:
    rows = parse_rows(raw)
    layout = detect_layout(rows, format=settings.format, columns=settings.columns)
    loss = _resolve_loss(settings.loss, layout, rows, adapter)
    # Characters far beyond max_length need not be tokenised: a token has far fewer than 256.
    cut_at = CHARACTERS_PER_TOKEN * settings.max_length if settings.on_long == "cut" else None
    examples = parse_examples(rows, layout, adapter=adapter, need_answer=loss != "all", cut_at=cut_at)
    encoded = encode_examples(examples.values, tokenizer, rows=rows, adapter=adapter, loss=loss)
    enough = 2 * settings.max_length  # a margin, because the last tokens depend on the cut
    refuse_shortened([row for row in examples.shortened if len(encoded.samples[row].tokens) < enough], rows, adapter)
    for sample in encoded.samples:
        sample.mask[:1] = False  # the first token cannot be predicted
    fit = _fit(encoded.samples, settings, rows, adapter)
    return _collect(fit, encoded, layout, rows, loss, raw, tokenizer)


def _unused(layout: Layout) -> list[str]:
    if not layout.unused:
        return []
    names = ", ".join(f"'{column}'" for column in layout.unused)
    columns = f"the column {names} is" if len(layout.unused) == 1 else f"the columns {names} are"
    return [f"[data.unused-column] {columns} not used; data.columns can give a column a role"]


def _tokenize_segments(
    raw: RawSource, settings: DataSettings, tokenizer: Tokenizer, adapter: str, chosen: Chosen
) -> TokenizedSet:
    """Like `_tokenize` for rows with several segments. Each segment must fit and have a learned token."""
    rows = parse_rows(raw)
    loss = "completion" if settings.loss == "auto" else settings.loss
    rendered = [
        encode_examples(examples, tokenizer, rows=rows, adapter=adapter, loss=loss)
        for examples in read_segments(rows, chosen, settings.columns, adapter=adapter)
    ]
    texts = [each.samples for each in rendered]
    for segment in texts:
        for text in segment:
            text.mask[:1] = False
    fits = [_fit(segment, settings, rows, adapter) for segment in texts]
    kept = sorted(set.intersection(*(set(fit.kept) for fit in fits)))
    merged = _Fit(
        kept=kept,
        cut=sorted({row for fit in fits for row in fit.cut} & set(kept)),
        dropped=sorted({row for fit in fits for row in fit.dropped}),
        too_long=sorted({row for fit in fits for row in fit.too_long}),
        limit=settings.max_length * len(texts),
    )
    samples = [_one_after_another(parts, settings.max_length) for parts in zip(*texts, strict=True)]
    columns = columns_of(rows, chosen, settings.columns)
    unused = tuple(dict.fromkeys(key for row in rows.values for key in row if key not in columns.values()))
    layout = Layout(format=chosen.name, columns=columns, unused=unused)
    lengths = [[min(len(segment[row].tokens), settings.max_length) for segment in texts] for row in kept]
    longest = [max(len(part.tokens) for part in parts) for parts in zip(*texts, strict=True)]
    notes = tuple(dict.fromkeys(note for each in rendered for note in each.notes))
    whole = _collect(merged, EncodedRows(samples=samples, notes=notes), layout, rows, loss, raw, tokenizer)
    report = dataclasses.replace(whole.report, uncut=_uncut(longest))
    return dataclasses.replace(whole, segment_lengths=np.array(lengths, np.int64), report=report)


def _one_after_another(parts: Sequence[Encoded], limit: int) -> Encoded:
    tokens, masks = ([getattr(part, name)[:limit] for part in parts] for name in ("tokens", "mask"))
    return Encoded(np.concatenate(tokens), np.concatenate(masks))


def _resolve_loss(loss: str, layout: Layout, rows: Rows, adapter: str) -> str:
    if loss == "auto":
        return {"messages": "assistant", "conversations": "assistant", "text": "all"}.get(layout.format, "completion")
    if loss != "all" and layout.format == "text":
        raise DataError(
            "data.no-answer-column",
            f"{adapter}: data.loss is '{loss}', but plain text has no answers.",
            where=rows.source,
            fix="data.loss: all   or   data.loss: auto",
        )
    return loss


@dataclass(slots=True, kw_only=True)
class _Fit:
    kept: list[int]
    cut: list[int]
    dropped: list[int]
    too_long: list[int]
    limit: int


def _fit(encoded: Sequence[Encoded], settings: DataSettings, rows: Rows, adapter: str) -> _Fit:
    limit = settings.max_length
    long = [row for row, sample in enumerate(encoded) if len(sample.tokens) > limit]
    none_left = settings.on_long == "drop" and len(long) == len(encoded)
    if none_left or (long and settings.on_long == "error"):
        raise _too_long(long, encoded, limit, rows, adapter)
    too_long = long if settings.on_long == "drop" else []
    left = np.ones(len(encoded), bool)
    left[too_long] = False
    dropped = [row for row in np.flatnonzero(left).tolist() if not encoded[row].mask[:limit].any()]
    if len(dropped) > MOST_LOST * len(encoded):
        raise _empty_loss(dropped, encoded, limit, rows, adapter)
    left[dropped] = False
    return _Fit(
        kept=np.flatnonzero(left).tolist(),
        cut=[row for row in long if left[row]],
        dropped=dropped,
        too_long=too_long,
        limit=limit,
    )


def _too_long(long: list[int], encoded: Sequence[Encoded], limit: int, rows: Rows, adapter: str) -> DataError:
    longest = max(long, key=lambda row: len(encoded[row].tokens))
    tokens = len(encoded[longest].tokens)
    return DataError(
        "data.too-long",
        f"{adapter}: {len(long)} of {len(encoded)} rows are longer than data.max_length={limit}.",
        where=rows.places(long),
        why=f"{rows.place(longest)} has {tokens} tokens",
        fix=f"data.max_length: {_round_up(tokens)}   or   data.on_long: cut",
    )


def _empty_loss(dropped: list[int], encoded: Sequence[Encoded], limit: int, rows: Rows, adapter: str) -> DataError:
    first = encoded[dropped[0]]
    what = f"{adapter}: {len(dropped)} of {len(encoded)} rows have no token to learn from."
    if not first.mask.any():
        return DataError(
            "data.empty-loss",
            what,
            where=rows.places(dropped),
            why=f"{rows.place(dropped[0])} "
            + ("is empty" if len(first.tokens) < 2 else f"has no answer in its {len(first.tokens)} tokens"),
            fix="take these rows out, or give base.model a chat template that renders their answers",
        )
    needed = max(int(encoded[row].mask.argmax()) + 1 for row in dropped if encoded[row].mask.any())
    return DataError(
        "data.empty-loss",
        what,
        where=rows.places(dropped),
        why=f"data.max_length={limit} cuts the answer ({rows.place(dropped[0])}: {limit} of "
        f"{len(first.tokens)} tokens kept, the answer starts at token {int(first.mask.argmax())})",
        fix=f"data.max_length: {_round_up(needed + 1)}   or   data.on_long: drop",
    )


def _round_up(tokens: int) -> int:
    return 1 << (tokens - 1).bit_length()


def _collect(
    fit: _Fit, rendered: EncodedRows, layout: Layout, rows: Rows, loss: str, raw: RawSource, tokenizer: Tokenizer
) -> TokenizedSet:
    encoded = rendered.samples
    tokens = np.concatenate([encoded[row].tokens[: fit.limit] for row in fit.kept])
    mask = np.concatenate([encoded[row].mask[: fit.limit] for row in fit.kept])
    lengths = np.array([min(len(encoded[row].tokens), fit.limit) for row in fit.kept])
    report = DataReport(
        source=raw.name,
        format=layout.format,
        columns=layout.columns,
        loss=loss,
        rows=len(rows.values),
        tokens=len(tokens),
        loss_tokens=int(mask.sum()),
        longest=int(lengths.max()),
        cut=len(fit.cut),
        dropped=tuple(fit.dropped),
        too_long=tuple(fit.too_long),
        uncut=_uncut([len(sample.tokens) for sample in encoded]),
        template_hash="plain" if layout.format == "text" else tokenizer.template_hash,
        data_hash=raw.digest[:16],
        notes=(*_unused(layout), *rendered.notes),
    )
    return TokenizedSet(
        tokens=tokens,
        loss_mask=mask,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        rows=np.array(fit.kept, np.int64),
        report=report,
    )


def _uncut(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(length) for length in np.quantile(lengths, QUANTILES, method="inverted_cdf"))
