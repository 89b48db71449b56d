"""What a user should know about rows that are cut or left out, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lorafusion_jax.config.schema import DataSettings, JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.tokenized import TokenizedSet
from lorafusion_jax.report.format import percent, whole

SHOWN = 5


def data_notes(config: JobConfig, prepared: Prepared) -> list[str]:
    """Warnings about the rows of all adapters, training and held-out."""
    notes: list[str] = []
    for adapter in config.adapters:
        data = prepared.adapters[adapter.name]
        notes += _notes(f"{adapter.name}", data.train, adapter.data, config.batch.tile_tokens)
        if data.eval is not None:
            notes += _notes(f"{adapter.name} (held-out)", data.eval, adapter.data, config.batch.tile_tokens)
    return notes


def _notes(who: str, samples: TokenizedSet, settings: DataSettings, tile: int) -> Iterator[str]:
    report, limit = samples.report, settings.max_length
    if report.cut:
        cut = samples.rows[samples.lengths == limit]  # a row of just that length is among them, uncut
        rows = f": {_rows(cut.tolist())}" if len(cut) == report.cut else ""
        yield (f"{who}: {whole(report.cut)} of {whole(report.rows)} rows are cut at {whole(limit)} tokens "
               f"({percent(report.cut / report.rows)}){rows}\n    {_longer(report.uncut, limit, tile)}, or set data.on_long: drop")
    if report.dropped:
        yield (f"{who}: {whole(len(report.dropped))} of {whole(report.rows)} rows have no token to learn from and are left "
               f"out: {_rows(report.dropped)}")
    if report.too_long:
        yield (f"{who}: {whole(len(report.too_long))} of {whole(report.rows)} rows are longer than {whole(limit)} tokens and "
               f"are left out: {_rows(report.too_long)}\n    {_longer(report.uncut, limit, tile)}")


def _longer(uncut: Sequence[int], limit: int, tile: int) -> str:
    *_, most, longest = uncut
    if most > limit:
        return f"raise data.max_length to {_round_up(most, tile)} to keep 98 % whole, to {_round_up(longest, tile)} to keep all"
    return f"raise data.max_length to {_round_up(longest, tile)} to keep all whole"


def _round_up(tokens: int, tile: int) -> int:
    return -(-tokens // tile) * tile


def _rows(rows: Sequence[int] | np.ndarray) -> str:
    word = "row" if len(rows) == 1 else "rows"
    return f"{word} {', '.join(str(row) for row in rows[:SHOWN])}" + (" …" if len(rows) > SHOWN else "")
