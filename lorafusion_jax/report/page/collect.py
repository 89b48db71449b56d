"""What the report shows of a run, read from its folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.report.ranking import Measure

MOST_POINTS = 400  # of a curve: more than a page has pixels for each of several adapters
MOST_TEXTS = 6  # evaluations of an adapter whose texts a page shows
MOST_OF_PAGE, LEAST_POINTS = 3000, 50  # of one metric of all adapters; of a curve
STEP_KEYS = ("kind", "slot", "adapter", "step", "time", "loss_tokens", "eval_tokens", "crc")
LAST_SHARE = 0.1  # of the steps: the mean of their losses is the training loss of the table


@dataclass(slots=True, kw_only=True)
class AdapterCurves:
    """Numbers of one adapter over its steps.

    Attributes:
        series: name of a metric → [(step, value)]; held-out metrics begin with `eval_`.
    """

    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name not in STEP_KEYS and isinstance(value, int | float) and math.isfinite(value):
                self.series.setdefault(name, []).append((row["step"], float(value)))

    @property
    def train_loss(self) -> float | None:
        """Mean loss of the last tenth of the steps."""
        losses = [loss for _, loss in self.series.get("loss", ())]
        tail = losses[-max(1, round(LAST_SHARE * len(losses))) :]
        return sum(tail) / len(tail) if tail else None

    def best(self, measure: Measure) -> tuple[int, float] | None:
        """Step and value of the best evaluation after training began."""
        held_out = [(step, value) for step, value in self.series.get(measure.metric, ()) if step > 0]
        return min(held_out, key=lambda pair: measure.sort_key(pair[1]), default=None)


def read_curves(folder: Path, adapters: Sequence[str]) -> dict[str, AdapterCurves]:
    """Reads the curves of every adapter from metrics.jsonl."""
    curves = {name: AdapterCurves() for name in adapters}
    file = folder / "metrics.jsonl"
    for row in read_rows(file) if file.exists() else ():
        if row["kind"] in ("step", "eval") and row["adapter"] in curves:
            curves[row["adapter"]].add(row)
    return curves


def read_texts(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Reads what adapters generated at their evaluations: adapter → step, prompts and texts."""
    texts: dict[str, list[dict[str, Any]]] = {}
    file = folder / "events.jsonl"
    for row in read_rows(file) if file.exists() else ():
        if row["kind"] == "sample":
            pairs = list(zip(row["prompts"], row["texts"], strict=True))
            texts.setdefault(row["adapter"], []).append({"step": row["step"], "pairs": pairs})
    return {name: _first_and_last(entries) for name, entries in texts.items()}


def _first_and_last(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most `MOST_TEXTS` evaluations: the first one and the last ones."""
    return entries if len(entries) <= MOST_TEXTS else [entries[0], *entries[1 - MOST_TEXTS :]]


def points_of_curve(adapters: int) -> int:
    """How many points a curve has beside those of other adapters, so that a page of a large sweep stays small.

    >>> points_of_curve(4), points_of_curve(16), points_of_curve(500)
    (400, 187, 50)
    """
    return min(MOST_POINTS, max(LEAST_POINTS, MOST_OF_PAGE // max(adapters, 1)))


def thin(points: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """At most `most` points: means of equal runs of steps, and the last point as it is.

    >>> thin([(1, 4.0), (2, 2.0), (3, 1.0), (4, 1.0), (5, 0.5)], most=3)
    [(2, 3.0), (4, 1.0), (5, 0.5)]
    """
    if len(points) <= most:
        return list(points)
    size = math.ceil((len(points) - 1) / (most - 1))
    groups = [points[start : min(start + size, len(points) - 1)] for start in range(0, len(points) - 1, size)]
    means = [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
    return [(step, float(f"{mean:.6g}")) for step, mean in means] + [
        points[-1]
    ]  # digits that nobody sees make pages large


def differing_settings(config: JobConfig) -> dict[str, dict[str, Any]]:
    """Settings that are not the same for all adapters: key → adapter → value."""
    settings = {
        adapter.name: dict(_flatten(adapter.model_dump(mode="json", exclude={"name"}))) for adapter in config.adapters
    }
    keys = dict.fromkeys(key for values in settings.values() for key in values)
    return {
        key: {name: values.get(key) for name, values in settings.items()}
        for key in keys
        if len({repr(values.get(key)) for values in settings.values()}) > 1
    }


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def tokens_trained(folder: Path, slots_done: int) -> dict[str, int]:
    """Tokens of each adapter in the slots that are done."""
    plan = RunFolder(folder).read_plan()
    lengths = {job.name: job.sample_tokens for job in plan.jobs}
    tokens = dict.fromkeys(lengths, 0)
    for slot in plan.slots[:slots_done]:
        for ref in slot.samples:
            tokens[ref.adapter] += lengths[ref.adapter][ref.sample]
    return tokens
