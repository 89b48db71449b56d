"""Parses one row of any format into an example: what it teaches, before it becomes text and tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lorafusion_jax.data.messages import BadRow, checked_text, parse_message, parse_messages, says_something
from lorafusion_jax.data.rows import messages_or_text, type_name
from lorafusion_jax.data.template.chat import RESERVED_NAMES
from lorafusion_jax.families.hf_config import one_of_each
from lorafusion_jax.objective.pairs import split_conversation


def _prompt(row: dict, columns: dict[str, str], need_answer: bool) -> Example:
    prompt, completion = row.get(columns["prompt"]), row.get(columns["completion"])
    completion = [completion] if isinstance(completion, dict) else completion
    if isinstance(prompt, list) or isinstance(completion, list):
        try:
            prompt, completion = split_conversation("completion", prompt, completion)
        except ValueError as problem:
            raise BadRow("data.bad-type", f"{problem}") from None
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
    messages = row.get(column)
    if isinstance(messages, str):  # what pandas writes
        messages = messages_or_text(messages)
    if not isinstance(messages, list):
        expected = "a list of messages" + (" as JSON" if isinstance(messages, str) else "")
        raise BadRow("data.bad-type", f"'{column}' is {type_name(messages)}, not {expected}")
    return _conversation(row, columns, need_answer, [], messages)


def _conversation(row: dict, columns: dict[str, str], need_answer: bool, prompt: list, answers: list) -> Chat:
    """Builds a conversation from the messages of a prompt and the messages with the answers."""
    messages, muted = parse_messages([*prompt, *answers])
    system = _system(row, columns, messages)
    if system:
        messages, muted = [*system, *messages], frozenset(turn + 1 for turn in muted)
    first = len(prompt) + len(system) if prompt else 0
    replies = [m for turn, m in enumerate(messages) if m["role"] == "assistant" and turn >= first and turn not in muted]
    if need_answer and not any(map(says_something, replies)):
        raise BadRow("data.no-answer", "no message of the assistant has learned content")
    return Chat(messages, _tools(row, columns), _variables(row, columns), muted, first)


def _with_chat_columns(pair: Pair, row: dict, columns: dict[str, str]) -> Example:
    """Returns the pair, or a conversation if the row has columns that a pair cannot represent."""
    history = _history(row, columns)
    system, tools, variables = _system(row, columns, []), _tools(row, columns), _variables(row, columns)
    if not (history or system or tools or variables):
        return pair
    turns = [{"role": "user", "content": pair.prompt}, {"role": "assistant", "content": pair.answer}]
    return Chat([*system, *history, *turns], tools, variables)


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
    wrong = [name for name in variables if name in RESERVED_NAMES or not str(name).isidentifier()]
    if wrong:
        raise BadRow("data.bad-column", f"'{columns['chat_template_kwargs']}' cannot set '{wrong[0]}'")
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


def _json_column(row: dict, columns: dict[str, str], role: str, kind: type, type_wanted: str) -> Any:
    """Reads a column that holds a list or an object, possibly as JSON text. Returns None if it is empty."""
    value = row.get(columns[role]) if role in columns else None
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value, object_pairs_hook=one_of_each)
        except (ValueError, RecursionError) as problem:
            why = "" if isinstance(problem, json.JSONDecodeError | RecursionError) else f": {problem}"
            raise BadRow("data.bad-column", f"'{columns[role]}' is a text, but not JSON{why}") from None
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, kind):
        raise BadRow("data.bad-column", f"'{columns[role]}' is {type_name(value)}, not {type_wanted}")
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


# format → parser, called with the row, its columns by role, and whether the row needs an answer
PARSERS: dict[str, Callable[[dict, dict[str, str], bool], Example]] = {
    "messages": _chat,
    "conversations": _chat,
    "prompt": _prompt,
    "instruction": _instruction,
    "text": _text,
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
