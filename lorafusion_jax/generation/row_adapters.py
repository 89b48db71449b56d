"""The backend of decoding: every row has an adapter of its own.

S = x [A of all adapters side by side], what is not the row's own adapter's set to 0, and y = x W + S [B of all]. Two
dense products read A and B once, in whatever order rows are. Zeros times numbers that are not finite would reach other
rows, so A and B must be finite: `programs.put` makes them so.

T rows · K in features · N out features · R rank · A adapters
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.device import target_platform
from pallas_kernels.exact import precision_of, product
from pallas_kernels.frozen_weight import frozen_product
from pallas_kernels.problem import Operands, Static

NAME, SEPARATE = "_row_adapters", "_separate_row_adapters"  # the second to compare with
JOINED_ROWS = 64  # more take longer in bfloat16; with fp8 they were not measured


class RowAdapters:
    """See the module; only forward.

    Args:
        joined: all products of `JOINED_ROWS` rows take two launches, or three with weights of 8-bit floats.
    """

    def __init__(self, *, joined: bool):
        self._joined = joined

    def unsupported_reason(self, static: Static, ops: Operands) -> str | None:
        return None if static.tile == 1 and ops.dropout is None else "it wants an adapter for every row, and no dropout"

    def forward(self, static: Static, ops: Operands) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], None]:
        if self._joined and len(ops.x) == JOINED_ROWS and target_platform() in ("gpu", "cuda"):
            from pallas_kernels.linear.triton import row_products, row_products_8bit  # load Pallas

            for kernels in (row_products, row_products_8bit):
                if kernels.row_products_unsupported_reason(ops) is None:
                    return kernels.row_products(static, ops), (), None
        mine_TA1 = (ops.tile_adapter[:, None] == jnp.arange(static.num_adapters))[:, :, None]
        downs = dict(zip(ops.with_lora, _down(ops), strict=True))
        return tuple(self._product(static, ops, i, downs.get(i), mine_TA1) for i in range(len(ops.ws))), (), None

    def backward(self, static: Static, ops: Operands, ss: Any, bits: Any, dys: Any) -> Any:
        raise NotImplementedError("decoding has no gradients")

    def _product(self, static: Static, ops: Operands, i: int, s_TC: jax.Array | None, mine_TA1: jax.Array) -> jax.Array:
        x, bias = ops.x, ops.biases[i]
        dtype = x.dtype if static.y_dtype is None else static.y_dtype
        # Training's kernels round the sum of both products once, its XLA products each: samples have the same log p.
        sum_dtype = jnp.float32 if s_TC is not None and target_platform() in ("gpu", "cuda") else dtype
        y_TN = frozen_product(x, ops.ws[i], sum_dtype)
        y_TN = y_TN if bias is None else y_TN + bias.astype(y_TN.dtype)
        if s_TC is None:
            return y_TN
        b = ops.lora(i)[1].astype(x.dtype)
        A, R, N = b.shape
        s_TAR = s_TC.astype(x.dtype).astype(jnp.float32).reshape(-1, A, R) * ops.scale[:, None]
        masked_TC = jnp.where(mine_TA1, s_TAR, 0.0).astype(x.dtype).reshape(-1, A * R)
        low_TN = jnp.matmul(
            masked_TC, b.reshape(A * R, N), precision=precision_of(x.dtype), preferred_element_type=y_TN.dtype
        )
        return (y_TN + low_TN).astype(dtype)


def _down(ops: Operands) -> list[jax.Array]:
    """x times all A of each projection, float32 [T, A · R]."""
    x, as_ = ops.x, [_side_by_side(ops.lora(i)[0].astype(ops.x.dtype)) for i in ops.with_lora]
    if as_ and target_platform() in ("gpu", "cuda"):
        from pallas_kernels.linear.triton.down_all import down_all, down_all_unsupported_reason  # loads Pallas

        if down_all_unsupported_reason(x, as_) is None:
            return [parts.sum(0) for parts in down_all(x, as_)]
    return [product(x, a) for a in as_]


def _side_by_side(a_AKR: jax.Array) -> jax.Array:
    """[K, A · R], as it lies in a bank."""
    A, K, R = a_AKR.shape
    return a_AKR.swapaxes(0, 1).reshape(K, A * R)


backend.register(NAME, RowAdapters(joined=True))
backend.register(SEPARATE, RowAdapters(joined=False))
