"""Tokenises a source: tokens with a loss mask, cut to length, and a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data import cache
from lorafusion_jax.data.chosen_rows import ChosenRows, choose_rows
from lorafusion_jax.data.fit_length import MOST_LOST, Fit, fit_length
from lorafusion_jax.data.formats import FORMAT, LABELS, Layout, detect_layout, parse_token_rows, unended_rows
from lorafusion_jax.data.join_messages import join_errors
from lorafusion_jax.data.join_sets import SetBuilder, join_reports
from lorafusion_jax.data.messages import ROLES, BadRow
from lorafusion_jax.data.render import EncodedRows, encode_examples, joined_note
from lorafusion_jax.data.row_parsers import PARSERS, Chat, Example, Pair, Text
from lorafusion_jax.data.rows import RawSource, Rows, RowsError, typed_row
from lorafusion_jax.data.segments import code_of
from lorafusion_jax.data.sources import open_source, row_blocks
from lorafusion_jax.data.tokenized_segments import refuse_other_rows, tokenize_segments
from lorafusion_jax.data.tokenized_set import DataReport, Fields, TokenizedSet, quantiles
from lorafusion_jax.data.tokenizer import Tokenizer
from lorafusion_jax.errors import DataError, ErrorList, LoraFusionError, raise_all
from lorafusion_jax.objective.protocol import SFT, Chosen

LARGEST_ROW = 4 << 20  # characters; a tokenizer takes about 100 bytes and 1 µs for each
FIXES = {
    "data.no-answer": "give these rows an answer or take them out",
    "data.not-text": "take these rows out: adapters learn from text; images, audio and video are not supported",
    "data.bad-role": "one of " + ", ".join(ROLES),
    "data.bad-type": "text, or for messages a list of {role, content}",
    "data.bad-column": "repair these rows, or take the column out",
    "data.two-systems": "keep the system text in one place",
    "data.bad-weight": "weight: 0 or 1; train, loss, masked and the like: true or false; on messages of the assistant",
    "data.large-row": "split the text into several rows, or take these rows out",
}
PROBLEMS = {
    "data.no-answer": "have no answer",
    "data.not-text": "hold images, audio or video",
    "data.bad-role": "have an unknown role",
    "data.bad-type": "cannot be used as they are",
    "data.bad-column": "have a column that cannot be used",
    "data.two-systems": "have two different system texts",
    "data.bad-weight": "have an invalid weight or train flag",
    "data.large-row": "are too large to be tokenised",
}
CHARACTERS_PER_TOKEN = 256
MOST_NAMED = 3  # reasons that a note tells
LEFT_OUT = {*PROBLEMS, "data.bad-row", "data.bad-json", "data.template"}  # of rows that are left out, if they are few
MOST_PROBLEMS = 20  # after so many the rest of a source is not read


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
    chosen = choose_rows(source, Path(base_dir), settings.where) if settings.where else None
    raw = chosen.raw if chosen else open_source(source, Path(base_dir))
    has_segments = objective.objective.segments is not None
    code = code_of(objective) if has_segments else ""
    folder = cache_dir or cache.token_cache()
    if code is None:  # a cache key could not reflect changes of the objective's code
        return _tokenize_blocks(raw, settings, tokenizer, adapter, objective, folder, None, chosen)
    entry = cache.entry_path(raw, settings, tokenizer, cache_dir, reader=code)
    stored = cache.load(entry)
    if stored is not None:
        arrays, report = stored
        lists = {name: tuple(report[name]) for name in ("dropped", "too_long", "uncut", "notes", "parts")}
        return TokenizedSet(
            **arrays,
            report=DataReport(**{**report, **lists, "source": source}),
            group=objective.group or 1,
        )
    return _tokenize_blocks(raw, settings, tokenizer, adapter, objective, folder, entry, chosen)


def _tokenize_blocks(
    raw: RawSource,
    settings: DataSettings,
    tokenizer: Tokenizer,
    adapter: str,
    objective: Chosen,
    folder: Path,
    entry: Path | None,
    chosen: ChosenRows | None,
) -> TokenizedSet:
    """Tokenises a source block by block, so that neither its rows nor its tokens need fit into memory.

    Args:
        folder: for the arrays of a large set.
        entry: where the set is cached (None: nowhere).
        chosen: the rows of the source by `data.where` (None: all of them).
    """
    builder, reports, problems, row_errors, num_read = SetBuilder(folder), [], [], [], 0
    fields: frozenset[Fields] = frozenset()
    try:
        blocks = row_blocks(raw, one_block=objective.group is not None)
        for rows in [chosen.of(settings.where)] if chosen else blocks:
            first, num_read = reports[0] if reports else None, num_read + len(rows.values)

            def tokenize(rows: Rows, first: DataReport | None = first) -> TokenizedSet:
                if objective.objective.segments is not None:
                    return tokenize_segments(raw, rows, settings, tokenizer, adapter, objective, first)
                return _tokenize(raw, rows, settings, tokenizer, adapter, objective.name, first)

            try:
                samples = tokenize(rows) if settings.on_bad == "error" else _of_good_rows(rows, tokenize, row_errors)
            except DataError as problem:
                problems.append(problem)
            except ErrorList as problem:
                problems += problem.errors
            else:
                if reports and (problem := _unlike_before(rows, samples, fields, reports[0], adapter)) is not None:
                    problems.append(problem)
                    break
                fields = samples.fields
                builder.append(samples)
                reports.append(samples.report)
            if len(problems) > MOST_PROBLEMS:
                break
        num_bad, num_rows = sum(error.count for error in row_errors), sum(report.rows for report in reports)
        if num_bad > MOST_LOST * (num_rows + num_bad):
            problems = [*row_errors, *problems]
        raise_all(join_errors(problems, num_read))
        report = join_reports(reports)
        if row_errors:
            reasons = "; ".join(f"{error.where} ({error.why})" for error in row_errors[:MOST_NAMED])
            note = f"[data.left-out] {num_bad} of {num_rows + num_bad} rows cannot be used: {reasons}"
            report = dataclasses.replace(report, notes=(*report.notes, note))
        samples, on_disk = builder.finish(report)
        if entry is not None and on_disk is None:
            cache.store(entry, samples)
        elif entry is not None and on_disk is not None:
            cache.store_folder(entry, samples, on_disk)
    finally:
        builder.discard()
    return samples


def _of_good_rows(rows: Rows, tokenize: Callable[[Rows], TokenizedSet], left_out: list[RowsError]) -> TokenizedSet:
    """Tokenises a block without the rows that cannot be used, which it adds to `left_out`."""
    while True:
        try:
            return tokenize(rows)
        except (DataError, ErrorList) as problem:
            errors = problem.errors if isinstance(problem, ErrorList) else (problem,)
            bad = [error for error in errors if isinstance(error, RowsError) and error.code in LEFT_OUT]
            numbers = {number for error in bad for number in error.rows}
            good = [row for row in range(len(rows.values)) if rows.number(row) not in numbers]
            if len(bad) < len(errors) or not good:
                raise
            left_out += bad
            rows = rows.at(good)


def _unlike_before(
    rows: Rows, samples: TokenizedSet, before: frozenset[Fields], first: DataReport, adapter: str
) -> DataError | None:
    """Returns an error if a block of rows has other optional columns than the rows before it."""
    names, earlier = ({*fields.numbers, *fields.values} for (fields,) in (samples.fields, before))
    if differing := sorted(names ^ earlier):
        name, has = differing[0], differing[0] in names
    elif samples.report.loss != first.loss:
        name, has = LABELS, LABELS in samples.report.columns
    else:
        return None
    why = f"it has {'a' if has else 'no'} '{name}', and the rows before {'have none' if has else 'have'}"
    fix = f"'{name}' in all rows of the file or in none; rows without may be in a file of their own"
    return rows.refuse("data.partial-column", f"{adapter}: only some rows have '{name}'.", [(0, why)], fix=fix)


def _tokenize(
    raw: RawSource,
    rows: Rows,
    settings: DataSettings,
    tokenizer: Tokenizer,
    adapter: str,
    objective: str,
    first: DataReport | None,
) -> TokenizedSet:
    """Tokenises a block of rows.

    Args:
        first: of the first block, whose format the others have; None for the first.
    """
    refuse_other_rows(rows, settings, adapter, objective)
    format = settings.format if first is None else first.format
    layout = detect_layout(rows, format=format, columns=settings.columns)
    loss = _resolve_loss(settings.loss, layout, rows, adapter)
    if layout.format == FORMAT:
        raise_all(rows.problems)
        samples = parse_token_rows(rows, layout.columns, adapter=adapter, loss=loss)
        encoded = EncodedRows(samples=samples, notes=tuple(unended_rows(samples, rows, tokenizer)))
    else:
        encoded = _render(rows, layout, settings, tokenizer, adapter, loss, is_first=first is None)
    for sample in encoded.samples:
        sample.mask[:1] = False  # the first token cannot be predicted
    fit = fit_length(encoded.samples, settings, rows, adapter, tokenizer.positions)
    return _collect(fit, encoded, layout, rows, loss, raw, tokenizer, settings)


def _render(
    rows: Rows, layout: Layout, settings: DataSettings, tokenizer: Tokenizer, adapter: str, loss: str, *, is_first: bool
) -> EncodedRows:
    # Characters far beyond max_length need not be tokenised: a token has far fewer than 256.
    cut_at = CHARACTERS_PER_TOKEN * settings.max_length if settings.on_long == "cut" else None
    examples = parse_examples(rows, layout, adapter=adapter, need_answer=loss != "all", cut_at=cut_at)
    encoded = encode_examples(examples.values, tokenizer, rows=rows, adapter=adapter, loss=loss)
    enough = 2 * settings.max_length  # a margin, because the last tokens depend on the cut
    refuse_shortened([row for row in examples.shortened if len(encoded.samples[row].tokens) < enough], rows, adapter)
    joined = joined_note(examples.values, tokenizer, rows) if is_first else []
    return dataclasses.replace(encoded, notes=(*joined, *encoded.notes))


def _unused_notes(layout: Layout, settings: DataSettings) -> list[str]:
    unused = [column for column in layout.unused if column not in settings.where]
    if not unused:
        return []
    names = ", ".join(f"'{column}'" for column in unused)
    columns = f"the column {names} is" if len(unused) == 1 else f"the columns {names} are"
    return [f"[data.unused-column] {columns} not used; data.columns can give a column a role"]


def _resolve_loss(loss: str, layout: Layout, rows: Rows, adapter: str) -> str:
    if loss == "auto":
        loss_of = {"messages": "assistant", "conversations": "assistant", "text": "all"}
        if layout.format == FORMAT and LABELS not in layout.columns:
            return "all"
        return loss_of.get(layout.format, "completion")
    if loss != "all" and layout.format == FORMAT and LABELS not in layout.columns:
        raise DataError(
            "data.no-answer-column",
            f"{adapter}: data.loss is '{loss}', but its rows of tokens have no labels.",
            where=rows.source,
            fix="data.loss: all   or   data.loss: auto",
        )
    if loss != "all" and layout.format == "text":
        raise DataError(
            "data.no-answer-column",
            f"{adapter}: data.loss is '{loss}', but plain text has no answers.",
            where=rows.source,
            fix="data.loss: all   or   data.loss: auto",
        )
    return loss


def _collect(
    fit: Fit, rendered: EncodedRows, layout: Layout, rows: Rows, loss: str, raw: RawSource, tokenizer: Tokenizer,
    settings: DataSettings,
) -> TokenizedSet:  # fmt: skip
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
        dropped=tuple(rows.number(row) for row in fit.dropped),
        too_long=tuple(rows.number(row) for row in fit.too_long),
        uncut=quantiles([len(sample.tokens) for sample in encoded]),
        notes=(*_unused_notes(layout, settings), *rendered.notes),
    )
    return TokenizedSet(
        tokens=tokens,
        loss_mask=mask,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        rows=np.array([rows.number(row) for row in fit.kept], np.int64),
        report=report,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """The rows of a source.

    Attributes:
        shortened: rows that were too large and were cut.
    """

    values: list[Example]
    shortened: tuple[int, ...] = ()


@dataclass(slots=True)
class _Problems:
    """Bad rows by error code."""

    rows_by_code: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, row: int, problem: BadRow) -> None:
        self.rows_by_code.setdefault(problem.code, []).append((row, problem.why))

    def errors(self, rows: Rows, adapter: str) -> list[LoraFusionError]:
        return [
            rows.refuse(
                code,
                f"{adapter}: {len(bad)} of {len(rows.values)} rows {PROBLEMS[code]}.",
                bad,
                fix=FIXES[code],
            )
            for code, bad in self.rows_by_code.items()
        ]


def parse_examples(
    rows: Rows, layout: Layout, *, adapter: str, need_answer: bool = True, cut_at: int | None = None
) -> Examples:
    """Turns rows into conversations, pairs or texts.

    Args:
        adapter: adapter name for messages.
        need_answer: False if every token is learned, so that a conversation needs no answer.
        cut_at: number of characters to which texts and pairs that are too large are cut (None: they are errors).

    Raises:
        DataError, ErrorList: the codes in `PROBLEMS`, each with its rows, and `rows.problems`.
    """
    parse, types = PARSERS[layout.format], rows.types_of_texts(layout.types)
    examples: list[Example] = []
    shortened: list[int] = []
    problems = _Problems()
    for number, row in enumerate(rows.values):
        try:
            example = parse(typed_row(row, types), layout.columns, need_answer)
            examples.append(_within_size(example, cut_at))
            if examples[-1] is not example:
                shortened.append(number)
        except BadRow as problem:
            problems.add(number, problem)
    raise_all([*rows.problems, *problems.errors(rows, adapter)])
    return Examples(values=examples, shortened=tuple(shortened))


def refuse_shortened(lacking: Sequence[int], rows: Rows, adapter: str) -> None:
    """Rejects rows that were cut before tokenisation and now have too few tokens.

    Raises:
        DataError: `data.large-row`.
    """
    problems = _Problems()
    for row in lacking:
        problems.add(row, BadRow("data.large-row", f"it has more than {LARGEST_ROW} characters in very long tokens"))
    raise_all(problems.errors(rows, adapter))


def _within_size(example: Example, cut_at: int | None) -> Example:
    """Returns the example, cut if it is too large: a tokenizer can only encode a text as a whole."""
    texts = [message.get("content") for message in example.messages] if isinstance(example, Chat) else example
    size = sum(len(text) for text in texts if isinstance(text, str))
    if size <= LARGEST_ROW:
        return example
    if cut_at is None or isinstance(example, Chat):
        raise BadRow("data.large-row", f"it has {size} characters, more than {LARGEST_ROW}")
    if isinstance(example, Text):
        return Text(example.text[:cut_at])
    return Pair(example.prompt[:cut_at], example.answer[:cut_at], example.joint)
