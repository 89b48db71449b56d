"""Limits of one render of an untrusted template: steps, characters, seconds and the size of arguments."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError

STEPS = 300_000  # loop iterations and calls of one render; a conversation of 1000 turns takes about 20 000
CHARACTERS = 50_000_000  # characters that one render may produce, intermediate texts included, ...
CHARACTERS_PER_INPUT = 100  # ... and this many more for each character of the conversation
CHARACTERS_PER_ITEM = 64  # cost of an item of a list or an object, in characters
SECONDS = 5.0  # last resort; the budget normally stops a render earlier
LARGEST_ARGUMENT = 1_000_000  # largest width, count or similar argument
LARGEST_NUMBER_BITS = 4096


class LimitError(TemplateError):
    """A template exceeds its budget of time or memory."""


class Budget:
    """Remaining budget of one render."""

    __slots__ = ("characters", "deadline", "steps")

    def __init__(self, input_characters: int = 0):
        self.steps = STEPS
        self.characters = CHARACTERS + CHARACTERS_PER_INPUT * input_characters
        self.deadline = time.monotonic() + SECONDS

    def step(self, characters: int = 0) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise LimitError(f"more than {STEPS} steps for one conversation")
        if not self.steps % 1024 and time.monotonic() > self.deadline:
            raise LimitError(f"more than {SECONDS:.0f} s for one conversation")
        self.write(characters)

    def write(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise LimitError("more text than a conversation can need")

    def value(self, value: Any) -> None:
        """Charges a value by its unfolded size: lists that refer to one list several times grow as fast as texts."""
        if isinstance(value, str):
            self.write(str.__len__(value))  # of a text that hides its content, too
            return
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                self.write(str.__len__(item))
            elif isinstance(item, bytes):
                self.write(len(item))
            elif isinstance(item, list | tuple | set | frozenset):
                self.write(CHARACTERS_PER_ITEM * len(item))
                stack += item
            elif isinstance(item, Mapping):
                self.write(CHARACTERS_PER_ITEM * len(item))
                stack += item.values()


def check_number(operator: str, first: Any, second: Any) -> None:
    if not isinstance(first, int) or not isinstance(second, int):
        return
    bits = first.bit_length() * abs(second) if operator == "**" else first.bit_length() + second.bit_length()
    if bits > LARGEST_NUMBER_BITS:
        raise LimitError("a number of more than a thousand digits")


def check_widths(pattern: str) -> None:
    if re.search(r"\d{7}", pattern) or "*" in pattern:
        raise LimitError("a format wider than any line")
