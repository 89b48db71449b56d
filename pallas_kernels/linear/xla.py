"""Backend "xla": the split graph as batched matmuls over tiles; runs on every device.

A tile meets the A and B of its own adapter only (gathered, not masked), so nothing of one adapter is ever multiplied
into another: a NaN stays where it is, and a tile's result does not depend on its neighbours.

A tile of fewer rows than R is smaller than what it gathers: such tiles are computed in parts, and their sums adapter by
adapter, so that memory grows with the rows and not with the tiles.

T packed tokens · K in features · N out features · R padded rank · A adapters · I tiles · J rows of a tile
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checkpoint_names import named_s
from pallas_kernels.dropout import inverse_keep, keep_words, unpack
from pallas_kernels.exact import contract
from pallas_kernels.frozen_weight import frozen_product, frozen_product_transposed
from pallas_kernels.problem import Operands, Static
from pallas_kernels.tiles import per_tile, row_adapter, select_tiles, sum_tiles

FEW = 1 << 14  # numbers that tiles gather at once: a loop over parts of them gains nothing


def unsupported_reason(static: Static, ops: Operands) -> str | None:
    """Says why a call cannot be served; None: it can."""
    del static, ops
    return None


def forward(static: Static, ops: Operands) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], None]:
    """Returns every y, every S of the projections with LoRA, and no packed bits (they are cheap to make again)."""
    ops = _mask_unknown_adapters(static, ops)
    ss = _down(static, ops, _dropped_tiles(static, ops)) if ops.with_lora else ()
    s_of = dict(zip(ops.with_lora, ss, strict=True))
    ys = tuple(_up(static, ops, i, s_of.get(i)) for i in range(len(ops.ws)))
    return ys, ss, None


def backward(
    static: Static, ops: Operands, ss: tuple[jax.Array, ...], bits: None, dys: tuple[jax.Array, ...]
) -> tuple[jax.Array, dict[int, jax.Array], dict[int, jax.Array]]:
    """Returns dx, and dA and dB (float32) by projection number."""
    del bits
    ops = _mask_unknown_adapters(static, ops)
    dx_TK: Any = sum(frozen_product_transposed(dy, w) for dy, w in zip(dys, ops.ws, strict=True))
    das, dbs = {}, {}
    if ops.with_lora:
        keep = _keep_tiles(static, ops)
        dropped_IJK = _drop(_tiles(static, ops.x), keep)
        # several are added up and dropout scales before the one rounding; else it may come rounded already
        low_type = ops.x.dtype if len(ops.with_lora) == 1 and ops.dropout is None else jnp.float32
        low_IJK = 0.0
        for i, s_IJR in zip(ops.with_lora, ss, strict=True):
            ds_IJR, dbs[i] = _dsdb(static, ops, i, s_IJR, _tiles(static, dys[i]))
            das[i] = _da(static, ops, ds_IJR, dropped_IJK)
            low_IJK = low_IJK + _with_bank(static, ops, "ijr,ikr->ijk", ds_IJR, ops.as_[i], low_type)
        dx_TK = dx_TK + _finish_dx(static, ops, low_IJK, keep).reshape(dx_TK.shape)
    return dx_TK, das, dbs


def _mask_unknown_adapters(static: Static, ops: Operands) -> Operands:
    """Marks tiles of adapters that do not exist as padding, as the kernels do."""
    table = ops.tile_adapter
    return dataclasses.replace(ops, tile_adapter=jnp.where(table < static.num_adapters, table, -1))


def _down(static: Static, ops: Operands, dropped_IJK: jax.Array) -> tuple[jax.Array, ...]:
    """S = drop(x) A, one per projection with LoRA."""
    ss = []
    for i in ops.with_lora:
        s_IJR = _with_bank(static, ops, "ijk,ikr->ijr", dropped_IJK, ops.as_[i])
        if ops.dropout is not None:
            s_IJR = s_IJR * _of_tiles(static, ops, inverse_keep(ops.dropout.rate))
        ss.append(named_s(_select(static, ops, s_IJR).astype(ops.x.dtype)))
    return tuple(ss)


def _up(static: Static, ops: Operands, i: int, s_IJR: jax.Array | None) -> jax.Array:
    """y = x W (+ bias) + scale S B."""
    y_TN = frozen_product(ops.x, ops.ws[i], static.y_dtype)
    bias = ops.biases[i]
    if bias is not None:
        y_TN = y_TN + bias.astype(y_TN.dtype)
    if s_IJR is not None:
        scaled_IJR = (s_IJR.astype(jnp.float32) * _of_tiles(static, ops, ops.scale)).astype(s_IJR.dtype)
        low_IJN = _with_bank(static, ops, "ijr,irn->ijn", scaled_IJR, ops.bs[i], y_TN.dtype)
        y_TN = y_TN + _select(static, ops, low_IJN).reshape(y_TN.shape)
    return y_TN


def _dsdb(static: Static, ops: Operands, i: int, s_IJR: jax.Array, dy_IJN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dS = scale dY B^T and dB = scale S^T dY."""
    ds_IJR = _with_bank(static, ops, "ijn,irn->ijr", dy_IJN, ops.bs[i]) * _of_tiles(static, ops, ops.scale)
    ds_IJR = _select(static, ops, ds_IJR).astype(ops.x.dtype)
    db_ARN = _sums(static, ops, "ijr,ijn->irn", s_IJR, dy_IJN)
    return ds_IJR, db_ARN * ops.scale[:, None, None]


