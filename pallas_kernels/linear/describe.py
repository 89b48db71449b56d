"""Checks the arguments of a call and describes it for the backends.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.device import interprets
from pallas_kernels.dropout import Dropout
from pallas_kernels.problem import Operands, Static
from pallas_kernels.tiles import rows_per_tile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a caller passes to a public op, unchecked; sequences and numbers are allowed where `describe` converts them.

    Attributes:
        x: rows [..., K], or their ShapeDtypeStruct.
        ws, as_, bs, biases: of every projection.
        tile_adapter: None: every row belongs to adapter 0.
    """

    x: Any
    ws: tuple[Any, ...]
    as_: tuple[Any, ...]
    bs: tuple[Any, ...]
    biases: tuple[Any, ...]
    tile_adapter: Any
    scale: Any
    dropout: Dropout | None
    ranks: Any = None
    y_dtype: Any = None


def describe(arguments: Arguments) -> tuple[Static, Operands]:
    """Checks the shapes and flattens leading dimensions. Chooses no backend."""
    x, tile_adapter, ranks = arguments.x, arguments.tile_adapter, arguments.ranks
    lists = {"w": arguments.ws, "a": arguments.as_, "b": arguments.bs}
    arrays = {
        f"{name} of projection {i}": array for name, operands in lists.items() for i, array in enumerate(operands)
    }
    check_kinds(x, tile_adapter, arguments.dropout, **arrays)
    if x.ndim == 0 or x.size == 0:
        raise ValueError(f"x has shape {x.shape}, expected [..., K] with at least one feature")
    x_TK = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    single = tile_adapter is None
    scale = jnp.asarray(arguments.scale, jnp.float32)
    if scale.ndim != 1:
        raise ValueError(f"scale has shape {scale.shape}, expected [A]: one number per adapter")
    if ranks is not None and not jnp.issubdtype(kind := jnp.asarray(ranks).dtype, jnp.integer):
        raise TypeError(f"ranks is {kind}, expected int32: how many columns of a each adapter uses")
    num_adapters = next((a.shape[0] for a in arguments.as_ if a is not None and a.ndim == 3), scale.shape[0])
    if num_adapters == 0:
        raise ValueError("a and b hold no adapter: call the frozen layer alone, x @ w")
    ops = Operands(
        x=x_TK,
        ws=arguments.ws,
        as_=arguments.as_,
        bs=arguments.bs,
        biases=arguments.biases,
        tile_adapter=jnp.zeros(1, jnp.int32) if single else jnp.asarray(tile_adapter, jnp.int32),
        scale=scale,
        dropout=None if arguments.dropout is None else as_arrays(arguments.dropout),
        ranks=None if ranks is None else jnp.asarray(ranks, jnp.int32),
    )
    _check_shapes(ops, num_adapters, single)
    _check_values(ops, num_adapters)
    if single and num_adapters > 1:
        ops, num_adapters = _first_adapter(ops), 1
    static_ranks = None if ops.ranks is None or isinstance(ranks, jax.Array) else tuple(map(int, ranks))
    static = Static(
        tile=rows_per_tile(x_TK.shape[0], ops.tile_adapter),
        num_adapters=num_adapters,
        single=single,
        ranks=static_ranks and static_ranks[:num_adapters],
        interpret=interprets(),
        in_order=_is_in_order(tile_adapter, num_adapters),
        y_dtype=None if arguments.y_dtype is None else jnp.dtype(arguments.y_dtype),
    )
    return static, _without_rank_zero(ops)


def empty_results(arguments: Arguments) -> tuple[jax.Array, ...] | None:
    """Returns every y [..., N] of a call without rows, as of an empty shard or batch; None: it has rows."""
    x = arguments.x
    if getattr(x, "ndim", 0) < 2 or x.shape[-1] == 0 or x.size != 0:
        return None
    one_row = jnp.zeros((1, x.shape[-1]), x.dtype)
    _, ops = describe(dataclasses.replace(arguments, x=one_row, tile_adapter=jnp.zeros(1, jnp.int32), dropout=None))
    return tuple(jnp.zeros((*x.shape[:-1], w.shape[1]), arguments.y_dtype or x.dtype) for w in ops.ws)


def _is_in_order(table: Any, num_adapters: int) -> bool:
    """Whether a table that is known while tracing says that tile i belongs to adapter i."""
    return isinstance(table, np.ndarray) and table.tolist() == [*range(num_adapters)]


def _first_adapter(ops: Operands) -> Operands:
    """The call with adapter 0 only: without a table every row belongs to it."""
    dropout = ops.dropout
    if dropout is not None:
        dropout = dataclasses.replace(dropout, rate=dropout.rate[:1], key=dropout.key[:1])
    as_, bs = (tuple(None if v is None else v[:1] for v in banks) for banks in (ops.as_, ops.bs))
    ranks = None if ops.ranks is None else ops.ranks[:1]
    return dataclasses.replace(ops, as_=as_, bs=bs, scale=ops.scale[:1], dropout=dropout, ranks=ranks)


def _without_rank_zero(ops: Operands) -> Operands:
    """A projection of rank 0 is one without LoRA: kernels never see an empty array."""
    some = [a is not None and a.shape[2] > 0 for a in ops.as_]
    by_name = {
        name: tuple(v if s else None for v, s in zip(getattr(ops, name), some, strict=True)) for name in ("as_", "bs")
    }
    return dataclasses.replace(ops, **by_name)


