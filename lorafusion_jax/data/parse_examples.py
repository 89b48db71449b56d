"""Parses the rows of a source into examples, and reports all bad rows together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lorafusion_jax.data.example import Chat, Example, Pair, Text
from lorafusion_jax.data.formats import Layout
from lorafusion_jax.data.messages import ROLES, BadRow
from lorafusion_jax.data.row_parsers import PARSERS
from lorafusion_jax.data.rows import Rows, typed_row
from lorafusion_jax.errors import LoraFusionError, raise_all

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
