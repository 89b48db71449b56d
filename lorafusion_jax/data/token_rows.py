"""Rows that are tokenised already: `input_ids`, with `labels` and `attention_mask` as Transformers has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lorafusion_jax.data.rows import Rows, typed_row
from lorafusion_jax.data.tokenizer import Encoded, Tokenizer

IDS, LABELS, ATTENTION = "input_ids", "labels", "attention_mask"
FORMAT = "tokens"
NOT_LEARNED = -100


def parse_token_rows(rows: Rows, columns: Mapping[str, str], *, adapter: str, loss: str) -> list[Encoded]:
    """Returns the tokens of each row, and those that are learned: labels other than -100, or all tokens without labels.

    Padding, where `attention_mask` is 0, is left out.

    Raises:
        DataError: `data.bad-tokens`, with the rows.
    """
    samples: list[Encoded] = []
    bad: list[tuple[int, str]] = []
    for number, row in enumerate(rows.values):
        try:
            typed = typed_row(row, dict.fromkeys(columns.values(), "list")) if rows.untyped else row
            samples.append(_sample(typed, columns, loss))
        except ValueError as problem:
            bad.append((number, str(problem)))
    if bad:
        raise rows.refuse(
            "data.bad-tokens",
            f"{adapter}: {len(bad)} of {len(rows.values)} rows are no lists of tokens.",
            bad,
            fix=f"{IDS}: token ids; {LABELS}: the same ids, or {NOT_LEARNED} if not learned; {ATTENTION}: 1 or 0",
        )
    return samples


def unended_rows(samples: Sequence[Encoded], rows: Rows, tokenizer: Tokenizer) -> list[str]:
    """Returns a note on rows in which learned tokens do not end with one at which generation stops."""
    stops = np.array(tokenizer.stop_ids, np.int32)
    without = [number for number, sample in enumerate(samples) if not _ends(sample, stops, tokenizer)]
    if not without or not len(stops):
        return []
    names = ", ".join(tokenizer.piece(int(token)).strip() for token in stops)
    return [
        f"[data.no-end] {len(without)} of {len(samples)} rows have learned tokens that do not end with one at which "
        f"generation stops ({names}), first {rows.locate(without[0])}: the adapter does not learn to stop there"
    ]


def _ends(sample: Encoded, stops: np.ndarray, tokenizer: Tokenizer) -> bool:
    """Whether all runs of learned tokens end with a stop, or with white space behind one."""
    tokens, mask = sample
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False))
    ends_elsewhere = ends[~np.isin(tokens[ends], stops)]
    return all(
        end > 0 and mask[end - 1] and tokens[end - 1] in stops and tokenizer.piece(int(tokens[end])).isspace()
        for end in ends_elsewhere
    )


def _sample(row: Mapping, columns: Mapping[str, str], loss: str) -> Encoded:
    tokens = _numbers(row, columns[IDS], least=0)
    attended = np.ones(len(tokens), bool)
    if (name := columns.get(ATTENTION)) is not None and row.get(name) is not None:
        attention = _numbers(row, name, least=0)
        if len(attention) != len(tokens) or attention.max(initial=0) > 1:
            raise ValueError(f"'{name}' is not {len(tokens)} times 0 or 1")
        attended = attention == 1
    learned = np.ones(len(tokens), bool)
    if loss != "all" and (name := columns.get(LABELS)) is not None:
        labels = _numbers(row, name, least=NOT_LEARNED)
        if len(labels) != len(tokens):
            raise ValueError(f"'{name}' has {len(labels)} entries, and '{columns[IDS]}' {len(tokens)}")
        learned = labels != NOT_LEARNED
        if (labels[learned] != tokens[learned]).any():
            where = int(np.flatnonzero(learned & (labels != tokens))[0])
            raise ValueError(f"'{name}' has {labels[where]} at position {where}, where the token is {tokens[where]}")
    if not attended.any():
        raise ValueError("it has no token")
    return Encoded(tokens[attended], learned[attended])


def _numbers(row: Mapping, name: str, least: int) -> np.ndarray:
    values = row.get(name)
    if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
        raise ValueError(f"'{name}' is not a list of whole numbers")
    if min(values) < least or max(values) >= 2**31:
        raise ValueError(f"'{name}' has a number below {least}" if min(values) < least else f"'{name}' is too large")
    return np.array(values, np.int32)
