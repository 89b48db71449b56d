"""Sums of decoding: x times the frozen weights of siblings and the A of all their adapters, in one launch.

A pass over few rows reads every weight once and does little else, and a launch costs as much as reading some megabytes.
So all products of one input share a launch: a program has a tile of columns of one array, over a part of the
contraction. Parts have places of their own, because sums in one place would depend on the order in which programs end;
`row_finish` adds them. Of x A, each row keeps the columns of its own adapter.

T rows · K in features · N out features · C columns: ranks of all adapters side by side · Z parts of the contraction
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.device import interprets, num_sms
from pallas_kernels.triton_call import call, dot, dot_8bit

ROWS = 64  # of a program: a matrix unit of Hopper multiplies no fewer
LOW_WIDTH = 64  # columns of A of a program
MOST_PARTS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowSumsConfig:
    """Sizes of the kernel.

    Attributes:
        width: columns of a frozen weight that a program has.
        depth: features of a step; of 8-bit weights twice as many.
        fill: programs for each multiprocessor below which the contraction is split further.
    """

    width: int = 128
    depth: int = 64
    num_warps: int = 4
    num_stages: int = 4
    fill: float = 0.75


@dataclasses.dataclass(frozen=True, slots=True)
class Low:
    """The A of a projection, and the columns of S that are its own.

    Attributes:
        a_KC: [K, A · R], adapters side by side.
        rank: R, a power of two.
        offset: of its columns in S.
    """

    a_KC: Array
    rank: int
    offset: int


def row_sums(
    x_TK: Float[Array, "T K"],
    ws: Sequence[Array],
    lows: Sequence[Low],
    slot_T: Int[Array, " T"],
    *,
    x8_TK: Array | None = None,
    config: RowSumsConfig | None = None,
) -> tuple[tuple[Float[Array, "Z T _"], ...], Float[Array, "Z T _"] | None]:
    """Returns parts of x W of each weight, and of S: x A of each row's own adapter, all projections side by side.

    Args:
        x_TK: T a multiple of `ROWS`, K of twice the depth.
        ws: [K, N] in the type of x, or all e4m3 [N, K]; N a multiple of `LOW_WIDTH`.
        slot_T: int32, -1 for a row without an adapter: its S holds anything.
        x8_TK: e4m3, what 8-bit weights multiply.
    """
    config = config or RowSumsConfig()
    T, K = x_TK.shape
    columns = [w.shape[1 if x8_TK is None else 0] for w in ws]
    inputs = [x_TK] if x8_TK is None else [x_TK, x8_TK]
    widths = [config.width if count % config.width == 0 else LOW_WIDTH for count in columns]
    counts = [count // width for count, width in zip(columns, widths, strict=True)]
    counts += [-(-low.a_KC.shape[1] // LOW_WIDTH) for low in lows]
    parts = _parts(T // ROWS * sum(counts), K, 2 * config.depth, config.fill * num_sms())
    share, total_rank = K // parts, sum(low.rank for low in lows)

    def kernel(slot_ref, x_ref, *refs):
        x8_ref, refs = (x_ref, refs) if x8_TK is None else (refs[0], refs[1:])
        row, tile, part = (pl.program_id(axis) for axis in range(3))
        w_refs, a_refs, outs = refs[: len(ws)], refs[len(ws) : len(counts)], refs[len(counts) :]
        rows, sums = pl.ds(row * ROWS, ROWS), partial(_sum_products, part * share, share)

        def frozen(number: int, tile: Array) -> None:
            w_ref, width = w_refs[number], widths[number]
            at = pl.ds(tile * width, width)
            if x8_TK is None:
                add = lambda total, features: total + dot(x_ref[rows, features], w_ref[features, at])  # noqa: E731
                outs[number][part, rows, at] = sums((ROWS, width), config.depth, add)
            else:
                add = lambda total, features: dot_8bit(x8_ref[rows, features], w_ref[at, features], total)  # noqa: E731
                outs[number][part, rows, at] = sums((ROWS, width), 2 * config.depth, add)

        def low_rank(number: int, tile: Array) -> None:
            low, a_ref = lows[number], a_refs[number]
            at, last = pl.ds(tile * LOW_WIDTH, LOW_WIDTH), low.a_KC.shape[1] - 1
            if low.a_KC.shape[1] % LOW_WIDTH:  # columns beyond the last are of no adapter
                at = jnp.minimum(tile * LOW_WIDTH + lax.iota(jnp.int32, LOW_WIDTH), last)
            add = lambda total, features: total + dot(x_ref[rows, features], a_ref[features, at])  # noqa: E731
            total = sums((ROWS, LOW_WIDTH), config.depth, add)
            cell = part * T + row * ROWS + lax.iota(jnp.int32, ROWS)
            _store_own(outs[-1], total, low, tile, slot_ref[rows], cell)

        by_tile(tile, counts, [(frozen, i) for i in range(len(ws))] + [(low_rank, i) for i in range(len(lows))])

    out_shape = [jax.ShapeDtypeStruct((parts, T, count), jnp.float32) for count in columns]
    if lows:
        out_shape.append(jax.ShapeDtypeStruct((parts * T, total_rank), jnp.float32))
    results = call(
        kernel,
        [slot_T, *inputs, *ws, *(low.a_KC for low in lows)],
        name="row_sums",
        grid=(T // ROWS, sum(counts), parts),
        out_shape=out_shape,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interprets(),
        flops=2 * T * K * (sum(columns) + sum(low.a_KC.shape[1] for low in lows)),
    )
    s = results[-1].reshape(parts, T, total_rank) if lows else None
    return tuple(results[: len(ws)]), s


def _sum_products(
    begin: Array, share: int, shape: tuple[int, int], depth: int, add: Callable[[Array, Any], Array]
) -> Array:
    """Sums the products of a share of the features, `depth` of them at a time."""
    step = lambda at, total: add(total, pl.ds(begin + at * depth, depth))  # noqa: E731
    return lax.fori_loop(0, share // depth, step, jnp.zeros(shape, jnp.float32))


def _store_own(s_ref: Any, total: Array, low: Low, tile: Array, slot: Array, cell: Array) -> None:
    """Stores a tile's x A of the rows whose adapter is in it: some whole adapters, or a part of a wide one.

    Args:
        total: [ROWS, LOW_WIDTH].
        slot, cell: of each row; a cell is a row of S.
    """
    width, columns = min(low.rank, LOW_WIDTH), tile * LOW_WIDTH + lax.iota(jnp.int32, LOW_WIDTH)
    mine = slot[:, None] == lax.div(columns, jnp.int32(low.rank))[None, :]
    # Selected, not multiplied: a row's products with the A of others may overflow.
    folded = jnp.where(mine, total, 0.0).reshape(ROWS, LOW_WIDTH // width, width).sum(1)
    first = low.offset + lax.rem(tile * LOW_WIDTH, jnp.int32(low.rank))
    if low.rank < LOW_WIDTH:
        stored = (slot >= 0) & (lax.div(slot, jnp.int32(LOW_WIDTH // low.rank)) == tile)
    else:
        stored = slot == lax.div(tile * LOW_WIDTH, jnp.int32(low.rank))
    rows = jnp.broadcast_to(cell[:, None], folded.shape)
    own_columns = jnp.broadcast_to((first + lax.iota(jnp.int32, width))[None, :], folded.shape)
    plt.store(s_ref.at[rows, own_columns], folded, mask=jnp.broadcast_to(stored[:, None], folded.shape))


def by_tile(tile: Array, counts: Sequence[int], branches: Sequence[tuple[Callable[[int, Array], None], int]]) -> None:
    """Runs the branch of a column tile: arrays lie apart, and no index selects one."""
    first = 0
    for count, (branch, number) in zip(counts, branches, strict=True):

        @pl.when((tile >= first) & (tile < first + count))
        def _(branch=branch, number=number, first=first):
            branch(number, tile - first)

        first += count


def _parts(programs: int, features: int, depth: int, wanted_programs: float) -> int:
    """A power of two: until programs fill the device; a split leaves each part two steps or more."""
    parts = 1
    while parts < MOST_PARTS and programs * parts < wanted_programs and features % (4 * parts * depth) == 0:
        parts *= 2
    return parts
