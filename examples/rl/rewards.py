"""Rewards and a tool of `rl.yaml`. Every function gets lists, and columns of the rows by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def spelling(completions: Sequence[str], word: Sequence[str]) -> list[float]:
    """The share of the word's letters that the answer begins with."""
    return [_begins(text, letters) / len(letters) for text, letters in zip(completions, word, strict=True)]


def arithmetic(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 for the right number; otherwise half for a number, less the more there is around it."""
    return [
        1.0 if text.strip() == right else 0.5 * sum(map(str.isdigit, text)) / max(len(text), 1)
        for text, right in zip(completions, answer, strict=True)
    ]


def form(completions: Sequence[str]) -> list[float]:
    """The share of the answer that has the form of a list: lower-case words with commas."""
    return [sum(map(len, re.findall(r"[a-z]+, ", text))) / max(len(text), 1) for text in completions]


def tool(row: Mapping[str, Any], answers: Sequence[str]) -> str:
    """Looks up a word for whoever asks."""
    return str(row["word"])


def used(completions: Sequence[str], word: Sequence[str]) -> list[float]:
    """The share of the answer that is letters of the looked-up word."""
    pairs = zip(completions, word, strict=True)
    return [sum(letter in letters for letter in text) / max(len(text), 1) for text, letters in pairs]


def _begins(text: str, word: str) -> int:
    """How many letters of a word a text begins with."""
    return next((n for n in range(len(word), 0, -1) if text.startswith(word[:n])), 0)
