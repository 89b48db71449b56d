"""Which implementation of an op measured fastest: the rows of a tuning table, and the rules that read them.

A row holds the median time of one call, forward and backward, by every implementation that ran it.

*Winner*: the fastest implementation, if it beats the default by `MARGIN`; otherwise the default.
*Nearest row*: a call takes the row of its own sizes, or else the nearest one of the same op and the same properties
(type, dropout, one or several adapters, number of projections). No size may differ by more than the factor `REACH`.
The distance is the sum of the logarithms of the ratios of all sizes. Without such a row, nothing was measured.

This file imports no jax: planning reads it as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MARGIN = 0.02
REACH = 2.0

type Lookup = Callable[[OpCall], str | None]  # the measured winner of a call; None: nobody measured it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """What the choice of an implementation depends on.

    Args:
        op: "linear", "attention" or "norm".
        sizes: positive numbers; a row of other sizes may serve.
        properties: texts that must be equal.
    """

    op: str
    sizes: Mapping[str, int]
    properties: Mapping[str, str]

    @property
    def label(self) -> str:
        """Sizes and properties in words."""
        return ", ".join(f"{name} {value}" for name, value in (*self.sizes.items(), *self.properties.items()))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """Times of one call, in microseconds.

    Args:
        default: what runs where nothing was measured.
        median_us: by implementation.
        failed: why the other implementations did not run.
        jax: version that it was measured with.
    """

    call: OpCall
    default: str
    median_us: Mapping[str, float]
    failed: Mapping[str, str]
    jax: str

    @property
    def winner(self) -> str:
        return winner(self.median_us, self.default)

    @property
    def speedup(self) -> float:
        """Time of the default over that of the winner; 1 if the default did not run."""
        winner_us = self.median_us[self.winner]
        return self.median_us.get(self.default, winner_us) / winner_us

    def to_json(self) -> dict[str, Any]:
        """The row with its winner, for readers."""
        return dataclasses.asdict(self) | {"winner": self.winner}


def winner(median_us: Mapping[str, float], default: str, margin: float = MARGIN) -> str:
    """Returns the implementation that a table makes the default.

    Example:
        >>> winner({"xla": 100.0, "pallas_triton": 99.0}, "xla"), winner({"xla": 100.0, "pallas_triton": 80.0}, "xla")
        ('xla', 'pallas_triton')
    """
    best = min(median_us, key=lambda name: (median_us[name], name))
    displaced = default not in median_us or median_us[best] * (1 + margin) <= median_us[default]
    return best if displaced else default


def nearest(rows: Iterable[OpRow], call: OpCall) -> OpRow | None:
    """Returns the row that decides a call; None if none is near enough."""
    distances = [(distance(row.call, call), index, row) for index, row in enumerate(rows)]
    near = [entry for entry in distances if entry[0] < math.inf]
    return min(near)[2] if near else None


def distance(first: OpCall, second: OpCall) -> float:
    """Sum of |log2| of the ratios of sizes; infinite where one call says nothing about the other."""
    if first.op != second.op or first.properties != second.properties or first.sizes.keys() != second.sizes.keys():
        return math.inf
    logs = [abs(math.log2(size / second.sizes[name])) for name, size in first.sizes.items()]
    return sum(logs) if max(logs) <= math.log2(REACH) else math.inf


def row_from_json(raw: Mapping[str, Any]) -> OpRow:
    """Reads a row.

    Raises:
        KeyError, TypeError: it is not a row, or its winner does not follow from its times.
    """
    call = OpCall(**raw["call"])
    values = {field.name: raw[field.name] for field in dataclasses.fields(OpRow) if field.name != "call"}
    row = OpRow(call=call, **values)
    if not all(_positive(size) for size in (*call.sizes.values(), *row.median_us.values())) or not row.median_us:
        raise TypeError(f"{call.op}: sizes and times must be positive numbers")
    if raw["winner"] != row.winner:
        raise TypeError(f"{call.op}, {call.label}: {raw['winner']!r} does not win by its times, {row.winner!r} does")
    return row


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
