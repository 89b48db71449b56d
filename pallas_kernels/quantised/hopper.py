"""Hopper's backend for weights of 8-bit floats.

    forward    S = drop(x) A                     the pass over x of `linear.hopper`
               x8 = q(x)                         once for all projections
               y_i = x8 W8_i, scales, + S_i B_i  a product of `hopper_gemm`
    backward   dS_i, dB_i, dA, mask (dS A^T)     the passes of `linear.hopper`
               dx = sum_i q(dY_i sw_i) W8_i^T · scale + low-rank part

Sizes that `hopper_gemm` does not serve go to cuBLAS, and one pass finishes each product.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.batching import refuse_vmap
from pallas_kernels.device import num_sms
from pallas_kernels.dropout import BLOCK
from pallas_kernels.linear.hopper import backend as hopper
from pallas_kernels.linear.hopper.gemm_config import GemmConfig, gemm_config
from pallas_kernels.linear.split_graph import Prepared, prepare
from pallas_kernels.problem import Operands, Static
from pallas_kernels.quantised import passes
from pallas_kernels.quantised.fp8 import Fp8Weight
from pallas_kernels.quantised.hopper_gemm import LowRank, fit_addend, gemm, measured_gemm
from pallas_kernels.quantised.passes import ROWS
from pallas_kernels.sizes import row_block

OWN_PRODUCTS = True  # False: cuBLAS's products and passes everywhere, for comparisons

type Rounded = tuple[jax.Array, jax.Array]  # values and scales of rows
type Measured = tuple[jax.Array, jax.Array]  # y, and the largest |y| of every row


def unsupported_reason(static: Static, ops: Operands) -> str | None:
    """Says why a call cannot be served; None: it can."""
    if not all(isinstance(w, Fp8Weight) for w in ops.ws):
        return "it multiplies weights of 8-bit floats only"
    if ops.dropout is not None and (ops.dropout.first_column is not None or ops.x.shape[1] % BLOCK):
        return f"dropout on {ops.x.shape[1]} features of a row: it needs whole blocks of {BLOCK}"
    odd = [size for w in ops.ws for size in w.shape if size % 16]
    if odd:
        return f"{odd[0]} features: products of 8-bit floats need a multiple of 16"
    plain = tuple(jax.ShapeDtypeStruct(w.shape, ops.x.dtype) for w in ops.ws)
    return hopper.unsupported_reason(static, dataclasses.replace(ops, ws=plain))


def forward(static: Static, ops: Operands):
    """Returns every y, S (one array for all projections) and the packed keep bits."""
    ops, extra = hopper.first_and_extra(static, refuse_vmap(ops))
    prepared = prepare(static, ops)
    ss, bits = hopper.input_passes(prepared, extra)
    rounded, s = _rounded(prepared, ops.x), ss[0] if ops.with_lora else None
    ys = tuple(project_rounded(prepared, i, s, rounded) for i in range(len(ops.ws)))
    return ys if extra is None else tuple(extra.up(i, y, ss[-1]) for i, y in enumerate(ys)), ss, bits


def backward(static: Static, ops: Operands, ss: tuple[jax.Array, ...], bits: jax.Array | None, dys):
    """Returns dx, and dA and dB (float32) by projection number."""
    ops, extra = hopper.first_and_extra(static, ops)
    prepared = prepare(static, ops)
    partials, dbs = hopper.output_passes(prepared, ss[0], dys) if ops.with_lora else ([], {})
    das, dx = gradients_from_ds(prepared, partials, bits, dys)
    return (dx, das, dbs) if extra is None else hopper.add_extra(extra, ss[-1], bits, dys, dx, das, dbs)


def gradients_from_ds(prepared: Prepared, ds_partials: Sequence[jax.Array], bits: jax.Array | None, dys):
    """dA float32 by projection number, and dx; as in `linear.hopper.backend`."""
    # The scales of W belong to the axis that dY W^T sums over, so they cannot be factors of the result: they go into
    # dY before it is rounded.
    rounded = [_rounded(prepared, dy, _weight(prepared, i).scales) for i, dy in enumerate(dys)]
    return gradients_of_rounded(prepared, ds_partials, bits, rounded)


def gradients_of_rounded(
    prepared: Prepared, ds_partials: Sequence[jax.Array], bits: jax.Array | None, dys: Sequence[Rounded]
):
    """The same of rounded dY: each times the scales of its weight before it was rounded."""
    ops = prepared.ops
    das, low, ds = hopper.input_gradient_pass(prepared, ds_partials, bits) if ops.with_lora else ({}, None, None)
    configs = [_sum_config(prepared, i, ds) for i in range(len(dys))]
    # All or none: each of our products adds the sum of those before it.
    if all(configs):
        return das, _own_sum(prepared, dys, low, ds, configs)
    # cuBLAS adds nothing to its products: the pass that scales the first one adds the low-rank part, and the sum over
    # projections stays in float32, to be rounded once.
    dx: Any = 0.0 if low is None else low.astype(jnp.float32)
    for i, (dy8, scales_T1) in enumerate(dys):
        sums = _weight(prepared, i).transposed_sums(dy8, ops.x.dtype)
        if i == 0 and ds is not None:
            dx = _finish(prepared, sums, scales_T1, None, ds, prepared.transposed_bank_a()).astype(jnp.float32)
        else:
            dx = sums.astype(jnp.float32) * scales_T1 + dx
    return das, dx.astype(ops.x.dtype)


def frozen_parts(prepared: Prepared) -> list[jax.Array]:
    """x W of every projection."""
    rounded = _rounded(prepared, prepared.ops.x)
    return [_frozen(prepared, i, rounded) for i in range(len(prepared.ops.ws))]


def frozen_gradient(prepared: Prepared, i: int, dy: jax.Array) -> jax.Array:
    """dY W^T of one projection."""
    w = _weight(prepared, i)
    config = _config(prepared, i, 0, transposed=True)
    dy8, scales_T1 = _rounded(prepared, dy, w.scales)
    if config is not None:
        return gemm(dy8, w.values_KN, scales_T1[:, 0], None, config=config, num_sms=num_sms())
    return (w.transposed_sums(dy8, dy.dtype).astype(jnp.float32) * scales_T1).astype(dy.dtype)


def project(prepared: Prepared, i: int, s: jax.Array | None) -> jax.Array:
    """y = x W (+ bias) + scale S B."""
    return project_rounded(prepared, i, s, _rounded(prepared, prepared.ops.x))


def measured_parts(prepared: Prepared) -> list[Measured] | None:
    """x W of every projection, and the largest |y| of each row; None where our own products do not serve."""
    configs = [_config(prepared, i, 0) for i in range(len(prepared.ops.ws))]
    if not all(configs):
        return None
    x8, scales_T1 = _rounded(prepared, prepared.ops.x)
    ws = [_weight(prepared, i) for i in range(len(configs))]
    return [
        measured_gemm(x8, w.values, scales_T1[:, 0], w.scales, config=config, num_sms=num_sms())
        for w, config in zip(ws, configs, strict=True)
    ]


def measured_gradient(prepared: Prepared, i: int, dy: jax.Array) -> Measured:
    """dY W^T of one projection, of which `measured_parts` serves the others, and the largest of each row."""
    w, config = _weight(prepared, i), _config(prepared, i, 0, transposed=True)
    assert config is not None
    dy8, scales_T1 = _rounded(prepared, dy, w.scales)
    return measured_gemm(dy8, w.values_KN, scales_T1[:, 0], None, config=config, num_sms=num_sms())


def column_scales(prepared: Prepared) -> list[jax.Array]:
    """Of the out features of every weight, float32."""
    return [_weight(prepared, i).scales for i in range(len(prepared.ops.ws))]


def project_rounded(prepared: Prepared, i: int, s: jax.Array | None, rounded: Rounded) -> jax.Array:
    """The same of rounded rows of x; of x itself only shape and type are used."""
    ops, layout = prepared.ops, prepared.layout
    config = _config(prepared, i, layout.ranks.get(i, 0))
    if s is None or i not in layout.ranks:
        y = _frozen(prepared, i, rounded)
    elif config is not None:
        y = _own_product(prepared, i, s, rounded, config)
    else:
        w = _weight(prepared, i)
        sums = w.sums(rounded[0], ops.x.dtype)
        y = _finish(prepared, sums, rounded[1], w.scales, s, prepared.bank_b(i), layout.offsets[i])
    bias = ops.biases[i]
    return y if bias is None else y + bias.astype(y.dtype)


def _frozen(prepared: Prepared, i: int, rounded: Rounded) -> jax.Array:
    w, dtype = _weight(prepared, i), prepared.ops.x.dtype
    x8, scales_T1 = rounded
    config = _config(prepared, i, 0)
    if config is not None:
        return gemm(x8, w.values, scales_T1[:, 0], w.scales, config=config, num_sms=num_sms())
    return (w.sums(x8, dtype).astype(jnp.float32) * scales_T1 * w.scales).astype(dtype)


def _own_product(prepared: Prepared, i: int, s: jax.Array, rounded: Rounded, config: GemmConfig) -> jax.Array:
    """With scales and low-rank part inside, which is divided by the scales that the sum is multiplied by."""
    w, (x8, scales_T1) = _weight(prepared, i), rounded
    # The kernel multiplies its accumulator by both scales at the end, and the low-rank part is in it by then.
    low = LowRank(
        s=(s.astype(jnp.float32) * (1 / scales_T1)).astype(s.dtype),
        bank=(prepared.bank_b(i).astype(jnp.float32) * (1 / w.scales)).astype(s.dtype),
        block_adapter=prepared.block_adapter(config.tile_m),
        offset=prepared.layout.offsets[i],
    )
    return gemm(x8, w.values, scales_T1[:, 0], w.scales, low, config=config, num_sms=num_sms())


def _own_sum(
    prepared: Prepared, dys: Sequence[Rounded], low: jax.Array | None, ds: jax.Array | None, configs
) -> jax.Array:
    """dx by our own products: the first one adds the low-rank part, each other one what is there."""
    dx = low  # of the input pass, where the low-rank part is not inside the first product
    # A product takes a low-rank part or an addend, not both, and only the first one has no sum to add.
    for i, ((dy8, scales_T1), config) in enumerate(zip(dys, configs, strict=True)):
        inside = None
        if i == 0 and ds is not None:
            inside = LowRank(
                s=(ds.astype(jnp.float32) * (1 / scales_T1)).astype(ds.dtype),
                # Not divided as `_own_product` does: the scales of W went into dY, and columns of dx have none.
                bank=prepared.transposed_bank_a(),
                block_adapter=prepared.block_adapter(config.tile_m),
            )
        dx = gemm(
            dy8, _weight(prepared, i).values_KN, scales_T1[:, 0], None, inside, dx, config=config, num_sms=num_sms()
        )
    assert dx is not None
    return dx


def _sum_config(prepared: Prepared, i: int, ds: jax.Array | None) -> GemmConfig | None:
    first = i == 0 and ds is not None
    config = _config(prepared, i, prepared.layout.total if first else 0, transposed=True)
    return config and (config if first else fit_addend(config))


def _config(prepared: Prepared, i: int, rank: int, *, transposed: bool = False) -> GemmConfig | None:
    """Tiles of our own product; None where cuBLAS's serves.

    An element is half as wide as in products of bfloat16, so twice as many take the same place.
    """
    # The kernel stores bfloat16 only.
    if not OWN_PRODUCTS or prepared.ops.x.dtype != jnp.bfloat16:
        return None
    depth, columns = prepared.ops.ws[i].shape[:: -1 if transposed else 1]
    config = gemm_config(prepared.rows, depth // 2, columns, rank, prepared.static.tile, transposed=True)
    # Down the rows: as fast at 4096 features as along the columns, 2 to 3 % faster at 14336.
    return config and dataclasses.replace(config, tile_k=2 * config.tile_k, along_n=False)


def _rounded(prepared: Prepared, rows: jax.Array, factor: jax.Array | None = None) -> Rounded:
    return passes.load().round_rows(rows, factor, interpret=prepared.static.interpret)


def _weight(prepared: Prepared, i: int) -> Fp8Weight:
    w = prepared.ops.ws[i]
    assert isinstance(w, Fp8Weight), i
    return w


def _finish(prepared: Prepared, sums, row_scales, column_scales, s, bank, rank_offset: int = 0) -> jax.Array:
    blocks = prepared.block_adapter(row_block(prepared.static.tile, ROWS))
    return passes.load().finish(
        sums, row_scales, column_scales, s, bank, blocks, rank_offset=rank_offset, interpret=prepared.static.interpret
    )
