"""The products of one input in decoding with weights of 8-bit floats, in three launches: rows are rounded first.

As `row_products.py` has it, but that the matrix unit multiplies e4m3 by e4m3: nothing is widened. Rows
are rounded as everywhere, once for all siblings; scales follow in `row_finish`.
"""

from __future__ import annotations

from typing import cast

import jax

from pallas_kernels.device import target_platform, wide_integers
from pallas_kernels.frozen_weight import EightBitWeight
from pallas_kernels.linear.triton.row_products import finish_all, lows_of, sizes_unsupported_reason
from pallas_kernels.linear.triton.row_sums import ROWS, RowSumsConfig, row_sums
from pallas_kernels.policy import HALF_TYPES
from pallas_kernels.problem import Operands, Static
from pallas_kernels.triton_call import has_dot_8bit


def row_products_unsupported_reason(ops: Operands) -> str | None:
    """Why the kernels do not serve a call on this device; None if they do."""
    if target_platform() not in ("gpu", "cuda", "cpu") or wide_integers():
        return "needs an NVIDIA GPU, and counts in 32 bits"
    if not has_dot_8bit():
        return "needs products of 8-bit floats (sm_89 or newer)"
    if str(ops.x.dtype) not in HALF_TYPES or not all(isinstance(w, EightBitWeight) for w in ops.ws):
        return "wants bfloat16 or float16, and weights of 8-bit floats"
    if ops.x.shape[0] % ROWS:
        return f"wants multiples of {ROWS} rows"
    return sizes_unsupported_reason(ops, 2 * RowSumsConfig().depth)


def row_products(static: Static, ops: Operands, config: RowSumsConfig | None = None) -> tuple[jax.Array, ...]:
    """Returns y of each projection.

    Raises:
        NotImplementedError: see `row_products_unsupported_reason`.
    """
    if reason := row_products_unsupported_reason(ops):
        raise NotImplementedError(f"row_products of 8-bit floats {reason}")
    ws, lows = [cast(EightBitWeight, w) for w in ops.ws], lows_of(ops)
    x8_TK, scale_T1 = ws[0].rounded_rows(ops.x)
    sums, s = row_sums(ops.x, [w.values for w in ws], list(lows.values()), ops.tile_adapter, x8_TK=x8_TK, config=config)
    scales = [{"row_scale": scale_T1[:, 0], "column_scale": w.scales} for w in ws]
    return finish_all(static, ops, sums, s, lows, scales)
