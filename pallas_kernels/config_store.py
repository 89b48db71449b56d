"""Measured tile sizes, one JSON file per device: every timing with its conditions, not only the winner.

Backends look tile sizes up here; `tuning` writes the files. A stored configuration is taken only for the shape it was
measured at, with or without dropout as it was measured, and only where it beat the heuristic's choice clearly: the 20th
to 80th percentiles of the two do not overlap. Every other call uses the heuristic beside its kernel.

This file knows no kernel and imports no jax: a configuration is a dataclass that the caller brings.

T packed tokens · K in features · N out features · R padded rank
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

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
    entries: tuple[Entry, ...] = ()

    def best(self, key: tuple, heuristic: Any) -> Any:
        """Returns the fastest configuration of a shape; the heuristic's own where nothing beat it clearly."""
        found = sorted((entry for entry in self.entries if entry.key == key), key=lambda entry: entry.p50_us)
        own = [entry for entry in found if entry.config == dataclasses.asdict(heuristic)]
        if not own or found[0].p80_us >= own[0].p20_us:
            return heuristic
        return configuration(found[0], type(heuristic))

    def has(self, key: tuple, config: Any) -> bool:
        return any(entry.key == key and entry.config == dataclasses.asdict(config) for entry in self.entries)

    def without(self, key: tuple, configs: Iterable[Any]) -> Table:
        gone = [dataclasses.asdict(config) for config in configs]
        kept = (entry for entry in self.entries if entry.key != key or entry.config not in gone)
        return dataclasses.replace(self, entries=tuple(kept))


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
        raw = json.loads(path.read_text())
        entries = tuple(Entry(**entry) for entry in raw["entries"])
        for entry in entries if kernels is not None else ():
            _check(entry, kernels)
        return Table(device=raw["device"], conditions=raw["conditions"], entries=entries)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no tuning table: {error}; delete it and tune again") from error


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
    known = [field.name for field in dataclasses.fields(kind)]
    odd = sorted(set(entry.config) ^ set(known))
    return f"options of {entry.kernel} have changed: {', '.join(odd)}" if odd else None
