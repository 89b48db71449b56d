"""Texts and tables on a console, as commands and the objects of `lorafusion_jax.api` print them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # rich is imported by the first text: what prints none, such as --help, does not wait for it
    from rich.console import Console
    from rich.table import Table

SHOWN_PROMPT = 300  # characters
MOST_LINES, LARGEST = 40, 20  # adapters of a table; those shown of more


def out() -> Console:
    """Console of standard output. It is wide outside a terminal, so that tables in logs are not truncated."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)


def errors_to() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def plain_table(left: Sequence[str], right: Sequence[str], **options) -> Table:
    """A table without lines: text columns on the left, number columns on the right; cells are not wrapped."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False, **options)
    for title in left:
        table.add_column(title, no_wrap=True)
    for title in right:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def most_telling(rows: Mapping[str, Any], size: Callable[[Any], Any]) -> tuple[dict[str, Any], str]:
    """Rows of a table of adapters: all in their order or, of too many for a screen, the largest; and what is missing.

    >>> most_telling({"law": 3, "med": 5}, lambda tokens: tokens)
    ({'law': 3, 'med': 5}, '')
    """
    if len(rows) <= MOST_LINES:
        return dict(rows), ""
    names = sorted(rows, key=lambda name: size(rows[name]), reverse=True)[:LARGEST]
    return {name: rows[name] for name in names}, f"… and {len(rows) - LARGEST} more adapters; --json has all"


def say(console: Console, text: str, style: str | None = None) -> None:
    """Prints a text, wrapped on a terminal and in one line elsewhere."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def warn(console: Console, texts: Sequence[str]) -> None:
    """Prints a list of warnings; nothing if it is empty."""
    if texts:
        console.print("warnings", style="bold yellow")
        for text in texts:
            say(console, f"  {text}")


def show_texts(console: Console, texts: Sequence[tuple[Any, str, str]]) -> None:
    """Prints (prompt, adapter, text); a prompt once before all of its texts, and lines of a text below each other."""
    from rich.text import Text

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
