"""Examples: what one row teaches, before it becomes text and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


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
