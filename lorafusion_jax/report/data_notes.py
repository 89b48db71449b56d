"""Warnings about truncated and dropped rows, and about settings that are longer than their run, with what to change."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.checkpoint.warm_start_base import unproven_bases
from lorafusion_jax.config.schema import AdapterConfig, BatchSettings, DataSettings, JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.tokenized_set import DataReport, TokenizedSet
from lorafusion_jax.errors import LoraFusionError, first_few
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.report.format import exact, percent

SHOWN = 5


def data_notes(config: JobConfig, prepared: Prepared) -> list[str]:
    """Warnings about the rows of all adapters, training and held-out."""
    notes: list[str] = []
    model = _base(config)
    positions = sys.maxsize if model is None else model.positions
    readers: dict[str, list[str]] = {}  # of each note: the members of a sweep share it
    for adapter in config.adapters:
        data = prepared.adapters[adapter.name]
        for who, samples in ((adapter.name, data.train), (f"{adapter.name} (held-out)", data.eval)):
            if samples is not None:
                for report in (samples.report, *samples.report.parts):
                    for note in report.notes:
                        readers.setdefault(f"{report.source}: {note}", []).append(who)
                for note in _notes_of_set(samples, adapter.data, config.batch, positions):
                    readers.setdefault(note, []).append(who)
    of_files = [f"{first_few(names, SHOWN)}: {note}" for note, names in readers.items()]
    notes = [*of_files, *notes, *_length_notes(config, prepared), *unproven_bases(config), *_base_notes(model)]
    return list(dict.fromkeys(notes))


def _base(config: JobConfig) -> ModelConfig | None:
    try:
        return ModelConfig.from_hf(base_directory(config))
    except LoraFusionError:  # who needs the base says so
        return None


def _base_notes(model: ModelConfig | None) -> list[str]:
    """Warnings about what the base has and training leaves out."""
    rates = ", ".join(f"{key}={rate:g}" for key, rate in model.dropouts if rate) if model else ""
    if not rates:
        return []
    return [f"base: {rates} of its config.json not applied: adapters train on the model as it is evaluated"]


def _notes_of_set(samples: TokenizedSet, settings: DataSettings, batch: BatchSettings, positions: int) -> Iterator[str]:
    if not samples.report.parts or samples.parts is None:
        longer = _suggest_length(samples.report.uncut, settings.max_length, batch, positions)
        yield from _notes("", samples.report, samples.rows, samples.lengths, settings, longer)
        return
    for part, report in enumerate(samples.report.parts):
        in_part = samples.parts == part
        rows, lengths = samples.rows[in_part], samples.lengths[in_part]
        longer = _suggest_length(report.uncut, settings.max_length, batch, positions)
        yield from _notes(f"{report.source}: ", report, rows, lengths, settings, longer)


def _notes(
    part: str, report: DataReport, rows: np.ndarray, lengths: np.ndarray, settings: DataSettings, longer: str
) -> Iterator[str]:
    limit = settings.max_length
    if report.cut:
        full_rows = rows[lengths == limit]  # may include uncut rows of exactly this length
        which = f": {_rows(full_rows.tolist())}" if len(full_rows) == report.cut else ""
        yield (
            f"{part}{_share(report.cut, report.rows)} are cut at {exact(limit)} tokens{which}\n"
            f"    {longer}{', or ' if longer else ''}set data.on_long: drop"
        )
    if report.dropped:
        share = _share(len(report.dropped), report.rows)
        yield f"{part}{share} have no token to learn from and are left out: {_rows(report.dropped)}"
    if report.too_long:
        share = _share(len(report.too_long), report.rows)
        yield f"{part}{share} exceed {exact(limit)} tokens and are left out: {_rows(report.too_long)}" + (
            f"\n    {longer}" if longer else ""
        )


def _share(some: int, rows: int) -> str:
    return f"{exact(some)} of {exact(rows)} rows ({percent(some / rows)})"


def _suggest_length(uncut: Sequence[int], limit: int, batch: BatchSettings, positions: int) -> str:
    """Suggests lengths that the model takes; the quantiles end with those of 98 % and of all rows."""
    *_, most, longest = uncut
    reasons = {most: "to keep 98 % whole", longest: "to keep all whole"}
    reasons = {tokens: reason for tokens, reason in reasons.items() if tokens <= positions}
    if longest > positions:
        reasons[positions] = "for as much as the model has positions"
    tile = batch.tile_tokens
    lengths = {min(-(-tokens // tile) * tile, positions): reason for tokens, reason in reasons.items()}
    longer = {length: reason for length, reason in lengths.items() if length > limit}
    if not longer:
        return ""
    capacity = ", with batch.capacity_tokens as large at least" if max(longer) > max(batch.sizes) else ""
    return "raise data.max_length " + ", ".join(f"to {length} {reason}" for length, reason in longer.items()) + capacity


def _rows(rows: Sequence[int]) -> str:
    word = "row" if len(rows) == 1 else "rows"
    return f"{word} {', '.join(str(row) for row in rows[:SHOWN])}" + (" …" if len(rows) > SHOWN else "")


def _length_notes(config: JobConfig, prepared: Prepared) -> Iterator[str]:
    """Yields what lies beyond the end of an adapter, or of the run."""
    steps = {adapter.name: _num_steps(adapter, prepared) for adapter in config.adapters}
    for adapter in config.adapters:
        yield from _of_adapter(adapter, prepared.adapters[adapter.name].epoch_samples, steps[adapter.name])
    longest, total = max(steps.values()), sum(steps.values())
    train, save = config.train, config.save
    has_eval = any(data.eval is not None for data in prepared.adapters.values())
    if train.eval_every_steps is not None and train.eval_every_steps > longest and has_eval:
        yield (
            f"train.eval_every_steps={exact(train.eval_every_steps)}, and no adapter takes more than {exact(longest)}: "
            "they are only evaluated at their start and end"
        )
    yield from _of_halving(config, prepared, steps)
    if train.max_steps is not None and train.max_steps > longest:
        yield f"train.max_steps={exact(train.max_steps)} has no effect: no adapter takes more than {exact(longest)}"
    if save.every_steps is not None and save.every_steps > total and save.every_minutes is None:
        yield f"save.every_steps={exact(save.every_steps)}, and all adapters take {exact(total)}: only the end is saved"


def _of_halving(config: JobConfig, prepared: Prepared, steps: Mapping[str, int]) -> Iterator[str]:
    if not config.halving.is_on:
        return
    first, longest = config.halving.first_step, max(steps.values())
    by_set: dict[str, list[int]] = {}
    for name, data in prepared.adapters.items():
        if data.eval is not None:
            by_set.setdefault(data.eval.digest, []).append(steps[name])
    unequal = [counts for counts in by_set.values() if max(counts) > config.halving.factor * min(counts)]
    if all(len(counts) < 2 for counts in by_set.values()):
        yield "halving compares adapters with the same held-out data, and no two of them have it: none will end early"
    elif first is not None and first >= longest:
        yield (
            f"halving.first_step={exact(first)}, and no adapter takes more than {exact(longest)} steps: none will end "
            "early"
        )
    elif first is not None and unequal:
        yield (
            f"halving.first_step={exact(first)} compares adapters that take {exact(min(unequal[0]))} steps in all with "
            f"such that take {exact(max(unequal[0]))}, after unequal parts of their training; halving.first_share "
            "compares each after the same part of its own"
        )


def _of_adapter(adapter: AdapterConfig, rows: int, steps: int) -> Iterator[str]:
    if adapter.global_samples > rows:
        yield (
            f"{adapter.name}: batch.global_samples={exact(adapter.global_samples)}, and there are {exact(rows)} rows: "
            f"{exact(steps)} step{'s' if steps > 1 else ''} in all"
        )
    if 1 <= steps < adapter.optim.warmup:
        warmup = exact(int(adapter.optim.warmup))
        yield f"{adapter.name}: optim.warmup={warmup} steps, and it takes {exact(steps)}: the learning rate only rises"


def _num_steps(adapter: AdapterConfig, prepared: Prepared) -> int:
    data = prepared.adapters[adapter.name]
    return -(-len(data.order) // adapter.global_samples)
