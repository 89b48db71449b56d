"""One shard of a call: what a device computes of it, and which sums over mesh axes finish it.

Forward and backward are linear in x, W and dY, so every shard runs a backend on its own rows, K and N, and sums follow:

    y   over the axes of K          dA  over the axes of rows and N
    dx  over the axes of N          dB  over the axes of rows and K

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.linear.mesh.layout import Axes, Layout
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.problem import Operands, Static, select_projections

type Saved = list[tuple[tuple[jax.Array, ...], jax.Array | None]]  # S and bits of each part


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is known of a whole call while tracing."""

    static: Static
    implementation: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Projections that run as one call of a backend; their N lies on the same axes."""

    projections: tuple[int, ...]
    n: Axes
    ops: Operands
    backend: backend.Backend


def forward(call: Call, layout: Layout, ops: Operands, *, once: bool = False) -> tuple[tuple[jax.Array, ...], Saved]:
    """Returns y of every projection, [..., N], and what backward needs."""
    static, flat = _flatten(call, layout, ops)
    ys: dict[int, jax.Array] = {}
    saved = []
    for part in _parts(call, layout, static, flat):
        outputs, ss, bits = _run(once, part.backend.forward, static, part.ops)
        ys |= dict(zip(part.projections, outputs, strict=True))
        saved.append((ss, bits))
    results = [ys[i].reshape(*ops.x.shape[:-1], -1) for i in range(len(ops.ws))]
    if layout.k:
        sums = [_sum_over_k(layout, y) for y in results]
        results = [y if bias is None else y + bias.astype(y.dtype) for y, bias in zip(sums, ops.biases, strict=True)]
    return tuple(results), saved


def _run(once: bool, function: Any, static: Static, *operands: Any) -> Any:
    return lowered_once(function, static, *operands) if once else function(static, *operands)


def _sum_over_k(layout: Layout, y: jax.Array) -> jax.Array:
    if layout.scattered is None:
        return jax.lax.psum(y, layout.k)
    return jax.lax.psum_scatter(y, layout.k, scatter_dimension=layout.scattered, tiled=True)


def backward(
    call: Call, layout: Layout, ops: Operands, saved: Saved | None, dys: tuple[jax.Array, ...], *, once: bool = False
) -> tuple[jax.Array, dict[int, jax.Array], dict[int, jax.Array]]:
    """Returns dx, and dA and dB (float32) by projection number; without `saved`, S and bits are made again."""
    static, flat = _flatten(call, layout, ops)
    das: dict[int, jax.Array] = {}
    dbs: dict[int, jax.Array] = {}
    dx_by_axes: dict[Axes, Any] = {}
    for number, part in enumerate(_parts(call, layout, static, flat)):
        part_dys = tuple(dys[i].reshape(-1, dys[i].shape[-1]).astype(ops.x.dtype) for i in part.projections)
        ss, bits = _run(once, part.backend.forward, static, part.ops)[1:] if saved is None else saved[number]
        dx, part_das, part_dbs = _run(once, part.backend.backward, static, part.ops, ss, bits, part_dys)
        dx_by_axes[part.n] = dx_by_axes.get(part.n, 0) + dx
        das |= {part.projections[i]: da for i, da in part_das.items()}
        dbs |= {part.projections[i]: db for i, db in part_dbs.items()}
    das = {i: _sum(da, layout.rows + layout.ns[i]) for i, da in das.items()}
    dbs = {i: _sum(db, layout.rows + layout.k) for i, db in dbs.items()}
    dx = sum(_sum(dx, n) for n, dx in dx_by_axes.items())
    return jnp.asarray(dx).astype(ops.x.dtype).reshape(ops.x.shape), das, dbs


def _sum(array: jax.Array, axes: Axes) -> jax.Array:
    return jax.lax.psum(array, axes) if axes else array


def _flatten(call: Call, layout: Layout, ops: Operands) -> tuple[Static, Operands]:
    """The shard as a call of its own: rows in one dimension, and tiles that lie whole in it."""
    x_TK = ops.x.reshape(-1, ops.x.shape[-1])
    rows, num_in = x_TK.shape
    dropout, table, tile = ops.dropout, ops.tile_adapter, rows
    if not call.static.single:
        tile = layout.rows_of_tile(call.static.tile, ops.x.shape[:-1])
        table = table.reshape(-1)[::tile]
    if dropout is not None:
        first_column = jax.lax.axis_index(layout.k) * num_in if layout.k else None
        dropout = dataclasses.replace(dropout, row_key=dropout.row_key.reshape(-1), first_column=first_column)
    biases = (None,) * len(ops.ws) if layout.k else ops.biases  # a sum over K holds the bias once
    flat = dataclasses.replace(ops, x=x_TK, tile_adapter=table, dropout=dropout, biases=biases)
    return dataclasses.replace(call.static, tile=tile), flat


def _parts(call: Call, layout: Layout, static: Static, ops: Operands) -> list[_Part]:
    """Projections by the axes of their N, one by one where that is faster; each part gets its backend."""
    by_axes: dict[Axes, list[int]] = {}
    for i, n in enumerate(layout.ns):
        by_axes.setdefault(n, []).append(i)
    parts = []
    for n, members in by_axes.items():
        joint = select_projections(ops, members)
        split = call.implementation is None and backend.split_is_faster(static, joint)
        for numbers in [(i,) for i in members] if split else [tuple(members)]:
            part_ops = select_projections(ops, numbers)
            parts.append(_Part(projections=numbers, n=n, ops=part_ops, backend=_select(call, static, part_ops)))
    return parts


def _select(call: Call, static: Static, ops: Operands) -> backend.Backend:
    try:
        return backend.select(static, ops, call.implementation)
    except NotImplementedError as reason:
        rows, num_in = ops.x.shape
        cut = (
            f", with tiles cut from {call.static.tile} to {static.tile} rows" if static.tile < call.static.tile else ""
        )
        raise NotImplementedError(
            f"on a mesh, for a shard of {rows} x {num_in}{cut}: {reason}; give every device whole tiles, split fewer "
            "dimensions, or leave implementation out"
        ) from None
