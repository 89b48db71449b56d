"""Where training data comes from: a file, a folder, a glob, a data set of the hub or an installed source, or a list of
them with weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from lorafusion_jax.config.values import as_number, check_file, check_text
from lorafusion_jax.families.hf_config import shortened
from lorafusion_jax.plugins import not_known

MOST_SOURCES = 1024
SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-6, 1000.0
KEYS = ("path", "weight")
NAMED_KEYS = ("source", "argument", "weight")
GROUP = "lorafusion_jax.sources"
HUB = "hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of rows from another package: `data.train: NAME:argument`.

    Args:
        rows: returns the rows of an argument, the text after `NAME:`. They are dictionaries of JSON values; arrays of
            numpy become lists. Every call gives the same rows in the same order, in every process and on every host:
            `check`, `plan`, `train` and `resume` each ask for them, and large sets are read twice.

    >>> Source(rows=lambda argument: [{"text": word} for word in argument.split()]).rows("to be")[1]
    {'text': 'be'}
    """

    rows: Callable[[str], Iterable[Mapping[str, Any]]]


SOURCES: dict[str, Source] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A source of rows.

    Attributes:
        path: file, folder, glob, `hf:org/set[:split]` or `NAME:argument` of an installed source.
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


def named_source(path: str) -> tuple[str, str] | None:
    """Returns name and argument of `NAME:argument`, where a source of that name is installed."""
    name, colon, argument = path.partition(":")
    return (name, argument) if colon and name != HUB and not_known(GROUP, SOURCES, name) is None else None


def is_file(path: str) -> bool:
    """Whether a path names a file, folder or glob: neither a data set of the hub nor an installed source."""
    return not path.startswith(f"{HUB}:") and named_source(path) is None


def _source(entry: object) -> DataSource:
    if isinstance(entry, str):
        return DataSource(path=_path(entry))
    if isinstance(entry, dict) and isinstance(entry.get("source"), str) and not set(entry) - set(NAMED_KEYS):
        return DataSource(path=_named(entry["source"], entry.get("argument", "")), weight=_weight(entry))
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or set(entry) - set(KEYS):
        forms = "a file, a table with path and weight, or one with source, argument and weight"
        raise ValueError(f"{forms}, not {shortened(entry)}")
    return DataSource(path=_path(entry["path"]), weight=_weight(entry))


def _path(text: str) -> str:
    return check_file(text) if named_source(text) is None else check_text(text)


def _named(name: str, argument: object) -> str:
    if wrong := not_known(GROUP, SOURCES, name):
        raise ValueError(f"an installed source: {wrong}")
    if not isinstance(argument, str):
        raise ValueError(f"a text as the argument of the source {name}, not {shortened(argument)}")
    return check_text(f"{name}:{argument}")


def _weight(entry: Mapping[str, Any]) -> float:
    value = entry.get("weight", 1.0)
    message = f"a weight from {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}, not {shortened(value)}"
    try:
        weight = float(as_number(value))  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise ValueError(message) from None
    if not SMALLEST_WEIGHT <= weight <= LARGEST_WEIGHT:  # nor NaN
        raise ValueError(message)
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
        *(
            {
                "type": "object",
                "properties": {
                    key: {"type": "number", "exclusiveMinimum": 0} if key == "weight" else {"type": "string"}
                    for key in keys
                },
                "required": [keys[0]],
                "additionalProperties": False,
            }
            for keys in (KEYS, NAMED_KEYS)
        ),
    ]
}
SOURCES_SCHEMA = {"anyOf": [*_ENTRY["anyOf"], {"type": "array", "items": _ENTRY, "minItems": 1}]}
TrainSources = Annotated[
    Sources, PlainValidator(read_sources), PlainSerializer(as_written), WithJsonSchema(SOURCES_SCHEMA)
]
