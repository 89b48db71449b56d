"""Shows rows as the model sees them: every token, and whether it is learned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.data.tokenizer import Tokenizer

LEARNED = ("bold green", "bold bright_green")  # two alternating shades show token boundaries
CONTEXT = ("dim", "bright_black")
SPECIAL = {True: "bold black on green", False: "black on bright_black"}
OPEN, CLOSE = "⟦", "⟧"  # around learned tokens, for terminals without colours
# Control characters are shown as symbols, so that data cannot control the terminal.
VISIBLE = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\x7f": "␡", "\n": "↵\n", "\t": "⇥"}


def render_preview(
    samples: TokenizedSet, tokenizer: Tokenizer, *, rows: int | Sequence[int] = 3, title: str = ""
) -> RenderableType:
    """Shows samples as tokens: learned tokens green and in ⟦ ⟧, context grey.

    Args:
        rows: number of samples from the start, or positions of samples in the set.
        title: name of the adapter.
    """
    indices = range(min(rows, len(samples))) if isinstance(rows, int) else rows
    return Group(_head(samples, title), *[part for index in indices for part in _sample(samples, index, tokenizer)])


def _head(samples: TokenizedSet, title: str) -> Text:
    report = samples.report
    text = Text(f"{title or report.source}", style="bold")
    text.append(
        f"  {report.source} · format {report.format} · loss {report.loss} · {len(samples)} of {report.rows} "
        f"rows · {report.loss_tokens} of {report.tokens} tokens learned",
        style="not bold",
    )
    if report.cut:
        text.append(f" · {report.cut} rows cut", style="yellow not bold")
    text.append("\n").append(OPEN + "learned" + CLOSE, style=LEARNED[0]).append("  ")
    text.append("context", style=CONTEXT[1]).append("  ").append("special", style=SPECIAL[True])
    return text


def _sample(samples: TokenizedSet, index: int, tokenizer: Tokenizer) -> Iterator[Text]:
    tokens, mask = samples.sample(index)
    head = Text(f"\nrow {samples.rows[index]}", style="bold")
    head.append(f"  {len(tokens)} tokens, {int(mask.sum())} learned", style="not bold")
    yield head
    lengths = samples.segment_lengths_of(index)
    if lengths is None:
        yield _tokens(tokens, mask, tokenizer)
        return
    for number, end in enumerate(itertools.accumulate(lengths), 1):
        span = slice(end - lengths[number - 1], end)
        learned = int(mask[span].sum())
        yield Text(f"segment {number} of {len(lengths)}: {lengths[number - 1]} tokens, {learned} learned")
        yield _tokens(tokens[span], mask[span], tokenizer)


def _tokens(tokens: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer) -> Text:
    added_ids = tokenizer.added_ids
    text, inside = Text(), False
    for number, (piece, first, learned) in enumerate(_pieces(tokens, mask, tokenizer)):
        if learned != inside:
            text.append(OPEN if learned else CLOSE, style="green")
            inside = learned
        special = first in added_ids
        style = SPECIAL[learned] if special else (LEARNED if learned else CONTEXT)[number % 2]
        text.append("".join(VISIBLE.get(character, character) for character in piece), style=style)
    text.append(CLOSE if inside else "", style="green")
    text.rstrip()
    return text


def _pieces(tokens: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer) -> Iterator[tuple[str, int, bool]]:
    """Yields the units to show: one token, or the few tokens that share a character."""
    start = 0
    while start < len(tokens):
        stop = start + 1
        piece = tokenizer.piece(tokens[start])
        while "\ufffd" in piece and stop < min(start + 4, len(tokens)) and mask[stop] == mask[start]:
            stop += 1
            longer = tokenizer.decode(tokens[start:stop].tolist())
            if "\ufffd" not in longer:
                piece = longer
                break
        else:
            stop = start + 1
        yield piece, int(tokens[start]), bool(mask[start])
        start = stop
