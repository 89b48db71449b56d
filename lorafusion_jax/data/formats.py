"""Parses rows into examples. Five formats are recognised by their columns."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from lorafusion_jax.data.messages import ROLES, BadRow, checked_text, parse_message, parse_messages, says_something
from lorafusion_jax.data.sources import Rows, type_name
from lorafusion_jax.data.template import RESERVED_NAMES
from lorafusion_jax.errors import DataError, LoraFusionError, raise_all

CHAT_COLUMNS = ("system", "tools", "chat_template_kwargs")
# format → (required columns, optional columns), in the order in which formats are tried
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), CHAT_COLUMNS),
    "conversations": (("conversations",), CHAT_COLUMNS),
    "prompt": (("prompt", "completion"), CHAT_COLUMNS),
    "instruction": (("instruction", "output"), ("input", "history", *CHAT_COLUMNS)),
    "text": (("text",), ()),
}
PROBED_ROWS = 20
LARGEST_ROW = 4 << 20  # characters; a tokenizer takes about 100 bytes and 1 µs for each
FIXES = {
    "data.no-answer": "give these rows an answer or take them out",
    "data.bad-role": "one of " + ", ".join(ROLES),
    "data.bad-type": "text, or for messages a list of {role, content}",
    "data.bad-column": "repair these rows, or take the column out",
    "data.two-systems": "keep the system text in one place",
    "data.bad-weight": "weight: 0 or 1, train: true or false, on messages of the assistant",
    "data.large-row": "split the text into several rows, or take these rows out",
}
PROBLEMS = {
    "data.no-answer": "have no answer",
    "data.bad-role": "have an unknown role",
    "data.bad-type": "cannot be used as they are",
    "data.bad-column": "have a column that cannot be used",
    "data.two-systems": "have two different system texts",
    "data.bad-weight": "have an invalid weight or train flag",
    "data.large-row": "are too large to be tokenised",
}


class Chat(NamedTuple):
    """A conversation with the role names of chat templates.

    Attributes:
        variables: additional variables for the chat template.
        muted: messages that the row excludes from the loss.
        answer_from: first message of the row's completion; 0 if the row has no completion.
    """

    messages: list[dict]
    tools: list | None = None
    variables: Mapping[str, Any] = MappingProxyType({})
    muted: frozenset[int] = frozenset()
    answer_from: int = 0


class Pair(NamedTuple):
    """A prompt and its answer. `joint` separates them if no chat template is used."""

    prompt: str
    answer: str
    joint: str = ""


class Text(NamedTuple):
    """Plain text."""

    text: str


type Example = Chat | Pair | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """The rows of a source.

    Attributes:
        shortened: rows that were too large and were cut.
    """

    values: list[Example]
    shortened: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The format of the rows, and the column of each role.

    Attributes:
        unused: columns without a role.
    """

    format: str
    columns: dict[str, str]
    unused: tuple[str, ...] = ()


@dataclass(slots=True)
class _Problems:
    """Bad rows by error code."""

    found: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, row: int, problem: BadRow) -> None:
        self.found.setdefault(problem.code, []).append((row, problem.why))

    def errors(self, rows: Rows, adapter: str) -> list[LoraFusionError]:
        return [
            DataError(
                code,
                f"{adapter}: {len(bad)} of {len(rows.values)} rows {PROBLEMS[code]}.",
                where=rows.places([row for row, _ in bad]),
                why=f"{rows.place(bad[0][0])}: {bad[0][1]}",
                fix=FIXES[code],
            )
            for code, bad in self.found.items()
        ]


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
    chosen = [name for name, (needed, _) in FORMATS.items() if set(needed) <= set(of_role)]
    chosen.sort(key=lambda name: -len(set(columns) & {*FORMATS[name][0]}))
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
        chosen = [format]
    if not chosen:
        wanted = "; ".join(" + ".join(needed) for needed, _ in FORMATS.values())
        raise DataError(
            "data.unknown-format",
            f"the columns of {rows.source} fit none of the formats.",
            where=rows.source,
            why=f"its columns are {', '.join(present)}; the formats need {wanted}",
            fix="data.columns: {prompt: <column>, completion: <column>}",
        )
    needed, optional = FORMATS[chosen[0]]
    used = {role: of_role[role] for role in (*needed, *optional) if role in of_role}
    everywhere = dict.fromkeys(key for row in rows.values for key in row)
    for role in optional:  # an optional column may be absent from the first rows
        if role in everywhere:
            used.setdefault(role, role)
    unused = tuple(column for column in everywhere if column not in used.values())
    return Layout(format=chosen[0], columns=used, unused=unused)


def _column_problems(rows: Rows, present: list[str], columns: Mapping[str, str]) -> list[LoraFusionError]:
    roles = list(dict.fromkeys(role for needed, optional in FORMATS.values() for role in (*needed, *optional)))
    errors: list[LoraFusionError] = [
        DataError(
            "data.unknown-role",
            f"data.columns names the role '{role}', which no format has.",
            fix=_nearest(role, roles),
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
            fix=_nearest(column, present),
        )
        for role, column in columns.items()
        if column not in present
    ]


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean '{near[0]}'?" if near else "one of " + ", ".join(names)


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
    parse: Callable[[dict, dict[str, str], bool], Example] = {
        "messages": _chat,
        "conversations": _chat,
        "prompt": _prompt,
        "instruction": _instruction,
        "text": _text,
    }[layout.format]
    examples: list[Example] = []
    shortened: list[int] = []
    problems = _Problems()
    for number, row in enumerate(rows.values):
        try:
            whole = parse(row, layout.columns, need_answer)
            examples.append(_of_size(whole, cut_at))
            if examples[-1] is not whole:
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