def _da(static: Static, ops: Operands, ds_IJR: jax.Array, dropped_IJK: jax.Array) -> jax.Array:
    """dA = drop(x)^T dS."""
    da_AKR = _sums(static, ops, "ijk,ijr->ikr", dropped_IJK, ds_IJR)
    return da_AKR if ops.dropout is None else da_AKR * inverse_keep(ops.dropout.rate)[:, None, None]


def _finish_dx(static: Static, ops: Operands, low_IJK: jax.Array, keep_IJK: jax.Array | None) -> jax.Array:
    """Masks and scales the low-rank part of dx."""
    if keep_IJK is not None and ops.dropout is not None:
        low_IJK = jnp.where(keep_IJK, low_IJK * _of_tiles(static, ops, inverse_keep(ops.dropout.rate)), 0.0)
    return _select(static, ops, low_IJK).astype(ops.x.dtype)


def _dropped_tiles(static: Static, ops: Operands) -> jax.Array:
    return _drop(_tiles(static, ops.x), _keep_tiles(static, ops))


def _drop(x_IJK: jax.Array, keep_IJK: jax.Array | None) -> jax.Array:
    return x_IJK if keep_IJK is None else jnp.where(keep_IJK, x_IJK, jnp.zeros((), x_IJK.dtype))


def _keep_tiles(static: Static, ops: Operands) -> jax.Array | None:
    if ops.dropout is None:
        return None
    rows = row_adapter(ops.tile_adapter, static.tile)
    columns = ops.x.shape[1]
    # Without a barrier XLA computes all bits of a word again for each of its elements, in every kernel that masks.
    words = lax.optimization_barrier(keep_words(ops.dropout, rows, columns))
    return _tiles(static, unpack(words, columns))


def _tiles(static: Static, values: jax.Array) -> jax.Array:
    """[T, ...] -> [I, J, ...]; one tile of all rows for a single adapter: then every product is one plain matmul."""
    return values.reshape((-1, values.shape[0] if static.single else static.tile, *values.shape[1:]))


def _with_bank(
    static: Static, ops: Operands, spec: str, values: jax.Array, bank: jax.Array, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """Contracts each tile [I, J, ...] with A or B of its adapter [A, ...]."""
    bank = bank.astype(ops.x.dtype)
    if static.single or static.in_order:
        return contract(spec, values, bank, dtype)
    parts = _parts(static, ops)
    if parts == 1:
        return contract(spec, values, per_tile(bank, ops.tile_adapter), dtype)

    def product(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        return contract(spec, part[0], per_tile(bank, part[1]), dtype)

    # Each part has tiles from all over the rows, so that rows that devices share stay where they are.
    split = (
        jnp.moveaxis(of_tiles.reshape((-1, parts, *of_tiles.shape[1:])), 1, 0)
        for of_tiles in (values, ops.tile_adapter)
    )
    results = jnp.moveaxis(lax.map(product, tuple(split)), 0, 1)
    return results.reshape((-1, *results.shape[2:]))


def _parts(static: Static, ops: Operands) -> int:
    """In how many equal parts the tiles gather from banks, so that what they gather is at most as large as the rows."""
    tiles, rank = ops.tile_adapter.shape[0], max(a.shape[-1] for a in ops.as_ if a is not None)
    if not isinstance(tiles, int) or tiles * rank * ops.x.shape[1] <= FEW:
        return 1
    fewest = -(-rank // static.tile)
    return next((parts for parts in range(fewest, tiles) if tiles % parts == 0), max(tiles, 1))


def _of_tiles(static: Static, ops: Operands, values_A: jax.Array) -> jax.Array:
    values = values_A if static.single or static.in_order else per_tile(values_A, ops.tile_adapter)
    return values[:, None, None]


def _select(static: Static, ops: Operands, values: jax.Array) -> jax.Array:
    return values if static.single or static.in_order else select_tiles(values, ops.tile_adapter)


def _sums(static: Static, ops: Operands, spec: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Contracts the rows of tiles [I, J, ...] and adds the tiles of each adapter up: float32 [A, ...]."""
    if static.single:
        return contract(spec, lhs, rhs)
    if static.in_order or _parts(static, ops) == 1:
        return sum_tiles(contract(spec, lhs, rhs), ops.tile_adapter, static.num_adapters)

    def of_adapter(adapter: jax.Array) -> jax.Array:
        # Both are selected: zero times a NaN of another adapter is one.
        mine = (ops.tile_adapter == adapter)[:, None, None]
        lhs_IJ, rhs_IJ = (jnp.where(mine, values, jnp.zeros((), values.dtype)) for values in (lhs, rhs))
        return contract(spec.replace("->i", "->"), lhs_IJ, rhs_IJ)

    return lax.map(of_adapter, jnp.arange(static.num_adapters, dtype=ops.tile_adapter.dtype))
