"""The products of one input in decoding, in two launches: every row has an adapter of its own.

    sums      x W and x A of siblings, a part of the contraction each (`row_sums`)
    finish    sums of parts, biases and S B, rounded once (`row_finish`)

Of a tile of rows and plain weights only. With more rows XLA's products of the base are faster, because rows would read
every weight again for each tile. 8-bit weights: `row_products_8bit.py`.

T rows · K in features · N out features · R rank · A adapters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax

from pallas_kernels.device import target_platform, wide_integers
from pallas_kernels.linear.triton.row_finish import WIDTH, Finish, row_finish
from pallas_kernels.linear.triton.row_sums import ROWS, Low, RowSumsConfig, row_sums
from pallas_kernels.policy import HALF_TYPES
from pallas_kernels.problem import Operands, Static
from pallas_kernels.sizes import power_of_two

WIDEST_RANK = 128


def row_products_unsupported_reason(ops: Operands) -> str | None:
    """Why the kernels do not serve a call on this device; None if they do."""
    if target_platform() not in ("gpu", "cuda", "cpu") or wide_integers():
        return "needs an NVIDIA GPU, and counts in 32 bits"
    if str(ops.x.dtype) not in HALF_TYPES:
        return "wants bfloat16 or float16"
    if not all(isinstance(w, jax.Array) for w in ops.ws):
        return "wants weights that are not quantised"
    if ops.x.shape[0] != ROWS:
        return f"wants {ROWS} rows"
    return sizes_unsupported_reason(ops, RowSumsConfig().depth)


def sizes_unsupported_reason(ops: Operands, depth: int) -> str | None:
    """Why sums and finish do not serve some features or ranks; `depth` features are a step."""
    if ops.x.shape[1] % (2 * depth) or any(w.shape[1] % WIDTH for w in ops.ws):
        return f"wants multiples of {2 * depth} in and {WIDTH} out features"
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
    x, lows = ops.x, lows_of(ops)
    ws = [cast(jax.Array, w).astype(x.dtype) for w in ops.ws]
    sums, s = row_sums(x, ws, list(lows.values()), ops.tile_adapter, config=config)
    return finish_all(static, ops, sums, s, lows, [{} for _ in ops.ws])


def finish_all(
    static: Static, ops: Operands, sums: Sequence[jax.Array], s: jax.Array | None, lows: Mapping[int, Low],
    scales: Sequence[Mapping[str, jax.Array]],
) -> tuple[jax.Array, ...]:  # fmt: skip
    """y of each projection, of what `row_sums` returns; `scales` are fields of `Finish`."""
    projections = []
    for i, parts in enumerate(sums):
        low: dict[str, Any] = {}
        if i in lows:
            b_ARN = ops.lora(i)[1].astype(ops.x.dtype)
            low = {"b_CN": b_ARN.reshape(-1, b_ARN.shape[2]), "rank": lows[i].rank, "offset": lows[i].offset}
        projections.append(Finish(parts=parts, bias=ops.biases[i], **scales[i], **low))
    dtype = ops.x.dtype if static.y_dtype is None else static.y_dtype
    return row_finish(projections, s, ops.tile_adapter, ops.scale, [dtype] * len(projections))


def lows_of(ops: Operands) -> dict[int, Low]:
    """A of the projections that have LoRA, by their number."""
    lows, offset = {}, 0
    for i in ops.with_lora:
        a_AKR = ops.lora(i)[0].astype(ops.x.dtype)
        A, K, R = a_AKR.shape
        lows[i] = Low(a_AKR.swapaxes(0, 1).reshape(K, A * R), R, offset)  # as it lies in a bank
        offset += R
    return lows
