"""Tokenises a source: tokens with a loss mask, cut to length, and a report."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data import cache
from lorafusion_jax.data.fit_length import Fit, fit_length
from lorafusion_jax.data.formats import Layout, detect_layout
from lorafusion_jax.data.other_rows import refuse_other_rows
from lorafusion_jax.data.parse_examples import parse_examples, refuse_shortened
from lorafusion_jax.data.render import EncodedRows, encode_examples
from lorafusion_jax.data.rows import RawSource, Rows
from lorafusion_jax.data.segments import code_of
from lorafusion_jax.data.sources import open_source, parse_rows
from lorafusion_jax.data.tokenized_segments import tokenize_segments
from lorafusion_jax.data.tokenized_set import DataReport, TokenizedSet, quantiles
from lorafusion_jax.data.tokenizer import Tokenizer
from lorafusion_jax.errors import DataError
from lorafusion_jax.objective.protocol import SFT, Chosen

CHARACTERS_PER_TOKEN = 256


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
    has_segments = objective.objective.segments is not None
    code = code_of(objective) if has_segments else ""
    if code is None:  # a cache key could not reflect changes of the objective's code
        return tokenize_segments(raw, settings, tokenizer, adapter, objective)
    entry = cache.entry_path(raw, settings, tokenizer, cache_dir, reader=code)
    stored = cache.load(entry)
    if stored is not None:
        arrays, report = stored
        lists = {name: tuple(report[name]) for name in ("dropped", "too_long", "uncut", "notes")}
        return TokenizedSet(
            **arrays,
            report=DataReport(**{**report, **lists, "source": source}),
            group=objective.group or 1,
        )
    if has_segments:
        samples = tokenize_segments(raw, settings, tokenizer, adapter, objective)
    else:
        samples = _tokenize(raw, settings, tokenizer, adapter, objective.name)
    cache.store(entry, samples)
    return samples


def _tokenize(
    raw: RawSource, settings: DataSettings, tokenizer: Tokenizer, adapter: str, objective: str
) -> TokenizedSet:
    rows = parse_rows(raw)
    refuse_other_rows(rows, settings, adapter, objective)
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
    fit = fit_length(encoded.samples, settings, rows, adapter)
    return _collect(fit, encoded, layout, rows, loss, raw, tokenizer)


def _unused_notes(layout: Layout) -> list[str]:
    if not layout.unused:
        return []
    names = ", ".join(f"'{column}'" for column in layout.unused)
    columns = f"the column {names} is" if len(layout.unused) == 1 else f"the columns {names} are"
    return [f"[data.unused-column] {columns} not used; data.columns can give a column a role"]


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


def _collect(
    fit: Fit, rendered: EncodedRows, layout: Layout, rows: Rows, loss: str, raw: RawSource, tokenizer: Tokenizer
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
        uncut=quantiles([len(sample.tokens) for sample in encoded]),
        template_hash="plain" if layout.format == "text" else tokenizer.template_hash,
        data_hash=raw.digest[:16],
        notes=(*_unused_notes(layout), *rendered.notes),
    )
    return TokenizedSet(
        tokens=tokens,
        loss_mask=mask,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        rows=np.array(fit.kept, np.int64),
        report=report,
    )
