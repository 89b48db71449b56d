"""Finds what a chat template leaves out of a conversation without an error: whole messages, and keys of messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from lorafusion_jax.data.template.chat import ChatTemplate
from lorafusion_jax.data.template.compiled import TemplateProblem
from lorafusion_jax.data.template.conversation import REASONING

MOST_UNSEEN = 16  # messages of a role that are looked at
# Message keys that link tool results to tool calls. Templates use either them or the order of messages.
TIES = frozenset({"id", "name", "tool_call_id"})
LINKS = ("tool_call_id", "name")  # of a result: which call it answers, also where its place alone says so


def left_out_message(template: ChatTemplate, messages: Sequence[dict[str, Any]], text: str) -> int | None:
    """Returns the first message that a text lacks; None: it lacks none.

    Templates may write a message in other words. So messages of one role, none of whose contents is in the text, count
    as left out if the text is the same without them.

    Args:
        text: of the messages, with the generation prompt.
    """
    for role in dict.fromkeys(message.get("role") for message in messages):
        of_role = (number for number, message in enumerate(messages) if message.get("role") == role)
        unseen = [number for number in islice(of_role, MOST_UNSEEN) if _is_unseen(messages[number], text)]
        others = [message for number, message in enumerate(messages) if number not in unseen]
        if unseen and others and _is_text_of(template, others, text):
            return unseen[0]
    return None


def left_out_key(template: ChatTemplate, messages: Sequence[dict[str, Any]], text: str) -> tuple[int, str] | None:
    """Returns the first message with a key that the template does not write, and the key; None: there is none.

    What an assistant thought counts as written where the template knows the key: models write without earlier thoughts.
    """
    numbers: dict[tuple[Any, str], int] = {}
    for number, message in enumerate(messages):
        for key in message:
            numbers.setdefault((message.get("role"), key), number)
    for (role, key), number in numbers.items():
        is_link = role == "tool" and key in LINKS
        is_thought = key in REASONING and any(name in template.source for name in REASONING)
        if key in ("role", "content") or is_link or is_thought:
            continue
        bare = [
            {name: value for name, value in message.items() if name != key or message.get("role") != role}
            for message in messages
        ]
        if _is_text_of(template, bare, text):
            return number, key
    return None


def unread_keys(template: ChatTemplate, messages: Iterable[dict[str, Any]], variables: Iterable[str] = ()) -> list[str]:
    """Returns the keys of messages and the variables whose names the source of a template lacks.

    It renders nothing, so it is for whole data sets; `left_out_key` looks at a text.
    """
    keys = {
        str(key)
        for message in messages
        for key in message
        if not (key in TIES and message.get("role") in ("tool", "assistant"))
    } | {*variables}
    source = template.source + ("".join(REASONING) if any(key in template.source for key in REASONING) else "")
    return sorted(key for key in keys if key not in source)


def _is_unseen(message: dict[str, Any], text: str) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip()) and content.strip() not in text


def _is_text_of(template: ChatTemplate, messages: Sequence[dict[str, Any]], text: str) -> bool:
    try:
        return template.render(messages, add_generation_prompt=True) == text
    except TemplateProblem:
        return False
