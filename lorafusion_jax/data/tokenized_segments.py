"""Tokenises the samples of objectives that define the segments of a sample themselves."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data.fit_length import fit_length
from lorafusion_jax.data.messages import checked_text, parse_messages
from lorafusion_jax.data.render import AFTER_PROMPT, encode_examples, joined_note
from lorafusion_jax.data.row_parsers import Chat, Example, Pair, Text
from lorafusion_jax.data.rows import RawSource, Rows, typed_row
from lorafusion_jax.data.segments import RowSample, columns_of, read_samples
from lorafusion_jax.data.tokenized_set import DataReport, TokenizedSet, quantiles
from lorafusion_jax.data.tokenizer import Encoded, Tokenizer
from lorafusion_jax.errors import DataError
from lorafusion_jax.objective.protocol import CellType, Chosen, Segment

MEDIA = tuple((f"{kind}{s}", f"<{kind}>") for kind in ("image", "video", "audio") for s in ("s", ""))
LABEL: Mapping[str, CellType] = {"label": "flag"}
PROMPTS = ("prompt", "messages", "conversations", "instruction", "question")
# columns of the rows → what they hold, an objective for them, and a way to train them with sft after all
KINDS = (
    (
        ("chosen", "rejected"),
        "chosen and rejected answers",
        "dpo",
        "data.columns: {prompt: PROMPT, completion: chosen}",
    ),
    *(
        ((column, "label"), "answers that are labelled good or bad", "kto", f"data.format: {format}")
        for column, format in (("completion", "prompt"), ("messages", "messages"), ("conversations", "conversations"))
    ),
    (("completion", "advantage"), "sampled answers with their advantage", "grpo", "data.format: prompt"),
    (("completion", "advantages"), "sampled answers with their advantages", "grpo", "data.format: prompt"),
)
PROMPT, PROMPT_LIKE = "prompt", ("question", "instruction", "query", "input")


@dataclass(slots=True, kw_only=True)
class _Text:
    """One segment. Arrays have an entry per token."""

    tokens: np.ndarray
    answer: np.ndarray
    learned: np.ndarray
    values: Mapping[str, np.ndarray]

    def cut(self, limit: int) -> _Text:
        values = {name: array[:limit] for name, array in self.values.items()}
        return _Text(
            tokens=self.tokens[:limit], answer=self.answer[:limit], learned=self.learned[:limit], values=values
        )


def tokenize_segments(
    raw: RawSource,
    rows: Rows,
    settings: DataSettings,
    tokenizer: Tokenizer,
    adapter: str,
    chosen: Chosen,
    first: DataReport | None = None,
) -> TokenizedSet:
    """Tokenises a block of the rows of a source. Each segment must fit and have an answer.

    Args:
        first: of the first block; None for the first.

    Raises:
        DataError, ErrorList: all problems of the source, with their rows.
    """
    refuse_media(rows, adapter)
    samples, notes = read_samples(rows, chosen, settings.columns, adapter=adapter)
    loss = AFTER_PROMPT if settings.loss in ("auto", "completion") else settings.loss
    width = chosen.objective.num_segments
    texts: list[list[_Text]] = []  # by place of the segment in its sample
    fitting, cut, dropped, too_long = set(range(len(samples))), set(), set(), set()
    indices = range(chosen.num_segments)
    places = [rows.at([sample.rows[index // width] for sample in samples]) for index in indices]
    segments = [[sample.segments[index] for sample in samples] for index in indices]
    encoded: list[list[Encoded]] = []
    for index in indices:
        tokens, more = _encode(segments[index], tokenizer, places[index], adapter, loss)
        encoded.append(tokens)
        notes = [*notes, *more]
    pairs = [Pair(segment.prompt or "", segment.answer or "") for segment in segments[0] if segment.template]
    notes = [*notes, *(joined_note(pairs, tokenizer, places[0]) if first is None else ())]
    if loss == AFTER_PROMPT:
        _begin_together(samples, encoded, width)
    for index in indices:
        fit = fit_length(encoded[index], settings, places[index], adapter, tokenizer.positions)
        fitting, cut = fitting & set(fit.kept), cut | set(fit.cut)
        dropped, too_long = dropped | set(fit.dropped), too_long | set(fit.too_long)
        texts.append(_texts(segments[index], encoded[index], places[index], adapter))
    if not fitting:
        raise _none_left(rows, adapter, settings, tokenizer.positions)
    longest = [max(len(segment[number].tokens) for segment in texts) for number in range(len(samples))]
    order = sorted(fitting)
    parts = [[segment[number].cut(settings.max_length) for segment in texts] for number in order]

    def rows_of(numbers: set[int]) -> tuple[int, ...]:
        lost = dict.fromkeys(row for number in sorted(numbers) for row in samples[number].rows)
        return tuple(rows.number(row) for row in lost)

    columns = columns_of(rows, chosen, settings.columns)
    report = DataReport(
        source=raw.name,
        format=chosen.name,
        columns={role: name for role, name in columns.items() if any(name in row for row in rows.values)},
        loss="completion" if loss == AFTER_PROMPT else loss,
        rows=len(rows.values),
        tokens=sum(len(text.tokens) for sample in parts for text in sample),
        loss_tokens=sum(int(text.learned.sum()) for sample in parts for text in sample),
        longest=max(sum(len(text.tokens) for text in sample) for sample in parts),
        cut=len(rows_of(cut & fitting)),
        dropped=rows_of(dropped),
        too_long=rows_of(too_long),
        uncut=quantiles(longest),
        notes=tuple(dict.fromkeys([*_unused(rows, columns, adapter), *notes])),
    )
    return _collect(parts, [samples[number] for number in order], rows, chosen, report)


def _begin_together(samples: Sequence[RowSample], encoded: Sequence[Sequence[Encoded]], width: int) -> None:
    """Lets the answers of a row with the same prompt begin at the same token, in place.

    Where a token of one text spans the end of the prompt, its answer begins before; TRL lets both begin there.
    """
    for number, sample in enumerate(samples):
        for first in range(0, len(sample.segments), width):
            by_prompt: dict[str, list[Encoded]] = {}
            for index in range(first, first + width):
                segment = sample.segments[index]
                if segment.text is None and segment.prompt_ids is None:
                    prompt = segment.prompt if segment.messages is None else segment.messages[: segment.prompt_messages]
                    by_prompt.setdefault(repr(prompt), []).append(encoded[index][number])
            for members in by_prompt.values():
                answered = [member.mask for member in members if member.mask.any()]
                start = min((int(mask.argmax()) for mask in answered), default=0)
                for mask in answered:
                    mask[start:] = True


def _collect(
    parts: Sequence[Sequence[_Text]], samples: Sequence[RowSample], rows: Rows, chosen: Chosen, report: DataReport
) -> TokenizedSet:
    flat = [text for sample in parts for text in sample]
    lengths = np.array([[len(text.tokens) for text in sample] for sample in parts], np.int64)
    names = dict.fromkeys(name for text in flat for name in text.values)
    answer = np.concatenate([text.answer for text in flat])
    learned = np.concatenate([text.learned for text in flat])
    numbers = {name: np.array([sample.numbers[name] for sample in samples], np.float32) for name in samples[0].numbers}
    return TokenizedSet(
        tokens=np.concatenate([text.tokens for text in flat]),
        loss_mask=learned,
        offsets=np.concatenate([[0], np.cumsum(lengths.sum(axis=1))]),
        rows=np.array([rows.number(sample.rows[0]) for sample in samples], np.int64),
        report=report,
        segment_lengths=lengths,
        numbers=numbers if chosen.group is not None else {name: array[:, 0] for name, array in numbers.items()},
        values={
            name: np.concatenate([text.values.get(name, np.zeros(len(text.tokens), np.float32)) for text in flat])
            for name in names
        },
        answer=answer if (answer != learned).any() else None,
        group=chosen.group or 1,
    )


def _encode(
    segments: Sequence[Segment], tokenizer: Tokenizer, rows: Rows, adapter: str, loss: str
) -> tuple[list[Encoded], list[str]]:
    """Returns tokens and the mask of the answer for each segment, and notes."""
    encoded: dict[int, Encoded] = {}
    examples: dict[int, Example] = {}
    bad: list[tuple[int, str]] = []
    for number, segment in enumerate(segments):
        try:
            if segment.prompt_ids is not None:
                encoded[number] = _given_ids(segment)
            else:
                examples[number] = _example(segment, loss)
        except (ValueError, TypeError, OverflowError) as problem:
            bad.append((number, str(problem)))
    if bad:
        raise _bad_texts(rows, bad, adapter)
    notes: list[str] = []
    as_it_is = dataclasses.replace(tokenizer, chat_template=None)
    for is_text, templated, ends in itertools.product((False, True), (False, True), (False, True)):
        numbers = [
            number
            for number, example in examples.items()
            if isinstance(example, Text) == is_text
            and segments[number].template == templated
            and (segments[number].learn != "nothing") == ends
        ]
        if numbers:
            rendered = encode_examples(
                [examples[number] for number in numbers],
                tokenizer if templated else as_it_is,
                rows=rows.at(numbers),
                adapter=adapter,
                loss="all" if is_text else loss,
                ends=ends,
            )
            encoded |= dict(zip(numbers, rendered.samples, strict=True))
            notes += rendered.notes
    for sample in encoded.values():
        sample.mask[:1] = False  # the first token cannot be predicted
    return [encoded[number] for number in range(len(segments))], notes


def _texts(segments: Sequence[Segment], encoded: Sequence[Encoded], rows: Rows, adapter: str) -> list[_Text]:
    texts, bad = [], []
    for number, (segment, sample) in enumerate(zip(segments, encoded, strict=True)):
        learned = {"answer": sample.mask, "all": np.ones_like(sample.mask), "nothing": np.zeros_like(sample.mask)}
        learned["all"][:1] = False
        try:
            values = {name: _values(name, row_values, sample.mask) for name, row_values in segment.values.items()}
        except (ValueError, TypeError) as problem:
            bad.append((number, str(problem)))
            continue
        texts.append(_Text(tokens=sample.tokens, answer=sample.mask, learned=learned[segment.learn], values=values))
    if bad:
        raise _bad_texts(rows, bad, adapter)
    return texts


def _values(name: str, row_values: float | Sequence[float], answer: np.ndarray) -> np.ndarray:
    """Returns an array with an entry per token; 0 outside of the answer."""
    numbers, count = np.asarray(row_values, np.float32), int(answer.sum())
    if numbers.ndim > 1 or (numbers.ndim == 1 and len(numbers) != count):
        raise ValueError(
            f"its '{name}' has {numbers.size} numbers and its answer {count} tokens, the end token included"
        )
    if not np.isfinite(numbers).all():
        raise ValueError(f"its '{name}' has a number that is not finite")
    array = np.zeros(len(answer), np.float32)
    array[answer] = numbers
    return array


def _given_ids(segment: Segment) -> Encoded:
    parts = []
    for ids in (segment.prompt_ids or (), segment.answer_ids or ()):
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise ValueError(f"segment '{segment.name}' has token ids that are no whole numbers from 0")
        parts.append(np.asarray(ids, np.int32))
    if not len(parts[0]) or not len(parts[1]):
        raise ValueError(f"segment '{segment.name}' has no token in its {'prompt' if not len(parts[0]) else 'answer'}")
    return Encoded(np.concatenate(parts), np.repeat([False, True], [len(part) for part in parts]))


def _example(segment: Segment, loss: str) -> Example:
    if segment.messages is not None:
        messages, muted = parse_messages(list(segment.messages))
        first = segment.prompt_messages or 0
        in_answer = [turn for turn in sorted(muted) if turn >= first]
        if in_answer and loss == AFTER_PROMPT and segment.learn != "nothing":
            raise ValueError(
                f"message {in_answer[0] - first} of its {segment.name} answer is excluded from the loss, but all "
                "behind the prompt counts: data.loss: assistant counts the assistant's other messages alone"
            )
        return Chat(messages, muted=muted, answer_from=first)
    if segment.text is not None:
        return Text(checked_text(segment.text, f"segment '{segment.name}'"))
    prompt, answer = (checked_text(part, f"segment '{segment.name}'") for part in (segment.prompt, segment.answer))
    return Pair(prompt, answer)


def _unused(rows: Rows, columns: Mapping[str, str], adapter: str) -> list[str]:
    """Returns a note on columns that are not used.

    Raises:
        DataError: `data.no-prompt`, no row has a prompt, and one of these columns is likely it.
    """
    unused = list(dict.fromkeys(key for row in rows.values for key in row if key not in columns.values()))
    if not unused:
        return []
    names = ", ".join(f"'{column}'" for column in unused)
    prompts = [column for column in PROMPT_LIKE if column in unused]
    if prompts and PROMPT in columns and not any(row.get(columns[PROMPT]) for row in rows.values):
        raise DataError(
            "data.no-prompt",
            f"{adapter}: no row of {rows.source} has a prompt.",
            where=rows.source,
            why=f"they have {names}",
            fix=f"data.columns: {{prompt: {prompts[0]}}}; or take the column out, if answers need no prompt",
        )
    return [
        f"[data.unused-column] the column{'s' if len(unused) > 1 else ''} {names} "
        f"{'are' if len(unused) > 1 else 'is'} not used; data.columns can give a column a role"
    ]


def _bad_texts(rows: Rows, bad: list[tuple[int, str]], adapter: str) -> DataError:
    return rows.refuse(
        "data.bad-row",
        f"{adapter}: {len(bad)} of {len(rows.values)} rows cannot be used.",
        bad,
        fix="repair these rows or take them out",
    )


def _none_left(rows: Rows, adapter: str, settings: DataSettings, positions: int | None) -> DataError:
    return DataError(
        "data.too-long",
        f"{adapter}: no sample is left, each has a text that is too long or without an answer.",
        where=rows.source,
        why=f"data.max_length is {settings.max_length}",
        fix="a larger data.max_length"
        if positions is None or settings.max_length < positions
        else f"shorter texts: the model has {positions} positions",
    )


def refuse_other_rows(rows: Rows, settings: DataSettings, adapter: str, objective: str) -> None:
    """Checks that rows with the columns of another objective are not read as plain examples by mistake.

    Args:
        objective: the adapter's.

    Raises:
        DataError: `data.other-objective`. A format or columns in the job file say that it is no mistake.
    """
    refuse_media(rows, adapter)
    if settings.format != "auto" or settings.columns:
        return
    present = {key for row in rows.values for key in row}
    for columns, content, row_objective, otherwise in KINDS:
        if present.issuperset(columns) and (row_objective != "kto" or _are_labels(rows)):
            prompt = next((name for name in PROMPTS if name in present), PROMPTS[0])
            plain = otherwise.replace("PROMPT", prompt)
            raise DataError(
                "data.other-objective",
                f"{adapter}: its rows hold {content}, and its objective is {objective}.",
                where=rows.source,
                why=f"their columns are {', '.join(sorted(present))}; {objective} would ignore "
                f"{' and '.join(columns[-1:])}",
                fix=f"objective: {{name: {row_objective}}}   or, to train with {objective}, {plain}",
            )


def refuse_media(rows: Rows, adapter: str) -> None:
    """Checks that no text stands for an image or a sound that would be left out.

    Raises:
        DataError: `data.media`.
    """
    bad = [
        (number, f"it has {name!r} and a text with {sign}")
        for number, row in enumerate(rows.values)
        for name, sign in MEDIA
        if row.get(name) and sign in json.dumps({**row, name: None}, default=lambda value: None)
    ]
    if bad:
        message = f"{adapter}: {len(bad)} of {len(rows.values)} rows hold images, videos or sounds."
        raise rows.refuse("data.media", message, bad, fix="rows of texts alone: only texts are trained here")


def _are_labels(rows: Rows) -> bool:
    try:
        labels = [typed_row({"label": row.get("label")}, LABEL if rows.untyped else {}) for row in rows.values]
    except ValueError:
        return False
    return all(row.get("label") in (True, False) for row in labels)
