"""Where training data comes from: a file, a folder, a glob or a data set of the hub, or a list of them with weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from lorafusion_jax.config.values import as_number, check_file
from lorafusion_jax.families.hf_config import shortened

MOST_SOURCES = 1024
SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-6, 1000.0
KEYS = ("path", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A source of rows.

    Attributes:
        path: file, folder, glob or `hf:org/set[:split]`.
        weight: share of its rows that an epoch has: 0.3 takes three of ten, 2 takes each twice.
    """

    path: str
    weight: float = 1.0


Sources = tuple[DataSource, ...]


def read_sources(value: object) -> Sources:
    """Reads a path, or a list of paths and of tables with path and weight.

    Raises:
        ValueError: what is expected instead.

    >>> read_sources(["a.jsonl", {"path": "b.jsonl", "weight": 0.3}])[1].weight
    0.3
    """
    if isinstance(value, tuple) and all(isinstance(entry, DataSource) for entry in value):
        return value
    entries = value if isinstance(value, list) else [value]
    if not 0 < len(entries) <= MOST_SOURCES:
        raise ValueError(f"a file, or a list of 1 to {MOST_SOURCES} files, not {shortened(value)}")
    sources = tuple(_source(entry) for entry in entries)
    counts = Counter(source.path for source in sources)
    if twice := sorted(path for path, count in counts.items() if count > 1):
        raise ValueError(f"a list of different files; {twice[0]} stands there twice: give it a weight of 2")
    return sources


def held_out_sources(value: object) -> Sources:
    """`read_sources` for held-out data, which is evaluated once and has no weights."""
    sources = read_sources(value)
    if any(source.weight != 1 for source in sources):
        raise ValueError("a file or a list of files without weights: all held-out rows are evaluated once")
    return sources


def _source(entry: object) -> DataSource:
    if isinstance(entry, str):
        return DataSource(path=check_file(entry))
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or set(entry) - set(KEYS):
        raise ValueError(f"a file, or a table with path and weight, not {shortened(entry)}")
    return DataSource(path=check_file(entry["path"]), weight=_weight(entry.get("weight", 1.0)))


def _weight(value: object) -> float:
    wanted = f"a weight from {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}, not {shortened(value)}"
    try:
        weight = float(as_number(value))  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise ValueError(wanted) from None
    if not SMALLEST_WEIGHT <= weight <= LARGEST_WEIGHT:  # nor NaN
        raise ValueError(wanted)
    return weight


def as_written(sources: Sequence[DataSource] | float | None) -> Any:
    """The value as a job file has it."""
    if not isinstance(sources, Sequence):
        return sources
    entries = [s.path if s.weight == 1 else {"path": s.path, "weight": s.weight} for s in sources]
    return entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries


def names(sources: Sequence[DataSource]) -> str:
    """Short text for messages and tables."""
    first = sources[0].path
    return first if len(sources) == 1 else f"{first} and {len(sources) - 1} more"


_ENTRY = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"path": {"type": "string"}, "weight": {"type": "number", "exclusiveMinimum": 0}},
            "required": ["path"],
            "additionalProperties": False,
        },
    ]
}
SOURCES_SCHEMA = {"anyOf": [*_ENTRY["anyOf"], {"type": "array", "items": _ENTRY, "minItems": 1}]}
TrainSources = Annotated[
    Sources, PlainValidator(read_sources), PlainSerializer(as_written), WithJsonSchema(SOURCES_SCHEMA)
]
