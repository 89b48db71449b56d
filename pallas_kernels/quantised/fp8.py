"""A frozen weight of 8-bit floats whose products read 8-bit floats on both sides: twice bfloat16's rate on sm_89 on.

    forward    y  = (q(x) · Wq) · sx[t] · sw[n]
    backward   dx = (q(dY · sw) · Wq^T) · sd[t]

The weight's scales belong to its out features, over which backward sums, so they go into dY before it is rounded. Both
directions read the same values. Rows of x and dY are rounded by themselves (see `quantised.rows`); the LoRA branch
reads x as it is.

T packed tokens · K in features · N out features
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.device import has_fp8_products, target_platform
from pallas_kernels.frozen_weight import read_with
from pallas_kernels.quantised.rows import E4M3, power_of_two_scales, round_rows

# Hopper's matrix units add 8-bit products with some 14 bits. "highest" lets cuBLAS add partial sums in full every few
# steps, about 8 % slower; next to operands that are rounded to 2^-4 it gains nothing.
SMALLEST_SCALE = 2.0**-48  # of a weight: adapters are divided by it, and must stay in bfloat16's range
PRECISION = lax.Precision.DEFAULT


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """W[k, n] = values[n, k] · scales[n].

    Products of 8-bit floats want the axis that they sum over last in both operands. Forward sums over K, backward over
    N: with `transposed` neither rearranges anything, without it backward transposes the bytes whenever it runs.

    Args:
        values: e4m3 [N, K], as checkpoints have them.
        scales: float32 [N].
        transposed: the same values once more, [K, N], or None.

    Example:
        >>> weight = quantise(jnp.eye(32))
        >>> weight.shape, weight.multiply(jnp.full((1, 32), 3.0))[0, 0].item()
        ((32, 32), 3.0)
    """

    values: Float[Array, "N K"]
    scales: Float[Array, " N"]
    transposed: Float[Array, "K N"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[1], self.values.shape[0]

    @property
    def ndim(self) -> Literal[2]:
        return 2

    def dimensions(self) -> Fp8Weight:
        """A device that holds a part of a row rounds it with a scale of its own: at least as finely as the row."""
        transposed: Any = None if self.transposed is None else "k n"
        return Fp8Weight(values=cast(Any, "n k"), scales=cast(Any, "n"), transposed=transposed)

    @property
    def values_KN(self) -> Float[Array, "K N"]:
        """In the order that backward wants."""
        return self.values.T if self.transposed is None else self.transposed

    def dense(self, dtype: Any) -> Float[Array, "K N"]:
        """See `dequantise`."""
        return dequantise(self, dtype)

    def multiply(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        """x W."""
        x8, scales = round_rows(x)
        sums = self.sums(x8, x.dtype)
        return (sums.astype(jnp.float32) * scales * self.scales).astype(x.dtype)

    def multiply_transposed(self, dy: Float[Array, "*B N"]) -> Float[Array, "*B K"]:
        """dY W^T."""
        dy8, scales = round_rows(dy.astype(jnp.float32) * self.scales)
        sums = self.transposed_sums(dy8, dy.dtype)
        return (sums.astype(jnp.float32) * scales).astype(dy.dtype)

    def rounded_rows(self, x: Float[Array, "T K"]) -> tuple[Float[Array, "T K"], Float[Array, "T 1"]]:
        """See `EightBitWeight`."""
        from pallas_kernels.quantised import passes  # loads Pallas

        return passes.load().round_rows(x, interpret=target_platform() == "cpu")

    def sums(self, x8: Float[Array, "*B K"], dtype: jnp.dtype) -> Float[Array, "*B N"]:
        """x W without any scale, as wide as a result of type `dtype` wants."""
        x8, weight = _to_multiply(x8, self)
        return sum_last(x8, weight.values, _sum_type(dtype))

    def transposed_sums(self, dy8: Float[Array, "*B N"], dtype: jnp.dtype) -> Float[Array, "*B K"]:
        """dY W^T without any scale."""
        dy8, weight = _to_multiply(dy8, self)
        return sum_last(dy8, weight.values_KN, _sum_type(dtype))


def quantise(kernel_KN: Float[Array, "K N"], *, both: bool = False) -> Fp8Weight:
    """Rounds a weight, with a scale for each out feature.

    Args:
        kernel_KN: floating.
        both: keep the values in both orders.
    """
    values_NK, scales_N = round_channels(kernel_KN.T.astype(jnp.float32))
    return Fp8Weight(values=values_NK, scales=scales_N, transposed=values_NK.T if both else None)


def round_channels(channels: Float[Array, "*B K"]) -> tuple[Float[Array, "*B K"], Float[Array, "*B"]]:
    """Rounds out features of a weight, float32, each with a scale of its own."""
    scales, _ = power_of_two_scales(jnp.max(jnp.abs(channels), axis=-1))
    scales = jnp.maximum(scales, SMALLEST_SCALE)
    return (channels * (1 / scales)[..., None]).astype(E4M3), scales


def dequantise(weight: Fp8Weight, dtype: jnp.dtype) -> Float[Array, "K N"]:
    """The values times their scales: exact in bfloat16 and wider types where scales are powers of two."""
    return (weight.values.astype(jnp.float32) * weight.scales[:, None]).astype(dtype).T


def _to_multiply(rows: jax.Array, weight: Fp8Weight) -> tuple[jax.Array, Fp8Weight]:
    """See `read_with`. Where a device multiplies the stored values themselves, nothing is made of them before."""
    return (rows, weight) if has_fp8_products() else read_with(rows, weight)


def sum_last(lhs: jax.Array, rhs: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Sums lhs[t, i] · rhs[j, i] over i. Devices without such products multiply the same values in a wider type."""
    last = (((lhs.ndim - 1,), (1,)), ((), ()))
    if not has_fp8_products():
        wide = jnp.float32 if target_platform() == "cpu" else jnp.bfloat16  # either holds every e4m3 value
        lhs, rhs, highest = lhs.astype(wide), rhs.astype(wide), lax.Precision.HIGHEST
        return lax.dot_general(lhs, rhs, last, precision=highest, preferred_element_type=jnp.float32).astype(dtype)
    return lax.dot_general(lhs, rhs, last, precision=PRECISION, preferred_element_type=dtype)


def _sum_type(dtype: jnp.dtype) -> jnp.dtype:
    """What a product writes before scales: bfloat16 has the range, and float32 would double the bytes."""
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)
