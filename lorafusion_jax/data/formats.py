"""The formats of rows, recognised by their columns, among them rows that are tokenised already.

These have `input_ids`, with `labels` and `attention_mask` as Transformers has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lorafusion_jax.data.rows import Rows, typed_row
from lorafusion_jax.data.tokenizer import Encoded, Tokenizer
from lorafusion_jax.errors import DataError, LoraFusionError, did_you_mean, raise_all
from lorafusion_jax.objective.protocol import CellType

IDS, LABELS, ATTENTION = "input_ids", "labels", "attention_mask"
FORMAT = "tokens"
NOT_LEARNED = -100
CHAT_COLUMNS = ("system", "tools", "chat_template_kwargs")
# format → (required columns, optional columns), in the order in which formats are tried
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), CHAT_COLUMNS),
    "conversations": (("conversations",), CHAT_COLUMNS),
    "prompt": (("prompt", "completion"), CHAT_COLUMNS),
    "instruction": (("instruction", "output"), ("input", "history", *CHAT_COLUMNS)),
    "text": (("text",), ()),
    FORMAT: ((IDS,), (LABELS, ATTENTION)),
}
TYPES: Mapping[str, CellType] = {
    **dict.fromkeys(("messages", "conversations", "prompt", "completion"), "messages"),
    **dict.fromkeys((IDS, LABELS, ATTENTION), "list"),
}
PROBED_ROWS = 20
# What other data sets call a prompt and its completion, the likeliest first; letters only.
ASKING = (
    "prompt", "question", "instruction", "query", "userprompt", "user", "usermessage", "human", "problem", "request",
    "task", "source", "inputtext", "input", "document", "article", "context", "title", "text", "sourcetext",
)  # fmt: skip
ANSWERING = (
    "completion", "answer", "response", "output", "assistant", "assistantmessage", "solution", "reply", "gpt", "chosen",
    "target", "label", "summary", "outputtext", "result", "generation", "modelanswer", "translation", "highlights",
    "targettext",
)  # fmt: skip

TASKS = ("instruction", "question", "query", "task")  # with what they are about in a second column
GIVEN = ("context", "input", "passage", "document", "background")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The format of the rows, and the column of each role.

    Attributes:
        unused: columns without a role.
    """

    format: str
    columns: dict[str, str]
    unused: tuple[str, ...] = ()

    @property
    def types(self) -> dict[str, CellType]:
        """What the cells of a table without types hold, by column."""
        return {column: TYPES[role] for role, column in self.columns.items() if role in TYPES}


def detect_layout(rows: Rows, *, format: str = "auto", columns: Mapping[str, str] = {}) -> Layout:
    """Detects the format from the columns of the first 20 rows.

    Args:
        format: the format, or "auto" to detect it.
        columns: role → column, where the names differ.

    Raises:
        DataError: data.unknown-role, data.missing-column, data.unknown-format.

    >>> rows = Rows(source="x.csv", values=[{"question": "1+1?", "answer": "2"}])
    >>> detect_layout(rows, columns={"prompt": "question", "completion": "answer"}).format
    'prompt'
    """
    present = list(dict.fromkeys(key for row in rows.values[:PROBED_ROWS] for key in row))
    raise_all(_column_problems(rows, present, columns))
    of_role = {role: role for role in present} | dict(columns)
    # Prefer formats with renamed columns: the user chose those, other columns may match by chance.
    formats = [name for name, (required, _) in FORMATS.items() if set(required) <= set(of_role)]
    formats.sort(key=lambda name: -len(set(columns) & {*FORMATS[name][0]}))
    if format != "auto":
        missing = [role for role in FORMATS[format][0] if role not in of_role]
        if missing:
            raise DataError(
                "data.missing-column",
                f"{rows.source} has no column '{missing[0]}', which the format '{format}' needs.",
                where=rows.source,
                why=f"its columns are {', '.join(present)}",
                fix=f"data.columns: {{{missing[0]}: <column>}}",
            )
        formats = [format]
    if not formats:
        requirements = "; ".join(" + ".join(required) for required, _ in FORMATS.values())
        raise DataError(
            "data.unknown-format",
            f"the columns of {rows.source} fit none of the formats.",
            where=rows.source,
            why=f"its columns are {', '.join(present)}; the formats need {requirements}",
            fix=f"data.columns: {_proposed(present)}",
        )
    required, optional = FORMATS[formats[0]]
    column_of = {role: of_role[role] for role in (*required, *optional) if role in of_role}
    everywhere = dict.fromkeys(key for row in rows.values for key in row)
    for role in optional:  # an optional column may be absent from the first rows
        if role in everywhere:
            column_of.setdefault(role, role)
    unused = tuple(column for column in everywhere if column not in column_of.values())
    return Layout(format=formats[0], columns=column_of, unused=unused)


