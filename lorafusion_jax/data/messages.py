"""Parses messages of OpenAI, ShareGPT, axolotl and LLaMA-Factory into the roles and keys of chat templates."""

from __future__ import annotations

import json
from typing import Any

from lorafusion_jax.config.read import has_half_character
from lorafusion_jax.data.rows import type_name

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
LEARNED = ("train", "training", "trainable", "loss")  # of axolotl, ms-swift and others: true or false
MUTED = ("masked", "mask")  # the opposite
SCALED = ("loss_scale", "train_detail")  # weights that are no yes or no
MEDIA = ("image", "input_image", "video", "audio", "input_audio")  # kinds of parts; also image_url and the like
CALLING_ROLES = ("function_call", "tool_call")  # their content is a function call as JSON


class BadRow(ValueError):
    """A row cannot be used; `code` is the code of the error that will report it."""

    def __init__(self, code: str, why: str):
        super().__init__(why)
        self.code, self.why = code, why


def parse_messages(listed: list) -> tuple[list[dict], frozenset[int]]:
    """Parses a list of messages. Returns them and the indices of those that are excluded from the loss.

    Raises:
        BadRow: an item is not a message.
    """
    parsed = [parse_message(item, number) for number, item in enumerate(listed)]
    return [message for message, _ in parsed], frozenset(
        turn for turn, (_, learned) in enumerate(parsed) if learned is False
    )


def parse_message(item: object, number: int) -> tuple[dict, bool | None]:
    """Parses one message. Returns it and whether it is learned (None: the message does not say)."""
    if not isinstance(item, dict):
        raise BadRow("data.bad-type", f"message {number} is {type_name(item)}, not an object")
    message = {key: value for key, value in item.items() if value is not None}  # Parquet fills absent keys with null
    names = [name for name in (message.pop("role", None), message.pop("from", None)) if name]
    name = names[0] if names else None
    if not isinstance(name, str) or name.lower() not in ROLES:
        raise BadRow("data.bad-role", f"message {number} has the role {name!r}")
    role = ROLES[name.lower()]
    if any(not isinstance(other, str) or ROLES.get(other.lower()) != role for other in names):
        raise BadRow("data.bad-role", f"message {number} has the roles {name!r} and {names[1]!r}")
    learned = _take_learned_flag(message, role, number)
    contents = [message.pop(key) for key in ("content", "value") if key in message]
    content = contents[0] if contents else None
    if any(other != content for other in contents):
        raise BadRow("data.bad-type", f"message {number} has a content and another value")
    if isinstance(content, list):
        content = _joined_parts(content, number)
    if name.lower() in CALLING_ROLES:
        message["tool_calls"], content = _calls(content, number), None
    elif isinstance(message.get("function_call"), dict) and "tool_calls" not in message:
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRow("data.bad-type", f"message {number} has tool_calls that are not a list of objects")
    if content is None and "tool_calls" in message:
        return {"role": role, **message}, learned
    return {"role": role, "content": checked_text(content, f"the content of message {number}"), **message}, learned


def _take_learned_flag(message: dict, role: str, number: int) -> bool | None:
    """Removes the keys that say whether a message is learned, and returns their meaning."""
    flags = [(key, message.pop(key)) for key in ("weight", *LEARNED, *MUTED, *SCALED) if key in message]
    for key, value in flags:
        if key in SCALED or value not in (0, 1) or (key != "weight" and not isinstance(value, bool)):
            raise BadRow("data.bad-weight", f"message {number} has {key}: {value!r}")
    values = {bool(value) != (key in MUTED) for key, value in flags}
    if len(values) == 2:
        names = " and ".join(f"{key}: {value!r}" for key, value in flags)
        raise BadRow("data.bad-weight", f"message {number} has {names}, which contradict each other")
    if True in values and role != "assistant":
        raise BadRow("data.bad-weight", f"message {number} is to be learned, but its role is {role}")
    return values.pop() if values else None


def _calls(content: Any, number: int) -> list[dict]:
    try:
        calls = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadRow("data.bad-type", f"message {number} calls a function, but is not JSON {{name, arguments}}")
    return [{"type": "function", "function": call} for call in calls]


def _joined_parts(parts: list, number: int) -> str:
    """Joins the parts of a content, {type: text, text: …}, or `value` for it."""
    texts = [part.get("text", part.get("value")) for part in parts if isinstance(part, dict)]
    strings = [text for text in texts if isinstance(text, str)]
    kinds = [str(part.get("type", "text")) for part in parts if isinstance(part, dict)]
    if media := sorted({kind for kind in kinds if kind.startswith(MEDIA)}):
        raise BadRow("data.not-text", f"message {number} has parts of the type {', '.join(media)}")
    if len(strings) < len(parts) or any(kind != "text" for kind in kinds):
        raise BadRow("data.bad-type", f"message {number} has parts that are not text")
    return "".join(strings)


def says_something(message: dict) -> bool:
    return bool(message.get("content", "").strip() or message.get("tool_calls"))


def checked_text(value: object, name: str) -> str:
    """Returns the value if a tokenizer can encode it.

    Raises:
        BadRow: it is not a text, or holds a lone surrogate.
    """
    if not isinstance(value, str):
        raise BadRow("data.bad-type", f"{name} is {type_name(value)}, not a text")
    if has_half_character(value):
        raise BadRow("data.bad-type", f"{name} holds half a character (a lone surrogate)")
    return value
