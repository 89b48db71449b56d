"""Measured tile sizes and implementations, one JSON file per device: every timing with its conditions.

Backends look tile sizes up here, and the ops their implementation; `tuning` writes the files. A stored configuration is
taken only for the shape it was measured at, with or without dropout as it was measured, and only where it beat the
heuristic's choice clearly: the 20th to 80th percentiles of the two do not overlap. Every other call uses the heuristic
beside its kernel. Rules for implementations: see `measured`.

The package ships a table per measured device. `use` puts another one before it, such as the one of this machine. A file
has a format number and a digest of its content, so that a file that is cut, or whose device was edited, is refused.

This file knows no kernel and imports no jax: a configuration is a dataclass that the caller brings.

T packed tokens · K in features · N out features · R padded rank
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pallas_kernels.measured import OpCall, OpRow, nearest, row_from_json

FORMAT = 2  # from 2 on, a table holds implementations and a digest
DATA = pathlib.Path(__file__).resolve().parent / "data"

PASSES_OVER_X = ("down", "da", "mosaic_down", "mosaic_da")
PASSES_OVER_DY = ("dsdb", "mosaic_dsdb")
WITHOUT_MASK = (*PASSES_OVER_DY, "mosaic_fwd", "triton_fwd")  # dropout is no business of theirs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One kernel with one choice of tiles at one shape; microseconds."""

    kernel: str
    tokens: int
    in_features: int
    out_features: int
    rank: int
    rate: float
    config: dict[str, Any]
    p20_us: float
    p50_us: float
    p80_us: float

    @property
    def key(self) -> tuple:
        return key(self.kernel, self.tokens, self.in_features, self.out_features, self.rank, dropout=self.rate > 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All measurements of one device."""

    device: str
    conditions: dict[str, str]  # versions, date
    entries: tuple[Entry, ...] = ()  # tile sizes
    ops: tuple[OpRow, ...] = ()  # implementations

    @property
    def digest(self) -> str:
        """SHA-256 of device, versions and all times."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def best(self, key: tuple, heuristic: Any) -> Any:
        """Returns the fastest configuration of a shape; the heuristic's own where nothing beat it clearly."""
        entries = sorted((entry for entry in self.entries if entry.key == key), key=lambda entry: entry.p50_us)
        heuristic_entries = [entry for entry in entries if entry.config == dataclasses.asdict(heuristic)]
        if not heuristic_entries or entries[0].p80_us >= heuristic_entries[0].p20_us:
            return heuristic
        return configuration(entries[0], type(heuristic))

    def has(self, key: tuple, config: Any) -> bool:
        return any(entry.key == key and entry.config == dataclasses.asdict(config) for entry in self.entries)

    def without(self, key: tuple, configs: Iterable[Any]) -> Table:
        gone = [dataclasses.asdict(config) for config in configs]
        entries = (entry for entry in self.entries if entry.key != key or entry.config not in gone)
        return dataclasses.replace(self, entries=tuple(entries))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A table and where it comes from; a path of None: it came with the package."""

    table: Table
    path: pathlib.Path | None = None


_used: dict[str, Source] = {}  # by device


def use(path: pathlib.Path) -> Table:
    """Puts the table at `path` before the shipped one of its device, for all programs that are traced from now on.

    Raises:
        ValueError: there is no table of this version at `path`.

    Example:
        >>> use(pathlib.Path("a100.json"))  # doctest: +SKIP
    """
    table = load(path)
    if table is None:
        raise ValueError(f"{path} does not exist")
    _used[table.device] = Source(table=table, path=path)
    return table


def forget(device_kind: str) -> None:
    """Undoes `use`."""
    _used.pop(device_kind, None)


def sources(device_kind: str) -> tuple[Source, ...]:
    """Tables of a device; the first one that holds a call decides it."""
    overrides = (_used[device_kind],) if device_kind in _used else ()
    return (*overrides, Source(table=shipped(device_kind)))


def used_digest(device_kind: str) -> str:
    """Digest of the table in use on a device; empty where the shipped one decides."""
    return _used[device_kind].table.digest if device_kind in _used else ""


def best_config(device_kind: str, key: tuple, heuristic: Any) -> Any:
    """Returns the fastest measured configuration, or the heuristic's own; see `Table.best`."""
    tables = [source.table for source in sources(device_kind)]
    measured = (table for table in tables if any(entry.key == key for entry in table.entries))
    return next(measured, tables[-1]).best(key, heuristic)


def op_row(device_kind: str, call: OpCall) -> tuple[OpRow, Source] | None:
    """Returns the row that decides a call on a device, and its table; None if nobody measured it."""
    for source in sources(device_kind):
        if (row := nearest(source.table.ops, call)) is not None:
            return row, source
    return None


def fastest(device_kind: str, call: OpCall) -> str | None:
    """Returns the implementation that measured fastest; None if nobody measured the call."""
    row = op_row(device_kind, call)
    return None if row is None else row[0].winner


def key(kernel: str, tokens: int, in_features: int, out_features: int, rank: int, *, dropout: bool) -> tuple:
    """What the time of a kernel depends on: a pass over x does not care for N, one over dY not for K.

    Args:
        dropout: whether there are keep bits to make or to read; at which rate they were drawn does not matter.
    """
    return (
        kernel,
        tokens,
        0 if kernel in PASSES_OVER_DY else in_features,
        0 if kernel in PASSES_OVER_X else out_features,
        rank,
        dropout and kernel not in WITHOUT_MASK,
    )


def file_name(device_kind: str) -> str:
    """ "NVIDIA H200" -> "nvidia_h200.json"."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"


@functools.cache
def shipped(device_kind: str) -> Table:
    """The table that comes with the package; an empty one for a device nobody measured."""
    return load(DATA / file_name(device_kind)) or Table(device=device_kind, conditions={})


def load(path: pathlib.Path, kernels: Mapping[str, type] | None = None) -> Table | None:
    """Reads a table; None where there is no file.

    Args:
        kernels: configuration class of every kernel; given, each entry is checked against it.
    Raises:
        ValueError: the file is no table of this version.
    """
    if not path.exists():
        return None
    try:
        return _table(json.loads(path.read_text()), kernels)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is no tuning table: {reason}; delete it and tune again") from error


def _table(raw: Any, kernels: Mapping[str, type] | None) -> Table:
    entries = tuple(Entry(**entry) for entry in raw["entries"])
    for entry in entries if kernels is not None else ():
        _check(entry, kernels)
    if raw["format"] != FORMAT:
        raise TypeError(f"its format is {raw['format']}, this version reads {FORMAT}")
    ops = tuple(row_from_json(row) for row in raw["ops"])
    table = Table(device=raw["device"], conditions=raw["conditions"], entries=entries, ops=ops)
    if raw["digest"] != table.digest:
        raise TypeError("its digest is not that of its content: it was cut or edited")
    return table


def configuration(entry: Entry, kind: type) -> Any:
    """The configuration of an entry.

    Raises:
        ValueError: the kernel has other options in this version.
    """
    if reason := _changed_options(entry, kind):
        raise ValueError(f"a tuning table is not of this version: {reason}; delete it and tune again")
    return kind(**entry.config)


def _check(entry: Entry, kernels: Mapping[str, type]) -> None:
    if entry.kernel not in kernels:
        raise TypeError(f"there is no kernel {entry.kernel!r}")
    if reason := _changed_options(entry, kernels[entry.kernel]):
        raise TypeError(reason)


def _changed_options(entry: Entry, kind: type) -> str | None:
    names = [field.name for field in dataclasses.fields(kind)]
    odd = sorted(set(entry.config) ^ set(names))
    return f"options of {entry.kernel} have changed: {', '.join(odd)}" if odd else None
