"""The kernels of all experts in 8-bit floats, multiplied as `quantised.fp8` multiplies one.

    forward    y  = (q(x) · Wq[e]) · sx[m] · sw[e, n]
    backward   dx = (q(dY · sw[e]) · Wq[e]^T) · sd[m],  e = expert of the row's tile

Every expert has scales of its own. The LoRA branch reads x and dY as they are.

M sorted rows · K in · N out · E experts
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.experts.rows import ExpertRows
from pallas_kernels.quantised import passes
from pallas_kernels.quantised.fp8 import round_channels

Rounded = tuple[jax.Array, jax.Array]  # e4m3 rows, and a scale of each


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Experts:
    """W[e, k, n] = values[e · N + n, k] · scales[e, n].

    Args:
        values: e4m3 [E · N, K]: products of 8-bit floats want the axis that they sum over last.
        scales: float32 [E, N].

    Example:
        >>> weight = quantise(jnp.concatenate([jnp.eye(32), 448 * jnp.eye(32)]), experts=2)
        >>> weight.shape, weight.dense(jnp.float32)[[0, 32], [0, 0]].tolist()
        ((64, 32), [1.0, 448.0])
    """

    values: Float[Array, "EN K"]
    scales: Float[Array, "E N"]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the kernels, one below the other: (E · K, N)."""
        experts, num_out = self.scales.shape
        return experts * self.values.shape[1], num_out

    @property
    def ndim(self) -> Literal[2]:
        return 2

    @property
    def values_ENK(self) -> Float[Array, "E N K"]:
        return self.values.reshape(*self.scales.shape, -1)

    @property
    def values_turned(self) -> Float[Array, "EK N"]:
        """In the order that backward wants."""
        return self.values_ENK.transpose(0, 2, 1).reshape(self.shape)

    def dense(self, dtype: Any, *, scaled: bool = True) -> Float[Array, "EK N"]:
        """The values that it multiplies by, without their scales if not `scaled`: exact in bfloat16 and wider types."""
        wide_ENK = self.values_ENK.astype(jnp.float32)
        wide_ENK = wide_ENK * self.scales[..., None] if scaled else wide_ENK
        return wide_ENK.astype(dtype).transpose(0, 2, 1).reshape(self.shape)

    def rounded(self, rows: ExpertRows, x: Float[Array, "M _"], *, transposed: bool, interpret: bool | None) -> Rounded:
        """Rounds x, or with `transposed` dY times the scales of its rows' experts.

        Args:
            interpret: of the kernel that rounds; None: in plain jnp.
        """
        run = passes.plain() if interpret is None else passes.load()
        factor, owner = (self.scales, jnp.maximum(rows.tile_expert, 0)) if transposed else (None, None)
        return run.round_rows(x, factor, owner, interpret=bool(interpret))


type Kernels = jax.Array | Fp8Experts  # of all experts, [E · K, N]


def quantise(kernels: Float[Array, "EK N"], *, experts: int) -> Fp8Experts:
    """Rounds the kernels of all experts, with a scale for each out feature of each."""
    num_out = kernels.shape[1]
    wide_ENK = kernels.T.reshape(num_out, experts, -1).transpose(1, 0, 2).astype(jnp.float32)
    values, scales = round_channels(wide_ENK)
    return Fp8Experts(values=values.reshape(experts * num_out, -1), scales=scales)
