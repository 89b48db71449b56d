"""Shows generated texts: each prompt, and what the adapters make of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

SHOWN_PROMPT = 300  # characters


def show_texts(console: Console, texts: Sequence[tuple[Any, str, str]]) -> None:
    """Prints (prompt, adapter, text); a prompt once before all of its texts, and lines of a text below each other."""
    width = max((len(adapter) for _, adapter, _ in texts), default=0)
    before: Any = object()
    for prompt, adapter, text in texts:
        if prompt is not before and prompt != before:
            console.print(Text(shown_prompt(prompt), "dim"), soft_wrap=True)
            before = prompt
        lines = (text.strip() or "(no text)").replace("\n", "\n" + " " * (width + 4))
        console.print(Text.assemble((f"  {adapter:{width}}  ", "bold"), lines), soft_wrap=True)


def shown_prompt(prompt: Any) -> str:
    """One line of a prompt: a text, the last message, or the number of tokens."""
    if isinstance(prompt, str):
        text = prompt
    elif prompt and isinstance(prompt[0], int):
        text = f"{len(prompt)} tokens"
    else:
        text = str(prompt[-1].get("content", "")) if prompt else ""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_PROMPT else line[: SHOWN_PROMPT - 1] + "…"