def _proposed(present: list[str]) -> str:
    """Columns that are likely a prompt and its completion, as `data.columns` names them.

    >>> _proposed(["id", "question", "answer"])
    '{prompt: question, completion: answer}'
    >>> _proposed(["instruction", "context", "response"])  # Dolly's
    '{instruction: instruction, input: context, output: response}'
    """
    by_name = {re.sub(r"[^a-z]", "", column.lower()): column for column in present}
    asking, context, answer = (
        next((by_name[name] for name in names if name in by_name), "") for names in (TASKS, GIVEN, ANSWERING)
    )
    if asking and context and answer and len({asking, context, answer}) == 3:
        return f"{{instruction: {asking}, input: {context}, output: {answer}}}"
    prompt, completion = (
        next((by_name[name] for name in names if name in by_name), "<column>") for names in (ASKING, ANSWERING)
    )
    return f"{{prompt: {prompt}, completion: {completion}}}"


def _column_problems(rows: Rows, present: list[str], columns: Mapping[str, str]) -> list[LoraFusionError]:
    roles = list(dict.fromkeys(role for required, optional in FORMATS.values() for role in (*required, *optional)))
    errors: list[LoraFusionError] = [
        DataError(
            "data.unknown-role",
            f"data.columns names the role '{role}', which no format has.",
            fix=did_you_mean(role, roles) or "one of " + ", ".join(roles),
        )
        for role in columns
        if role not in roles
    ]
    return errors + [
        DataError(
            "data.missing-column",
            f"{rows.source} has no column '{column}'.",
            where=rows.source,
            why=f"data.columns takes it for '{role}'; the columns are {', '.join(present)}",
            fix=did_you_mean(column, present) or "one of " + ", ".join(present),
        )
        for role, column in columns.items()
        if column not in present
    ]


def parse_token_rows(rows: Rows, columns: Mapping[str, str], *, adapter: str, loss: str) -> list[Encoded]:
    """Returns the tokens of each row, and those that are learned: labels other than -100, or all tokens without labels.

    Padding, where `attention_mask` is 0, is left out.

    Raises:
        DataError: `data.bad-tokens`, with the rows.
    """
    samples: list[Encoded] = []
    bad: list[tuple[int, str]] = []
    for number, row in enumerate(rows.values):
        try:
            typed = typed_row(row, dict.fromkeys(columns.values(), "list")) if rows.untyped else row
            samples.append(_sample(typed, columns, loss))
        except ValueError as problem:
            bad.append((number, str(problem)))
    if bad:
        raise rows.refuse(
            "data.bad-tokens",
            f"{adapter}: {len(bad)} of {len(rows.values)} rows are no lists of tokens.",
            bad,
            fix=f"{IDS}: token ids; {LABELS}: the same ids, or {NOT_LEARNED} if not learned; {ATTENTION}: 1 or 0",
        )
    return samples


def unended_rows(samples: Sequence[Encoded], rows: Rows, tokenizer: Tokenizer) -> list[str]:
    """Returns a note on rows in which learned tokens do not end with one at which generation stops."""
    stops = np.array(tokenizer.stop_ids, np.int32)
    without = [number for number, sample in enumerate(samples) if not _ends(sample, stops, tokenizer)]
    if not without or not len(stops):
        return []
    names = ", ".join(tokenizer.piece(int(token)).strip() for token in stops)
    return [
        f"[data.no-end] {len(without)} of {len(samples)} rows have learned tokens that do not end with one at which "
        f"generation stops ({names}), first {rows.locate(without[0])}: the adapter does not learn to stop there"
    ]


def _ends(sample: Encoded, stops: np.ndarray, tokenizer: Tokenizer) -> bool:
    """Whether all runs of learned tokens end with a stop, or with white space behind one."""
    tokens, mask = sample
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False))
    ends_elsewhere = ends[~np.isin(tokens[ends], stops)]
    return all(
        end > 0 and mask[end - 1] and tokens[end - 1] in stops and tokenizer.piece(int(tokens[end])).isspace()
        for end in ends_elsewhere
    )


def _sample(row: Mapping, columns: Mapping[str, str], loss: str) -> Encoded:
    tokens = _numbers(row, columns[IDS], least=0)
    attended = np.ones(len(tokens), bool)
    if (name := columns.get(ATTENTION)) is not None and row.get(name) is not None:
        attention = _numbers(row, name, least=0)
        if len(attention) != len(tokens) or attention.max(initial=0) > 1:
            raise ValueError(f"'{name}' is not {len(tokens)} times 0 or 1")
        attended = attention == 1
    learned = np.ones(len(tokens), bool)
    if loss != "all" and (name := columns.get(LABELS)) is not None:
        labels = _numbers(row, name, least=NOT_LEARNED)
        if len(labels) != len(tokens):
            raise ValueError(f"'{name}' has {len(labels)} entries, and '{columns[IDS]}' {len(tokens)}")
        learned = labels != NOT_LEARNED
        if (labels[learned] != tokens[learned]).any():
            where = int(np.flatnonzero(learned & (labels != tokens))[0])
            raise ValueError(f"'{name}' has {labels[where]} at position {where}, where the token is {tokens[where]}")
    if not attended.any():
        raise ValueError("it has no token")
    return Encoded(tokens[attended], learned[attended])


def _numbers(row: Mapping, name: str, least: int) -> np.ndarray:
    values = row.get(name)
    if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
        raise ValueError(f"'{name}' is not a list of whole numbers")
    if min(values) < least or max(values) >= 2**31:
        raise ValueError(f"'{name}' has a number below {least}" if min(values) < least else f"'{name}' is too large")
    return np.array(values, np.int32)