def _of_size(example: Example, cut_at: int | None) -> Example:
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


def _prompt(row: dict, columns: dict[str, str], need_answer: bool) -> Example:
    prompt, completion = row.get(columns["prompt"]), row.get(columns["completion"])
    if isinstance(prompt, list) or isinstance(completion, list):
        return _conversation(row, columns, need_answer, _turns(prompt, "user"), _turns(completion, "assistant"))
    pair = Pair(_string(row, columns["prompt"]), _answer(row, columns["completion"]))
    return _with_chat_columns(pair, row, columns)


def _turns(value: object, role: str) -> list:
    """Returns a list of messages; a text becomes its only message."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _instruction(row: dict, columns: dict[str, str], need_answer: bool) -> Example:
    del need_answer  # a pair always needs an answer
    prompt = _string(row, columns["instruction"])
    extra = columns.get("input")
    if extra is not None and row.get(extra):
        prompt += "\n\n" + _string(row, extra)
    return _with_chat_columns(Pair(prompt, _answer(row, columns["output"]), "\n\n"), row, columns)


def _text(row: dict, columns: dict[str, str], need_answer: bool) -> Example:
    del need_answer
    return Text(_string(row, columns["text"]))


def _chat(row: dict, columns: dict[str, str], need_answer: bool) -> Example:
    column = columns.get("messages") or columns["conversations"]
    listed = row.get(column)
    if not isinstance(listed, list):
        raise BadRow("data.bad-type", f"'{column}' is {type_name(listed)}, not a list of messages")
    return _conversation(row, columns, need_answer, [], listed)


def _conversation(row: dict, columns: dict[str, str], need_answer: bool, prompt: list, answers: list) -> Chat:
    """Builds a conversation from the messages of a prompt and the messages with the answers."""
    messages, muted = parse_messages([*prompt, *answers])
    asked = _system(row, columns, messages)
    if asked:
        messages, muted = [*asked, *messages], frozenset(turn + 1 for turn in muted)
    first = len(prompt) + len(asked) if prompt else 0
    said = [m for turn, m in enumerate(messages) if m["role"] == "assistant" and turn >= first and turn not in muted]
    if need_answer and not any(map(says_something, said)):
        raise BadRow("data.no-answer", "no message of the assistant has learned content")
    return Chat(messages, _tools(row, columns), _variables(row, columns), muted, first)


def _with_chat_columns(pair: Pair, row: dict, columns: dict[str, str]) -> Example:
    """Returns the pair, or a conversation if the row has columns that a pair cannot represent."""
    history = _history(row, columns)
    asked, tools, variables = _system(row, columns, []), _tools(row, columns), _variables(row, columns)
    if not (history or asked or tools or variables):
        return pair
    turns = [{"role": "user", "content": pair.prompt}, {"role": "assistant", "content": pair.answer}]
    return Chat([*asked, *history, *turns], tools, variables)


def _system(row: dict, columns: dict[str, str], messages: list[dict]) -> list[dict]:
    """Returns the message of the `system` column; empty if the messages already start with it."""
    text = row.get(columns["system"]) if "system" in columns else None
    if text is None or text == "":
        return []
    text = checked_text(text, f"'{columns['system']}'")
    if messages and messages[0]["role"] in ("system", "developer"):
        if messages[0].get("content") != text:
            raise BadRow("data.two-systems", f"'{columns['system']}' differs from the system message")
        return []
    return [{"role": "system", "content": text}]


def _tools(row: dict, columns: dict[str, str]) -> list | None:
    tools = _json_column(row, columns, "tools", list, "a list")
    return tools or None


def _variables(row: dict, columns: dict[str, str]) -> dict[str, Any]:
    variables = _json_column(row, columns, "chat_template_kwargs", dict, "an object") or {}
    taken = [name for name in variables if name in RESERVED_NAMES or not str(name).isidentifier()]
    if taken:
        raise BadRow("data.bad-column", f"'{columns['chat_template_kwargs']}' cannot set '{taken[0]}'")
    return variables


def _history(row: dict, columns: dict[str, str]) -> list[dict]:
    """Parses earlier turns, given as [[question, answer], …]."""
    messages = []
    for turn in _json_column(row, columns, "history", list, "a list of [question, answer]") or []:
        if not isinstance(turn, list) or len(turn) != 2:
            raise BadRow("data.bad-column", f"'{columns['history']}' is not a list of [question, answer]")
        messages += [
            parse_message(message, 0)[0] for message in (_turns(turn[0], "user") + _turns(turn[1], "assistant"))
        ]
    return messages


def _json_column(row: dict, columns: dict[str, str], role: str, kind: type, wanted: str) -> Any:
    """Reads a column that holds a list or an object, possibly as JSON text. Returns None if it is empty."""
    value = row.get(columns[role]) if role in columns else None
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow("data.bad-column", f"'{columns[role]}' is a text, but not JSON") from None
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, kind):
        raise BadRow("data.bad-column", f"'{columns[role]}' is {type_name(value)}, not {wanted}")
    return value


def _string(row: dict, column: str) -> str:
    return checked_text(row.get(column), f"'{column}'")


def _answer(row: dict, column: str) -> str:
    if row.get(column) is None:
        raise BadRow("data.no-answer", f"'{column}' is missing")
    answer = _string(row, column)
    if not answer.strip():
        raise BadRow("data.no-answer", f"'{column}' is empty")
    return answer
