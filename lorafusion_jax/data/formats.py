"""Rows → what a sample says: five formats, recognised by their columns."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lorafusion_jax.data.sources import Rows, type_name
from lorafusion_jax.errors import DataError, LoraFusionError, raise_all

# format → (columns it needs, columns it may have), in the order in which formats are tried
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("tools",)),
    "conversations": (("conversations",), ("tools",)),
    "prompt": (("prompt", "completion"), ()),
    "instruction": (("instruction", "output"), ("input",)),
    "text": (("text",), ()),
}
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
PROBED_ROWS = 20
FIXES = {
    "data.no-answer": "give these rows an answer or take them out",
    "data.bad-role": "one of " + ", ".join(ROLES),
    "data.bad-type": "text, or for messages a list of {role, content}",
}
SAYINGS = {
    "data.no-answer": "have no answer",
    "data.bad-role": "have an unknown role",
    "data.bad-type": "cannot be used as they are",
}


class Chat(NamedTuple):
    """Messages of one conversation, roles in the template's words."""

    messages: list[dict]
    tools: list | None = None


class Pair(NamedTuple):
    """A prompt and its answer; `joint` stands between them where no chat template is used."""

    prompt: str
    answer: str
    joint: str = ""


class Text(NamedTuple):
    """Plain text."""

    text: str


type Saying = Chat | Pair | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which format the rows have, and which column plays which role."""

    format: str
    columns: dict[str, str]


class _BadRow(ValueError):
    def __init__(self, code: str, why: str):
        super().__init__(why)
        self.code, self.why = code, why


@dataclass(slots=True)
class _Problems:
    """Bad rows by error code."""

    found: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, row: int, problem: _BadRow) -> None:
        self.found.setdefault(problem.code, []).append((row, problem.why))

    def errors(self, rows: Rows, adapter: str) -> list[LoraFusionError]:
        return [
            DataError(
                code,
                f"{adapter}: {len(bad)} of {len(rows.values)} rows {SAYINGS[code]}.",
                where=rows.places([row for row, _ in bad]),
                why=f"{rows.place(bad[0][0])}: {bad[0][1]}",
                fix=FIXES[code],
            )
            for code, bad in self.found.items()
        ]


def detect_layout(rows: Rows, *, format: str = "auto", columns: Mapping[str, str] = {}) -> Layout:
    """Recognises the format from the columns of the first 20 rows.

    Args:
        format: a format to take instead of looking.
        columns: role → column, for columns with other names.

    Raises:
        DataError: data.unknown-role, data.missing-column, data.unknown-format.

    >>> rows = Rows(source="x.csv", values=[{"question": "1+1?", "answer": "2"}])
    >>> detect_layout(rows, columns={"prompt": "question", "completion": "answer"}).format
    'prompt'
    """
    present = list(dict.fromkeys(key for row in rows.values[:PROBED_ROWS] for key in row))
    raise_all(_column_problems(rows, present, columns))
    of_role = {role: role for role in present} | dict(columns)
    # a renamed column speaks for its format more than one that has the right name by chance
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
    return Layout(format=chosen[0], columns={role: of_role[role] for role in (*needed, *optional) if role in of_role})


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


def read_sayings(rows: Rows, layout: Layout, *, adapter: str, need_answer: bool = True) -> list[Saying]:
    """Turns rows into conversations, pairs or texts.

    Args:
        adapter: named in messages.
        need_answer: False where every token is learned, so that a conversation may lack an answer.

    Raises:
        DataError, ErrorList: data.no-answer, data.bad-role, data.bad-type, each with its rows, and `rows.problems`.
    """
    read = {"messages": _chat, "conversations": _chat, "prompt": _prompt, "instruction": _instruction, "text": _text}
    sayings, problems = [], _Problems()
    for number, row in enumerate(rows.values):
        try:
            sayings.append(read[layout.format](row, layout.columns, need_answer))
        except _BadRow as problem:
            problems.add(number, problem)
    raise_all([*rows.problems, *problems.errors(rows, adapter)])
    return sayings


def _prompt(row: dict, columns: dict[str, str], need_answer: bool) -> Saying:
    del need_answer  # a pair is made for its answer
    return Pair(_string(row, columns["prompt"]), _answer(row, columns["completion"]))


def _instruction(row: dict, columns: dict[str, str], need_answer: bool) -> Saying:
    del need_answer
    prompt = _string(row, columns["instruction"])
    extra = columns.get("input")
    if extra is not None and row.get(extra):
        prompt += "\n\n" + _string(row, extra)
    return Pair(prompt, _answer(row, columns["output"]), "\n\n")


def _text(row: dict, columns: dict[str, str], need_answer: bool) -> Saying:
    del need_answer
    return Text(_string(row, columns["text"]))


def _chat(row: dict, columns: dict[str, str], need_answer: bool) -> Saying:
    column = columns.get("messages") or columns["conversations"]
    listed = row.get(column)
    if not isinstance(listed, list):
        raise _BadRow("data.bad-type", f"'{column}' is {type_name(listed)}, not a list of messages")
    messages = [_message(item, place) for place, item in enumerate(listed)]
    if need_answer and not any(_says_something(message) for message in messages if message["role"] == "assistant"):
        raise _BadRow("data.no-answer", "no message of the assistant says anything")
    tools = row.get(columns["tools"]) if "tools" in columns else None
    return Chat(messages, tools if isinstance(tools, list) and tools else None)


def _message(item: object, place: int) -> dict:
    if not isinstance(item, dict):
        raise _BadRow("data.bad-type", f"message {place} is {type_name(item)}, not an object")
    message = {key: value for key, value in item.items() if value is not None}  # Parquet fills absent keys with null
    role = message.pop("role", None) or message.pop("from", None)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise _BadRow("data.bad-role", f"message {place} has the role {role!r}")
    content = message.pop("content", message.pop("value", None))
    if isinstance(content, list):
        content = _joined_parts(content, place)
    if content is None and "tool_calls" in message:
        content = ""
    return {"role": ROLES[role.lower()], "content": _checked(content, f"the content of message {place}"), **message}


def _joined_parts(parts: list, place: int) -> str:
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise _BadRow("data.bad-type", f"message {place} has parts that are no text")
    return "".join(part["text"] for part in parts)


def _says_something(message: dict) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))


def _string(row: dict, column: str) -> str:
    return _checked(row.get(column), f"'{column}'")


def _answer(row: dict, column: str) -> str:
    if row.get(column) is None:
        raise _BadRow("data.no-answer", f"'{column}' is missing")
    answer = _string(row, column)
    if not answer.strip():
        raise _BadRow("data.no-answer", f"'{column}' is empty")
    return answer


def _checked(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _BadRow("data.bad-type", f"{name} is {type_name(value)}, not a text")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair; no tokenizer takes it
        raise _BadRow("data.bad-type", f"{name} holds half a character (a lone surrogate)") from None
    return value