def check_kinds(x: Any, tile_adapter: Any, dropout: Any, **arrays: Any) -> None:
    """Raises TypeError for what is no array, no whole number per tile, or no Dropout."""
    for name, value in {"x": x, **arrays}.items():
        if value is not None and not hasattr(value, "ndim"):
            raise TypeError(f"{name} is a {type(value).__name__}, expected an array: jnp.asarray({name[0]})")
    if tile_adapter is not None and not jnp.issubdtype(kind := jnp.asarray(tile_adapter).dtype, jnp.integer):
        raise TypeError(f"tile_adapter is {kind}, expected int32: the adapter of each tile")
    if dropout is not None and not isinstance(dropout, Dropout):
        raise TypeError(f"dropout is {dropout!r}, expected None or a Dropout: a rate and a key of each adapter")


def as_arrays(dropout: Dropout) -> Dropout:
    """Converts numbers and lists to arrays."""
    kinds = {"rate": np.float32, "key": np.uint32, "row_key": np.uint32}
    fields = {name: getattr(dropout, name) for name in kinds}
    arrays = {n: v if hasattr(v, "dtype") else np.asarray(v, kinds[n]) for n, v in fields.items()}
    return dataclasses.replace(dropout, **arrays)


def _check_values(ops: Operands, num_adapters: int) -> None:
    """Raises ValueError for numbers out of range where they are known: traced ones cannot be looked at."""
    table = _concrete(ops.tile_adapter)
    if table is not None and (wrong := (table < -1) | (table >= num_adapters)).any():
        tile = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"tile_adapter[{tile}] is {table[tile]}, expected -1 (padding rows) to {num_adapters - 1}: "
            f"a and b hold {num_adapters} adapters"
        )
    ranks = None if ops.ranks is None else _concrete(ops.ranks)
    if ranks is not None and (ranks < 0).any():
        adapter = int(np.flatnonzero(ranks < 0)[0])
        raise ValueError(f"ranks[{adapter}] is {ranks[adapter]}, expected 0 or more: the columns of a that it uses")
    if ops.dropout is None or (rates := _concrete(ops.dropout.rate)) is None:
        return
    if (wrong := ~((rates >= 0) & (rates < 1))).any():
        adapter = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"dropout.rate of adapter {adapter} is {rates[adapter]}, expected 0 <= rate < 1: the share that is dropped"
        )


def _concrete(array: Any) -> np.ndarray | None:
    """The numbers of an array that this process holds whole; None while tracing, or for a ShapeDtypeStruct."""
    abstract = isinstance(array, Tracer | jax.ShapeDtypeStruct)
    if abstract or not getattr(array, "is_fully_addressable", True):
        return None
    return np.asarray(array)


def _check_shapes(ops: Operands, num_adapters: int, single: bool) -> None:
    """Raises one ValueError that lists everything that does not fit."""
    num_rows, num_in = ops.x.shape
    wrong = []
    if not jnp.issubdtype(ops.x.dtype, jnp.floating):
        wrong.append(f"x is {ops.x.dtype}, not a floating type")
    elif ops.x.dtype.itemsize == 1:  # its products, sums and result would be rounded to 8 bits
        wrong.append(f"x is {ops.x.dtype}, expected bfloat16, float16 or float32: x.astype(jnp.bfloat16)")
    if ops.x.dtype == jnp.float64:
        wrong.append("x is float64, but all sums are in float32: cast it to float32")
    if not len(ops.ws) == len(ops.as_) == len(ops.bs) == len(ops.biases):
        wrong.append(f"{len(ops.ws)} ws, {len(ops.as_)} as_, {len(ops.bs)} bs, {len(ops.biases)} biases: not one each")
    for i, (w, a, b, bias) in enumerate(zip(ops.ws, ops.as_, ops.bs, ops.biases, strict=False)):
        rank = None if a is None else a.shape[-1]
        expected = [("w", w, (num_in, w.shape[-1])), ("bias", bias, (w.shape[-1],))]
        expected += [("a", a, (num_adapters, num_in, rank)), ("b", b, (num_adapters, rank, w.shape[-1]))]
        for name, array, shape in expected:
            if array is not None and array.shape != shape:
                first = 1 if single and name in "ab" else 0  # the caller's arrays of a single adapter have no such axis
                where = "" if single else f" of projection {i}"
                wrong.append(f"{name}{where} has shape {array.shape[first:]}, expected {shape[first:]}")
        if (a is None) != (b is None):
            wrong.append(f"projection {i} has only one of a and b")
    if ops.scale.shape != (num_adapters,):
        wrong.append(f"scale has shape {ops.scale.shape}, expected ({num_adapters},)")
    if ops.ranks is not None and ops.ranks.shape != (num_adapters,):
        wrong.append(f"ranks has shape {ops.ranks.shape}, expected ({num_adapters},): one number per adapter")
    if ops.dropout is not None:
        shapes = [("rate", num_adapters), ("key", num_adapters), ("row_key", num_rows)]
        wrong += [
            f"dropout.{name} has shape {np.shape(getattr(ops.dropout, name))}, expected ({size},)"
            for name, size in shapes
            if np.shape(getattr(ops.dropout, name)) != (size,)
        ]
    if wrong:
        raise ValueError("; ".join(wrong))
