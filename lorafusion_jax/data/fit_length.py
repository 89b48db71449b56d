"""Fits samples to `data.max_length`: cuts or removes long ones, and removes those with nothing to learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data.rows import Rows
from lorafusion_jax.data.tokenizer import Encoded
from lorafusion_jax.errors import DataError

MOST_LOST = 0.01  # largest share of rows without a learned token, or that cannot be used, that is no error


@dataclass(slots=True, kw_only=True)
class Fit:
    """Rows that stay, and rows that were cut or removed."""

    kept: list[int]
    cut: list[int]
    dropped: list[int]
    too_long: list[int]
    limit: int


def fit_length(
    encoded: Sequence[Encoded], settings: DataSettings, rows: Rows, adapter: str, positions: int | None = None
) -> Fit:
    """Cuts or removes samples that are longer than `data.max_length`, and removes those without a learned token.

    Args:
        positions: of the model, which no advice exceeds (None: not known).

    Raises:
        DataError: `data.too-long`, or `data.empty-loss` if more than a few rows have no learned token.
    """
    limit = settings.max_length
    long = [row for row, sample in enumerate(encoded) if len(sample.tokens) > limit]
    drops_all = settings.on_long == "drop" and len(long) == len(encoded)
    if drops_all or (long and settings.on_long == "error"):
        raise _too_long(long, encoded, limit, rows, adapter, positions)
    too_long = long if settings.on_long == "drop" else []
    stays = np.ones(len(encoded), bool)
    stays[too_long] = False
    dropped = [row for row in np.flatnonzero(stays).tolist() if not encoded[row].mask[:limit].any()]
    if len(dropped) > MOST_LOST * len(encoded):
        raise _empty_loss(dropped, encoded, limit, rows, adapter, positions)
    stays[dropped] = False
    return Fit(
        kept=np.flatnonzero(stays).tolist(),
        cut=[row for row in long if stays[row]],
        dropped=dropped,
        too_long=too_long,
        limit=limit,
    )


def _too_long(
    long: list[int], encoded: Sequence[Encoded], limit: int, rows: Rows, adapter: str, positions: int | None
) -> DataError:
    longest = max(long, key=lambda row: len(encoded[row].tokens))
    tokens = len(encoded[longest].tokens)
    return DataError(
        "data.too-long",
        f"{adapter}: {len(long)} of {len(encoded)} rows are longer than data.max_length={limit}.",
        where=rows.places(long),
        why=f"{rows.locate(longest)} has {tokens} tokens",
        fix=_advice(tokens, positions, "cut"),
    )


def _empty_loss(
    dropped: list[int], encoded: Sequence[Encoded], limit: int, rows: Rows, adapter: str, positions: int | None
) -> DataError:
    first = encoded[dropped[0]]
    message = f"{adapter}: {len(dropped)} of {len(encoded)} rows have no token to learn from."
    if not first.mask.any():
        return DataError(
            "data.empty-loss",
            message,
            where=rows.places(dropped),
            why=f"{rows.locate(dropped[0])} "
            + ("is empty" if len(first.tokens) < 2 else f"has no answer in its {len(first.tokens)} tokens"),
            fix="take these rows out, or give base.model a chat template that renders their answers",
        )
    least_length = max(int(encoded[row].mask.argmax()) + 1 for row in dropped if encoded[row].mask.any())
    return DataError(
        "data.empty-loss",
        message,
        where=rows.places(dropped),
        why=f"data.max_length={limit} cuts the answer ({rows.locate(dropped[0])}: {limit} of "
        f"{len(first.tokens)} tokens kept, the answer starts at token {int(first.mask.argmax())})",
        fix=_advice(least_length + 1, positions, "drop"),
    )


def _advice(tokens: int, positions: int | None, otherwise: str) -> str:
    """A length that holds so many tokens, if the model has as many positions, or what to do with long rows."""
    other = f"data.on_long: {otherwise}"
    length = 1 << (tokens - 1).bit_length()
    if positions is None:
        return f"data.max_length: {length}   or   {other}"
    if tokens > positions:
        return f"{other} (the model has {positions} positions)"
    return f"data.max_length: {min(length, positions)}   or   {other}"
