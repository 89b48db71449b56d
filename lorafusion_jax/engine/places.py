"""The places of a live session: how large the adapters in them may be, and which adapter is in which place.

A place has a largest rank and all targets. Programs are compiled for these. What differs by adapter (columns, rank,
scale, dropout) goes to the devices with every microbatch, so a place changes its adapter without compiling.
A places · P places for the adapters of a microbatch
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import (
    AdapterConfig,
    BaseSettings,
    BatchSettings,
    DataSettings,
    JobConfig,
    LoraSettings,
    MeshSettings,
    TrainSettings,
)
from lorafusion_jax.data.assemble import AdapterRows
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules.context import dropout_key
from lorafusion_jax.pipeline.leaves import Columns, own_columns

MOST_PLACES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Places of a session by rank.

    Args:
        ranks: largest rank of each place, ascending.
        kind: kind of all adapters.
        dropout: whether adapters may use dropout.

    >>> Places.of({16: 2, 64: 1}).ranks
    (16, 16, 64)
    """

    ranks: tuple[int, ...]
    kind: str = "lora"
    dropout: bool = True

    @classmethod
    def of(cls, classes: Mapping[int, int], *, kind: str = "lora", dropout: bool = True) -> Places:
        """Builds the places from classes, rank → number of places.

        Raises:
            ConfigError: `places.classes`.
        """
        ranks = tuple(rank for rank, count in sorted(classes.items()) for _ in range(count))
        if not 0 < len(ranks) <= MOST_PLACES or any(rank < 1 or count < 1 for rank, count in classes.items()):
            raise ConfigError(
                "places.classes",
                f"places must be 1 to {MOST_PLACES} in classes of rank -> number, not {dict(classes)}.",
                fix="for example 16:8,64:2 for eight places of rank 16 and two of rank 64",
            )
        return cls(ranks=ranks, kind=kind, dropout=dropout)

    @property
    def classes(self) -> dict[int, int]:
        return {rank: self.ranks.count(rank) for rank in sorted(set(self.ranks))}

    def find(self, spec: AdapterSpec, taken: Collection[int]) -> int | None:
        """Returns the smallest free place that holds an adapter; None if there is none."""
        if self.refuses(spec):
            return None
        return next((p for p, rank in enumerate(self.ranks) if rank >= spec.rank and p not in taken), None)

    def refuses(self, spec: AdapterSpec) -> str:
        """Says why no place of the session can ever hold an adapter; empty if one can."""
        if spec.rank > self.ranks[-1]:
            return f"rank {spec.rank} is above the largest place, {self.ranks[-1]}"
        if spec.kind != self.kind:
            return f"the session trains adapters of kind {self.kind}, not {spec.kind}"
        return "the session was opened without dropout" if spec.dropout and not self.dropout else ""


def session_config(
    base: BaseSettings,
    mesh: MeshSettings,
    places: Places,
    *,
    batch: BatchSettings,
    train: TrainSettings,
    directory: str,
) -> JobConfig:
    """Returns a job whose adapters fill every place: it has the session's programs and memory."""
    return JobConfig(
        base=base,
        mesh=mesh,
        batch=batch,
        train=train,
        directory=directory,
        adapters=tuple(
            AdapterConfig(
                name=place_name(place),
                data=DataSettings(train="-"),
                lora=LoraSettings(kind=places.kind, rank=rank, dropout=0.05 if places.dropout else 0.0),
            )
            for place, rank in enumerate(places.ranks)
        ),
    )


def place_name(place: int) -> str:
    """Name of a place among the adapters of its session's programs."""
    return f"place-{place}"


class PlaceTable:
    """What microbatches say about the adapters in the places. On the host; changed between microbatches."""

    def __init__(self, columns: Mapping[str, Columns], count: int):
        self._columns = columns
        self._windows = np.zeros((len(columns), 2, count), np.int32)
        self._rank = np.zeros(count, np.int32)
        self._scale, self._rate = np.zeros(count, np.float32), np.zeros(count, np.float32)
        self._key = np.zeros(count, np.uint32)

    def assign(self, place: int, spec: AdapterSpec) -> None:
        own = dict(own_columns(self._columns, place, spec))
        for row, (name, at) in enumerate(self._columns.items()):
            self._windows[row, :, place] = (at.first[place], own[name]) if name in own else (0, 0)
        self._rank[place], self._scale[place] = spec.columns, spec.scale
        self._rate[place], self._key[place] = spec.dropout, dropout_key(spec.seed)

    def rows(self, adapters: np.ndarray) -> AdapterRows:
        """Returns the rows of a microbatch's adapters [P], -1 in unused places."""
        number = np.maximum(adapters, 0)
        return AdapterRows(
            np.where(adapters >= 0, self._windows[:, :, number], 0).astype(np.int32),
            self._rank[number],
            self._scale[number],
            self._rate[number],
            self._key[number],
        )
