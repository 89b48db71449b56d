"""Reads rows with a chosen and a rejected answer, as TRL's data sets have them. Never imports jax.

A row has `chosen` and `rejected`, as texts or as lists of messages, with a `prompt` or without. Without one, it is what
both begin with. Conversations may stand beside the prompt that they begin with, as in ultrafeedback_binarized. LLaMA-
Factory names the prompt `messages` or `conversations`, with one message as each answer. A `system` text begins each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from lorafusion_jax.objective.protocol import CellType, Segment

COLUMNS, OPTIONAL = ("chosen", "rejected"), ("prompt", "system")
STAND_INS: Mapping[str, tuple[str, ...]] = {"prompt": ("messages", "conversations")}
TYPES: Mapping[str, CellType] = dict.fromkeys(("prompt", "chosen", "rejected", "completion"), "messages")
SYSTEM = ("system", "developer")
ASKING = ("user", "human", "system", "developer")  # roles whose turns are part of no answer
ALIKE = {"human": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant"}  # other names of a role


def chosen_and_rejected(row: Mapping[str, Any]) -> tuple[Segment, Segment]:
    """Returns both answers of a row.

    Raises:
        ValueError: an answer is missing or empty, both are equal, they have no prompt in common, or they begin with
            turns of the user that `prompt` does not say; the row has two different system texts.

    >>> [segment.answer for segment in chosen_and_rejected({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"})]
    [' 4', ' 5']
    """
    for name in COLUMNS:
        if not row.get(name):
            raise ValueError(f"it has no {name} answer")
    chosen, rejected = (_answer(row[name], name) for name in COLUMNS)
    prompt = row.get("prompt")
    if isinstance(prompt, list) and prompt == chosen:
        prompt = None  # the chosen conversation once more
    prompt, chosen, rejected = with_system(row.get("system"), prompt, chosen, rejected)
    if chosen == rejected:
        raise ValueError("its chosen and rejected answers are equal")
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise ValueError("one of its answers is a text and the other a list of messages")
    if not prompt or (isinstance(prompt, str) and asks(chosen) and asks(rejected)):
        template, stated = isinstance(chosen, list), prompt
        prompt, chosen, rejected = _split_prompt(chosen, rejected)
        if stated and not any(_turn(message)[1] == stated.strip() for message in prompt if asks([message])):
            raise ValueError("its answers are conversations that begin with something else than its prompt")
        if not chosen or not rejected:
            raise ValueError(f"its {'rejected' if chosen else 'chosen'} answer is the beginning of the other one")
        return _pair(prompt, chosen, rejected, template=template)
    return _pair(prompt, chosen, rejected, template=True)


def prompt_and_answer(name: str, prompt: Any, answer: Any, *, template: bool = True, values: Mapping = {}) -> Segment:
    """Returns a segment of a prompt and an answer, each a text or a list of messages.

    Raises:
        ValueError: one of them is empty, or see `split_conversation`.
    """
    if not answer:
        raise ValueError(f"it has no {name} answer")
    prompt, answer = split_conversation(name, prompt, answer)
    if isinstance(answer, list) or isinstance(prompt, list):
        before = _messages(prompt or [], "user")
        if not before:
            raise ValueError("it has no prompt")
        messages = [*before, *_messages(answer, "assistant")]
        return Segment(name=name, messages=messages, prompt_messages=len(before), values=values)
    return Segment(name=name, prompt=prompt or "", answer=answer, template=template, values=values)


def with_system(system: Any, prompt: Any, *answers: Any) -> tuple[Any, ...]:
    """Returns prompt and answers, of which the conversation begins with a system text.

    Raises:
        ValueError: it is no text, there is no prompt that it could precede, or the conversation has another one.

    >>> with_system("Be brief.", "2 + 2 =", "4")[0]
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2 + 2 ='}]
    """
    if system is None or system == "":
        return prompt, *answers
    if not isinstance(system, str):
        raise ValueError("its 'system' is not a text")
    if answers and all(map(asks, answers)):  # they begin with the prompt
        begun = [_after_system(system, answer) for answer in answers]
        return (_after_system(system, prompt) if isinstance(prompt, list) and prompt else prompt), *begun
    if not prompt:
        raise ValueError("it has a 'system' text, but no prompt")
    return _after_system(system, _messages(prompt, "user")), *answers


def _after_system(system: str, messages: list) -> list:
    role, content = _turn(messages[0]) if isinstance(messages[0], Mapping) else (None, None)
    if not isinstance(role, str) or role.lower() not in SYSTEM:
        return [{"role": "system", "content": system}, *messages]
    if content != system.strip():
        raise ValueError("its 'system' differs from the system message of its conversation")
    return messages


def split_conversation(name: str, prompt: Any, answer: Any) -> tuple[Any, Any]:
    """Returns prompt and answer, where the answer may be a conversation that begins with the prompt.

    Raises:
        ValueError: it begins with turns of the user that are not the prompt.

    >>> hello, reply = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}
    >>> split_conversation("completion", "hello", [hello, reply]) == ([hello], [reply])
    True
    """
    if not prompt or not asks(answer):
        return prompt, answer
    turns, length = [_turn(message) for message in answer], 0
    if isinstance(prompt, list) and turns[: len(prompt)] == [_turn(message) for message in prompt]:
        length = len(prompt)
    elif isinstance(prompt, str):
        is_prompt = [asks([message]) and turn[1] == prompt.strip() for message, turn in zip(answer, turns, strict=True)]
        length = max((number for number, says_so in enumerate(is_prompt, 1) if says_so), default=0)
    if not length or asks(answer[length:]):
        raise ValueError(f"its {name} answer begins with a turn of the user, which is not its prompt")
    return answer[:length], answer[length:]


def asks(answer: Any) -> bool:
    """Whether messages begin with a turn that is part of no answer."""
    first = answer[0] if isinstance(answer, list) and answer else None
    role = first.get("role") or first.get("from") if isinstance(first, Mapping) else None
    return isinstance(role, str) and role.lower() in ASKING


def _turn(message: Any) -> Any:
    """Returns role and content of a message in any of the layouts, to compare them."""
    if not isinstance(message, Mapping):
        return message
    role, content = message.get("role") or message.get("from"), message.get("content", message.get("value"))
    if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
        content = "".join(str(part["text"]) for part in content)
    if isinstance(role, str):
        role = ALIKE.get(role.lower(), role.lower())
    return role, content.strip() if isinstance(content, str) else content


def same_prompt(prompt: Any, other: Any) -> bool:
    """Whether two prompts ask the same: one may be a text and the other messages, and spaces do not count.

    >>> same_prompt("2 + 2 = ", [{"from": "human", "value": "2 +  2 ="}])
    True
    """

    def turns(value: Any) -> list[Any]:
        return [_turn(message) for message in _messages(value or "", "user")]

    def squeezed(turn: Any) -> Any:
        return [" ".join(part.split()) if isinstance(part, str) else part for part in turn]

    return [*map(squeezed, turns(prompt))] == [*map(squeezed, turns(other))]


def _pair(prompt: Any, chosen: Any, rejected: Any, *, template: bool) -> tuple[Segment, Segment]:
    first, other = (
        prompt_and_answer(name, prompt, answer, template=template)
        for name, answer in (("chosen", chosen), ("rejected", rejected))
    )
    return first, other


def _answer(value: Any, name: str) -> str | list:
    """Returns a text or a list of messages; a single message is a list of one."""
    if isinstance(value, Mapping):
        return [value]
    if not isinstance(value, str | list):
        raise ValueError(f"its {name} answer is neither a text nor messages")
    return value


def _split_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Returns what both answers begin with, and their rests."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str) and length and chosen[length - 1] == " ":
        length -= 1  # the space belongs to the first word of the answers
    return chosen[:length], chosen[length:], rejected[length:]


def _messages(value: str | Sequence[dict], role: str) -> list[dict]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)
