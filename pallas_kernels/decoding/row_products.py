"""The products of one input in decoding, in two launches: every row has an adapter of its own.

    sums      x W and x A of siblings, a part of the contraction each (`row_sums`)
    finish    sums of parts, scales, biases and S B, rounded once (`row_finish`)

Weights of 8-bit floats meet rows that are rounded as everywhere, once for all siblings. With more rows than a tile the
base's products are XLA's, because rows would read every weight again for each tile.

T rows · K in features · N out features · R rank · A adapters
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp

from pallas_kernels.decoding.row_finish import WIDTH, Finish, row_finish
from pallas_kernels.decoding.row_sums import ROWS, Low, RowSumsConfig, row_sums
from pallas_kernels.device import target_platform, wide_integers
from pallas_kernels.frozen_weight import FrozenWeight, frozen_product
from pallas_kernels.policy import HALF_TYPES
from pallas_kernels.problem import Operands, Static
from pallas_kernels.quantised import passes
from pallas_kernels.quantised.fp8 import Fp8Weight
from pallas_kernels.quantised.rows import E4M3
from pallas_kernels.sizes import power_of_two

FEW_ROWS = ROWS  # up to here the kernel has the frozen products, too
WIDEST_RANK = 128


def row_products_unsupported_reason(ops: Operands) -> str | None:
    """Why the kernels do not serve a call on this device; None if they do."""
    if target_platform() not in ("gpu", "cuda", "cpu") or wide_integers():
        return "needs an NVIDIA GPU, and counts in 32 bits"
    if str(ops.x.dtype) not in HALF_TYPES:
        return "wants bfloat16 or float16"
    depth = RowSumsConfig().depth
    if ops.x.shape[0] % ROWS or ops.x.shape[1] % (2 * depth) or any(w.shape[1] % WIDTH for w in ops.ws):
        return f"wants multiples of {ROWS} rows, {2 * depth} in and {WIDTH} out features"
    ranks = [ops.lora(i)[0].shape[2] for i in ops.with_lora]
    if any(rank != power_of_two(rank) or rank > WIDEST_RANK for rank in ranks):
        return f"wants ranks that are powers of two up to {WIDEST_RANK}, not {ranks}"
    return None


def row_products(static: Static, ops: Operands, config: RowSumsConfig | None = None) -> tuple[jax.Array, ...]:
    """Returns y of each projection.

    Raises:
        NotImplementedError: see `row_products_unsupported_reason`.
    """
    if reason := row_products_unsupported_reason(ops):
        raise NotImplementedError(f"row_products by Triton {reason}")
    x, lows = ops.x, _lows(ops)
    fuses = x.shape[0] <= FEW_ROWS and all(isinstance(w, jax.Array | Fp8Weight) for w in ops.ws)
    rounded = row_scale = None
    if any(isinstance(w, Fp8Weight) for w in ops.ws):
        # Our kernel widens 8-bit weights to float16, which has all their values and is one conversion away.
        rounded, scales_T1 = passes.load().round_rows(
            x, dtype=jnp.float16 if fuses else E4M3, interpret=target_platform() == "cpu"
        )
        row_scale = scales_T1[:, 0]
    ws = [w.values if isinstance(w, Fp8Weight) else cast(jax.Array, w).astype(x.dtype) for w in ops.ws] if fuses else []
    sums, s = (), None
    if ws or lows:
        sums, s = row_sums(
            x, ws, list(lows.values()), ops.tile_adapter, rounded_TK=rounded if fuses else None, config=config
        )
    if not fuses:
        sums = tuple(_sums_by_xla(x, w, rounded) for w in ops.ws)
    projections = []
    for i, (w, parts) in enumerate(zip(ops.ws, sums, strict=True)):
        scales = {"row_scale": row_scale, "column_scale": w.scales} if isinstance(w, Fp8Weight) else {}
        low: dict[str, Any] = {}
        if i in lows:
            b_ARN = ops.lora(i)[1].astype(x.dtype)
            low = {"b_CN": b_ARN.reshape(-1, b_ARN.shape[2]), "rank": lows[i].rank, "offset": lows[i].offset}
        projections.append(Finish(parts=parts, bias=ops.biases[i], **scales, **low))
    dtype = x.dtype if static.y_dtype is None else static.y_dtype
    return row_finish(projections, s, ops.tile_adapter, ops.scale, [dtype] * len(projections))


def _lows(ops: Operands) -> dict[int, Low]:
    """A of the projections that have LoRA, by their number."""
    lows, offset = {}, 0
    for i in ops.with_lora:
        a_AKR = ops.lora(i)[0].astype(ops.x.dtype)
        A, K, R = a_AKR.shape
        lows[i] = Low(a_AKR.swapaxes(0, 1).reshape(K, A * R), R, offset)  # as it lies in a bank
        offset += R
    return lows


def _sums_by_xla(x: jax.Array, w: FrozenWeight, rounded: jax.Array | None) -> jax.Array:
    """x W in float32, without the scales of 8-bit weights, as the one part."""
    if isinstance(w, Fp8Weight):
        assert rounded is not None
        return w.sums(rounded, jnp.dtype(jnp.float32))[None]
    return frozen_product(x, w, jnp.float32)[None]
