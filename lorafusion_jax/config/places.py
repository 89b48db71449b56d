"""Places for adapters: how large the adapters in them may be. A live session has them, and a run that reserves some.

A place has a kind of adapters, a largest rank and all targets; those of experts only if it is of the kind "experts",
because they take memory for every expert. Programs are compiled for these. What differs by adapter
(columns, rank, scale, dropout, objective) goes to the devices with every microbatch, so a place changes its adapter
without compiling.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lorafusion_jax.adapters.kind import Head
from lorafusion_jax.adapters.spec import ALL_EXPERTS, AdapterSpec
from lorafusion_jax.adapters.table import PLAIN, unknown_kind
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.objective.choose import known_heads

MOST_PLACES, MOST_RANK = 256, 1024
ON_EXPERTS = ALL_EXPERTS  # kind of places


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Places of a session.

    Args:
        ranks: largest rank of each place, ascending.
        kinds: kind of adapters of each place, see `place_kind`.
        dropout: whether adapters may use dropout.
        heads: of objectives that every place can train.
        targets: projections that adapters may have (None: all).

    >>> places = Places.of({16: 2, 64: 1, "dora:16": 1})
    >>> places.ranks, places.kinds
    ((16, 16, 16, 64), ('dora', 'lora', 'lora', 'lora'))
    """

    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    dropout: bool = True
    heads: tuple[Head, ...] = ()
    targets: tuple[str, ...] | None = None

    @classmethod
    def of(cls, classes: Mapping[Any, int], *, dropout: bool = True, targets: Sequence[str] | None = None) -> Places:
        """Builds the places from classes: RANK or KIND:RANK → number of places. They have the heads of all objectives.

        Raises:
            ConfigError: `places.classes`.
        """
        counts: dict[tuple[int, str] | None, int] = {}
        if isinstance(classes, Mapping) and all(type(count) is int for count in classes.values()):
            counts = {_parse_class(name): count for name, count in classes.items()}
        total = sum(max(count, 0) for count in counts.values())
        if None in counts or not 0 < total <= MOST_PLACES or min(counts.values()) < 1 or len(counts) < len(classes):
            raise ConfigError(
                "places.classes",
                f"places must be 1 to {MOST_PLACES} in classes of rank -> number, not {classes!r}.",
                fix="for example 16:8,64:2,dora:16:1 for eight places of rank 16, two of rank 64, and one for DoRA; "
                "a dictionary in Python, {16: 8}",
            )
        in_order = sorted(
            rank_and_kind for rank_and_kind in counts if rank_and_kind is not None for _ in range(counts[rank_and_kind])
        )
        ranks, kinds = tuple(rank for rank, _ in in_order), tuple(kind for _, kind in in_order)
        narrow = None if targets is None else tuple(targets)
        return cls(ranks=ranks, kinds=kinds, dropout=dropout, heads=known_heads(), targets=narrow)

    @property
    def classes(self) -> dict[str, list[int]]:
        """Name of each class → its places."""
        by_class: dict[str, list[int]] = {}
        for index, (rank, kind) in enumerate(zip(self.ranks, self.kinds, strict=True)):
            by_class.setdefault(class_name(kind, rank), []).append(index)
        return by_class

    def find(self, kind: str, rank: int, occupied: Collection[int]) -> int | None:
        """Returns the smallest free place that holds an adapter of a kind and rank; None if there is none."""
        places = enumerate(zip(self.ranks, self.kinds, strict=True))
        return next(
            (
                p
                for p, (largest_rank, place_kind) in places
                if place_kind == kind and largest_rank >= rank and p not in occupied
            ),
            None,
        )

    def arrange(self, ranks: Mapping[str, int], place_now: Mapping[str, int]) -> dict[str, int]:
        """Returns a place for each of some adapters, where all places are of their kind and some choice of places fits.

        Those that hold a place keep it, unless the others do not fit then.

        Args:
            ranks: of the adapters that need places.
            place_now: places of adapters now; those of others are free.

        >>> Places(ranks=(4, 8), kinds=("lora", "lora")).arrange({"law": 4, "med": 8}, {"law": 1})
        {'med': 1, 'law': 0}
        """
        index = {name: place_now[name] for name in ranks if name in place_now}
        for name in sorted(ranks.keys() - index.keys(), key=lambda name: (-ranks[name], name)):
            place = self.find(self.kinds[0], ranks[name], index.values())
            if place is None:
                assert place_now, "more adapters than places, or larger ones"
                return self.arrange(ranks, {})
            index[name] = place
        return index

    def count(self, kind: str, rank: int) -> int:
        """How many places, free or not, have the kind and are large enough."""
        return sum(of == kind and largest >= rank for largest, of in zip(self.ranks, self.kinds, strict=True))

    def holds(self, kind: str, rank: int) -> bool:
        """Whether some place, free or not, has the kind and is large enough."""
        return self.find(kind, rank, ()) is not None

    def refuses(self, spec: AdapterSpec) -> str:
        """Says why no place of the session can ever hold an adapter; empty if one can."""
        kind_of_spec = place_kind(spec)
        largest = max(
            (rank for rank, kind in zip(self.ranks, self.kinds, strict=True) if kind == kind_of_spec), default=0
        )
        if not largest:
            return f"the session has no place for kind {kind_of_spec}, only for {', '.join(sorted(set(self.kinds)))}"
        if spec.rank > largest:
            return f"rank {spec.rank} is above the largest place, {largest}"
        if spec.tokens is not None:
            return "trainable tokens need a run of their own: the places of a session have no rows of the embedding"
        if self.lacks_head(spec):
            names = ", ".join(head.name for head in self.heads)
            return f"the head of its objective is not among those of places, which are of {names} with default options"
        if self.targets is not None and (missing_targets := sorted(set(spec.targets) - set(self.targets))):
            return f"it adapts {', '.join(missing_targets)}, and the session was opened for {', '.join(self.targets)}"
        return "the session was opened without dropout" if spec.dropout and not self.dropout else ""

    def lacks_head(self, spec: AdapterSpec) -> bool:
        """Whether places do not have the head of an adapter's objective."""
        keys = set() if spec.head is None else set(spec.head.by_key)
        return not keys <= {key for head in self.heads for key in head.by_key}


def place_kind(spec: AdapterSpec) -> str:
    """Kind of the places that can hold an adapter: its own kind, or "experts" for those that adapt experts."""
    return ON_EXPERTS if spec.on_experts else spec.kind


def class_name(kind: str, rank: int) -> str:
    """Name of a class of places.

    >>> class_name("lora", 16), class_name("dora", 8)
    ('16', 'dora:8')
    """
    return str(rank) if kind == PLAIN else f"{kind}:{rank}"


def _parse_class(name: int | str) -> tuple[int, str] | None:
    kind, _, rank = str(name).rpartition(":")
    kind = kind or PLAIN
    exists = kind == ON_EXPERTS or unknown_kind(kind) is None
    is_valid = rank.isdecimal() and len(rank) < 5 and 0 < int(rank) <= MOST_RANK and exists
    return (int(rank), kind) if is_valid else None
