"""The context of a microbatch for LoRA layers: the adapter of each row, scales, ranks and dropout.

T packed tokens · A adapters
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Integer, UInt32

from lorafusion_jax.adapters.spec import AdapterSpec, common_rank
from lorafusion_jax.errors import ConfigError, RunError, raise_all
from pallas_kernels import Dropout, Implementation, fold_key
from pallas_kernels.dropout import mix32

SITES_PER_LAYER = 8  # room for the dropout sites of one layer: inputs of qkv, o, gate-up, down


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Data from which a layer computes the dropout keys of its rows.

    Args:
        rate: [A], as in `Dropout`.
        key: [A], as in `Dropout`.
        step: number of the training step, uint32, or one for each entry of the table.
        examples: id of each entry of the table, uint32, or a single id if all rows belong to one example (None: the
            position in the table).
    """

    rate: Any  # pytree leaves: transformations may replace them by other objects, or by arrays with more axes
    key: Any
    step: Any
    examples: Any = None

    def dropout(self, entries: int, rows: int) -> Dropout:
        """Returns dropout for `entries` examples with `rows` rows each, or for one example if `examples` is one id."""
        examples = jnp.arange(entries, dtype=jnp.uint32) if self.examples is None else self.examples
        if examples.ndim == 0:
            examples, entries, rows = examples[None], 1, entries * rows
        if examples.shape[0] != entries:
            raise RunError(
                "lora.examples",
                f"examples has {examples.shape[0]} entries, but the input of a layer has {entries} examples.",
            )
        example_key = mix32(examples ^ mix32(self.step ^ np.uint32(0x9E3779B9)))
        row_key = mix32(example_key[:, None] + jnp.arange(rows, dtype=jnp.uint32))
        return Dropout(rate=self.rate, key=self.key, row_key=row_key.reshape(-1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAContext:
    """Inputs of a LoRA layer for a microbatch, besides x.

    y[t] = x[t] W + scale[k] · (drop(x[t]) A[k]) B[k],  k = tile_adapter[t / tile]

    Layers of `apply_lora` take a table with one entry per example (leading axis of their input), per row, or per `tile`
    rows, and reject others. `LoRALinear`, for packed rows, divides its rows by the number of entries.

    Args:
        tile_adapter: int32, adapter of each example, row or tile of rows, -1 for padding. A single number is for all.
        scale: float32 [A], factor of each adapter.
        known_ranks: number of columns of A that each adapter uses, if known while tracing.
        traced_ranks: the same, if it is traced; see `ranks`.
        dropout: rates, and keys of given rows (None: see `draw`).
        draw: data from which layers compute the keys of their rows (None: no dropout, unless `dropout` is set).
        layer: number of the layer, folded into dropout's keys; a tracer inside a scan.
        tile: rows per entry, if an entry is neither an example nor a row.
        implementation: passed to `pallas_kernels`.
        drops_columns: whether dropout reaches the frozen product of an adapter, see `AdapterSpec`.
        only: number of the adapter of all rows, if that is known while tracing: no row is then looked up or selected.

    >>> specs = [AdapterSpec(name="law", rank=8, alpha=16), AdapterSpec(name="med", rank=4, alpha=4)]
    >>> LoRAContext.of(specs, [0, 1, 1, -1]).scale.tolist()
    [2.0, 1.0]
    """

    tile_adapter: Any  # a pytree leaf, as above
    scale: Any
    dropout: Dropout | None = None
    draw: Draw | None = None
    layer: Any = 0
    tile: int | None = field(default=None, metadata={"static": True})
    implementation: Implementation | None = field(default=None, metadata={"static": True})
    known_ranks: tuple[int, ...] | None = field(default=None, metadata={"static": True})
    traced_ranks: Any = None
    drops_columns: bool = field(default=False, metadata={"static": True})
    only: int | None = field(default=None, metadata={"static": True})

    @classmethod
    def of(
        cls,
        adapters: Sequence[AdapterSpec],
        tile_adapter: int | Sequence[int] | Integer[ArrayLike, "*tiles"] | None = None,
        *,
        only: str | int | None = None,
        step: int | Integer[ArrayLike, "*entries"] | None = None,
        train: bool | None = None,
        examples: int | Sequence[int] | Integer[ArrayLike, "*entries"] | None = None,
        row_key: UInt32[Array, " T"] | None = None,
        tile: int | None = None,
        implementation: Implementation | None = None,
    ) -> LoRAContext:
        """Builds the context of some adapters.

        Dropout depends only on (seed of the adapter, step, example, position, layer).

        Args:
            adapters: in the order of the stacked weights.
            tile_adapter: see the class.
            only: name or index of the adapter of all rows, instead of a table.
            step: number of the training step; each step draws new masks. Adapters may be at different steps: one
                number for each entry of the table.
            train: False switches dropout off (None: dropout is on if `step` or `row_key` is given).
            examples: id of each entry of the table, e.g. its index in the data set (None: its position). Under
                `jax.vmap` over examples, the index of the example.
            row_key: a key for every row, instead of `step`. Equal keys draw equal masks.
            tile: rows per entry, if an entry is neither an example nor a row.
            implementation: passed to `pallas_kernels`.

        Raises:
            ConfigError: all of: `lora.table`, neither or both of a table and `only` are given; `lora.unknown-adapter`,
                there is no such adapter (values of jax arrays are not checked, as they may be traced);
                `lora.dropout-step`, an adapter has dropout, but neither a step nor `train=False` is given.
        """
        stepless = step is None and row_key is None
        table = tile_adapter if only is None else _number_of(adapters, only)
        raise_all(
            [*_table_errors(table, tile_adapter, only, len(adapters)), *_dropout_errors(adapters, stepless, train)]
        )
        dropout_fields = {} if stepless or train is False else _dropout(adapters, step, examples, row_key)
        return cls(
            tile_adapter=jnp.asarray(table, jnp.int32),
            scale=jnp.asarray([spec.scale for spec in adapters], jnp.float32),
            known_ranks=tuple(spec.columns for spec in adapters),
            tile=tile,
            implementation=implementation,
            drops_columns=bool(dropout_fields) and any(spec.drops_columns for spec in adapters),
            only=table if only is not None and isinstance(table, int) and table >= 0 else None,
            **dropout_fields,
        )

    @property
    def ranks(self) -> tuple[int, ...] | Array | None:
        """Number of columns of A that each adapter uses; None: all."""
        return self.known_ranks if self.traced_ranks is None else self.traced_ranks

    def in_places(self, adapters: Int[Array, " P"]) -> LoRAContext:
        """Returns the context with the adapters of one microbatch only, numbered by their places. Needs row keys.

        Args:
            adapters: index of the adapter in each place, -1 if the place is unused.

        >>> specs = [AdapterSpec(name="law", rank=8, alpha=16), AdapterSpec(name="med", rank=4, alpha=4)]
        >>> context = LoRAContext.of(specs, [1, 1, -1]).in_places(jnp.array([1]))
        >>> context.tile_adapter.tolist(), context.scale.tolist()
        ([0, 0, -1], [1.0])
        """
        assert self.draw is None, "packed rows have keys of their own"
        number = jnp.maximum(adapters, 0)
        dropout = self.dropout
        if dropout is not None:
            dropout = replace(dropout, rate=dropout.rate[number], key=dropout.key[number])
        ranks = self.known_ranks
        rank = ranks and common_rank(ranks)
        return replace(
            self.numbered(adapters),
            known_ranks=rank and (rank,) * len(adapters),
            traced_ranks=None if not ranks or rank else jnp.asarray(ranks, jnp.int32)[number],
            scale=self.scale[number],
            dropout=dropout,
        )

    def numbered(self, adapters: Int[Array, " P"]) -> LoRAContext:
        """Returns the context with a table of places, where all else is by place already; see `in_places`."""
        is_at_place = (self.tile_adapter[:, None] == adapters) & (adapters >= 0)
        return replace(
            self, tile_adapter=jnp.where(is_at_place.any(1), jnp.argmax(is_at_place, 1), -1).astype(jnp.int32)
        )

    def of_tiles(self, tiles: slice) -> LoRAContext:
        """Returns the context of consecutive tiles of a microbatch. Needs row keys.

        >>> specs = [AdapterSpec(name="law", rank=8, alpha=16), AdapterSpec(name="med", rank=4, alpha=4)]
        >>> LoRAContext.of(specs, [0, 1, 1, -1]).of_tiles(slice(1, 3)).tile_adapter.tolist()
        [1, 1]
        """
        assert self.draw is None, "packed rows have keys of their own"
        dropout = self.dropout
        if dropout is not None:
            tile = len(dropout.row_key) // len(self.tile_adapter)
            dropout = replace(dropout, row_key=dropout.row_key[tile * tiles.start : tile * tiles.stop])
        return replace(self, tile_adapter=self.tile_adapter[tiles], dropout=dropout)

    def at_layer(self, layer: int | Int[Array, ""]) -> LoRAContext:
        """Returns the context for one layer: every layer draws its own dropout."""
        return replace(self, layer=layer)

    def at_site(self, site: int | Int[Array, ""]) -> Dropout | None:
        """Returns the dropout of one input of this layer. Projections that share the input share the site."""
        return None if self.dropout is None else self._at_site(self.dropout, site)

    def at_rows(self, rows: Sequence[int], site: int | Int[Array, ""]) -> tuple[Int[Array, " tiles"], Dropout | None]:
        """Returns the table and dropout for a layer whose input has these axes before the features.

        Raises:
            RunError: `lora.table-rows`, the length of the table does not fit the rows.

        >>> context = LoRAContext.of([AdapterSpec(name="law", rank=8, alpha=16)], only="law")
        >>> context.at_rows((4, 16), 0)[0].shape
        (4,)
        """
        total, examples = math.prod(rows), rows[0] if rows else 1
        table = self.tile_adapter
        if table.ndim == 0:
            table = jnp.broadcast_to(table, (examples,))
        elif table.ndim != 1 or table.shape[0] not in (
            (total, examples) if self.tile is None else (total / self.tile,)
        ):
            raise _misfit(table.shape, rows, self.tile)
        if self.draw is None:
            return table, self.at_site(site)
        entries = table.shape[0]  # may be symbolic, as in jax.export
        return table, self._at_site(self.draw.dropout(entries, 0 if entries == 0 else total // entries), site)

    def mean(self, losses: Array, where: ArrayLike | None = None) -> Array:
        """Returns the mean loss of each adapter over its rows, float32 [A]; 0 for an adapter without rows.

        The gradient of its sum is that of separate training: rows of other adapters do not scale it. A mean over all
        rows would.

        Args:
            losses: [examples, …] or [rows, …], as the table counts them. Rows without an adapter do not count.
            where: which of the losses count, or their weights, 0 or more, in the form of `losses` (None: all).

        Raises:
            RunError: `lora.table-rows`, the length of the table does not fit the losses.

        >>> specs = [AdapterSpec(name="law", rank=8, alpha=16), AdapterSpec(name="med", rank=4, alpha=4)]
        >>> context = LoRAContext.of(specs, [0, 1, 1, -1])
        >>> context.mean(jnp.array([[1.0, 3.0], [4.0, 4.0], [6.0, 6.0], [9.0, 9.0]])).tolist()
        [2.0, 5.0]
        """
        sums, counts = self.sums(losses, where)
        return sums / jnp.where(counts == 0, 1.0, counts)

    def sums(self, losses: Array, where: ArrayLike | None = None) -> tuple[Array, Array]:
        """Returns the weighted sum of the losses of each adapter, and of their weights, see `mean`: of several batches,
        the mean is the sum of the first over that of the second."""
        table, shape = self.tile_adapter, losses.shape
        if table.ndim == 0:
            table = table[None]
        per_axes = [math.prod(shape[:axes]) for axes in range(1, len(shape) + 1)]
        fits = len(table) in ([len(table)] if self.tile_adapter.ndim == 0 else per_axes) or (
            self.tile is not None and len(table) * self.tile == per_axes[-1]
        )
        if not shape or table.ndim != 1 or not fits:
            raise _misfit(self.tile_adapter.shape, shape, self.tile)
        by_entry = len(table), math.prod(shape) // max(len(table), 1)
        weights = jnp.broadcast_to(1.0 if where is None else jnp.asarray(where, jnp.float32), shape).reshape(by_entry)
        counted = jnp.where(weights == 0, 0.0, losses.astype(jnp.float32).reshape(by_entry)) * weights
        adapters = table[:, None] == jnp.arange(len(self.scale))
        sums, counts = (jnp.where(adapters, part.sum(1, keepdims=True), 0.0).sum(0) for part in (counted, weights))
        return sums, counts

    def _at_site(self, dropout: Dropout, site: int | Int[Array, ""]) -> Dropout:
        return replace(dropout, key=fold_key(dropout.key, self.layer * SITES_PER_LAYER + site))


def _misfit(shape: tuple[int, ...], rows: Sequence[int], tile: int | None) -> RunError:
    total = math.prod(rows)
    entries = f"{shape[0]} entries" if len(shape) == 1 else f"the shape {list(shape)}"
    has = f"{entries} of {tile} rows" if tile else entries
    fix = f"one entry per example ({rows[0]}) or per row ({total})" if len(rows) > 1 else f"one entry per row ({total})"
    return RunError(
        "lora.table-rows",
        f"the table of adapters has {has}, but the input of a layer has {total} rows {list(rows)}.",
        fix=f"{fix}; tile=ROWS if an entry covers so many rows; only='NAME' if all rows belong to one adapter",
    )


def _number_of(adapters: Sequence[AdapterSpec], only: str | int) -> int:
    names = [spec.name for spec in adapters]
    if isinstance(only, str):
        if only not in names:
            raise ConfigError(
                "lora.unknown-adapter", f"only='{only}' names no adapter.", fix=f"one of [{', '.join(names)}]"
            )
        return names.index(only)
    return only


def _table_errors(table: Any, entries: Any, only: Any, count: int) -> list[ConfigError]:
    if (entries is None) == (only is None):
        message = "nothing says which adapter the rows belong to." if only is None else "there are a table and only=."
        return [
            ConfigError("lora.table", message, fix="a table with one entry per example, or only='NAME' for all rows")
        ]
    if isinstance(table, jax.Array):
        return []
    wrong = sorted({number for number in np.asarray(table).ravel().tolist() if number not in range(-1, count)})
    if not wrong:
        return []
    return [
        ConfigError(
            "lora.unknown-adapter",
            f"tile_adapter names {', '.join(map(str, wrong))} but there are {count} adapters.",
            fix=f"numbers from 0 to {count - 1} in the order of the adapters, -1 for padding",
        )
    ]


def _dropout_errors(adapters: Sequence[AdapterSpec], stepless: bool, train: bool | None) -> list[ConfigError]:
    rates = [f"{spec.name} (dropout={spec.dropout})" for spec in adapters if spec.dropout]
    if not stepless or train is False or not rates:
        return []
    return [
        ConfigError(
            "lora.dropout-step",
            f"dropout of {', '.join(rates)} needs the number of the step, to draw from.",
            fix="step=STEP in training, train=False in evaluation",
        )
    ]


def _dropout(adapters: Sequence[AdapterSpec], step: Any, examples: Any, row_key: Any) -> dict[str, Any]:
    rate = jnp.asarray([spec.dropout for spec in adapters], jnp.float32)
    key = jnp.asarray([dropout_key(spec.seed) for spec in adapters], jnp.uint32)
    if row_key is not None:
        return {"dropout": Dropout(rate=rate, key=key, row_key=row_key)}
    if not any(spec.dropout for spec in adapters):
        return {}
    examples = None if examples is None else jnp.asarray(examples).astype(jnp.uint32)
    return {"draw": Draw(rate=rate, key=key, step=jnp.asarray(step).astype(jnp.uint32), examples=examples)}


def dropout_key(seed: int) -> int:
    """Returns the uint32 dropout key of an adapter, a function of its seed only."""
    return int.from_bytes(hashlib.sha256(b"dropout %d" % seed).digest()[:4], "little")
