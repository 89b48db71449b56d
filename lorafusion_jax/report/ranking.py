"""Ranks the adapters of a run that have the same held-out data and metric, such as the members of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lorafusion_jax.report.format import loss_text

OUT_OF_RACE = ("failed", "cancelled")
HELD_OUT_LOSS = "eval_loss"


@dataclass(frozen=True, slots=True)
class Measure:
    """What tells how good an adapter is.

    Attributes:
        metric: of its evaluations.
        rises: whether a greater value is a better one.
    """

    metric: str = HELD_OUT_LOSS
    rises: bool = False

    def value(self, evaluated: Mapping[str, Any]) -> float | None:
        """The metric in an evaluation; None if it has none, or no number."""
        value = evaluated.get(self.metric)
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    def sort_key(self, value: float | None) -> float:
        """Sorts the best value first."""
        return 0.0 if value is None else -value if self.rises else value

    @property
    def label(self) -> str:
        return "held-out loss" if self.metric == HELD_OUT_LOSS else self.metric


def measures_of(record: Mapping[str, Any]) -> dict[str, Measure]:
    """What the adapters of a run are compared by, from its record. Damaged entries are left out."""
    entries = {name: entry for name, entry in record.get("compared_by", {}).items() if isinstance(entry, dict)}
    return {
        name: Measure(entry["metric"], entry.get("rises") is True)
        for name, entry in entries.items()
        if isinstance(entry.get("metric"), str)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Adapters in the order in which a table shows them.

    Attributes:
        order: adapters with the same held-out data and measure stand together, the best first; failed and cancelled
            ones come after the others of their group.
        groups: of two or more adapters that can be compared, the best first.
        lines: for each group its best adapter, and by what.
    """

    order: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    lines: tuple[str, ...]

    @property
    def best(self) -> tuple[str, ...]:
        """The best adapter of each group."""
        return tuple(group[0] for group in self.groups)


def rank(
    status: Mapping[str, str],
    evaluated: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, object],
    measures: Mapping[str, Measure] = MappingProxyType({}),
) -> Ranking:
    """Ranks adapters by their newest evaluation.

    Args:
        status: of each adapter, in the order of the job.
        evaluated: metrics of each adapter; adapters that were not evaluated since training began may be left out.
        data: identity of the held-out data, such as its digest; adapters that are not in it stay where they are.
        measures: adapters with other ones are not compared. Default: the held-out loss.

    >>> losses = {name: {"eval_loss": loss} for name, loss in {"a": 2.5, "law": 1.0, "b": 2.25, "c": 2.0}.items()}
    >>> ranking = rank(dict.fromkeys(losses, "done") | {"c": "cancelled"}, losses, dict.fromkeys("abc", "one file"))
    >>> ranking.order, ranking.best
    (('b', 'a', 'c', 'law'), ('b',))
    """
    measure = {name: measures.get(name, Measure()) for name in status}
    values = {name: measure[name].value(evaluated.get(name, {})) for name in status}
    together: dict[object, list[str]] = {}
    for name in status:
        group = (data[name], measure[name]) if name in data else ("alone", name)
        together.setdefault(group, []).append(name)

    def key(name: str) -> tuple[bool, bool, float]:
        value = values[name]
        return status[name] in OUT_OF_RACE, value is None, measure[name].sort_key(value)

    members = [sorted(names, key=key) for names in together.values()]
    candidates = [
        {name: value for name in names if status[name] not in OUT_OF_RACE and (value := values[name]) is not None}
        for names in members
    ]
    groups = [group for group in candidates if len(group) > 1]
    return Ranking(
        order=tuple(name for names in members for name in names),
        groups=tuple(map(tuple, groups)),
        lines=tuple(_best_line(group, measure[next(iter(group))]) for group in groups),
    )


def _best_line(values: Mapping[str, float], measure: Measure) -> str:
    """Says which adapter is the best, and by what."""
    (best, value), (second, next_value), *_ = values.items()
    extreme, side = ("highest", "above") if measure.rises else ("lowest", "below")
    return (
        f"best: {best}, {measure.label} {loss_text(value)}, the {extreme} of {len(values)} on the same data, "
        f"{loss_text(abs(next_value - value))} {side} {second}"
    )


def adapter_to_export(status: Mapping[str, str], steps: Mapping[str, int], best: Sequence[str]) -> str | None:
    """The adapter that a next command should name: the best one, else the first that trained and was not stopped."""
    candidates = [name for name in (*best, *status) if steps[name]]
    return next((name for name in candidates if status[name] not in OUT_OF_RACE), next(iter(candidates), None))
