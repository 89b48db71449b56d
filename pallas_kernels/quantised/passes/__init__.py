"""The small passes around products of 8-bit floats: rounding of rows, and what finishes a product.

As in `linear.passes` there are two implementations of the same functions: `pallas/`, kernels in Pallas's Triton
lowering, which goes when that lowering does, and `xla.py`, plain jnp for where it is missing.

T rows · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any, Protocol, cast

import jax

from pallas_kernels.quantised.rows import E4M3

ROWS = 64  # of a block in `finish`, at most


class Passes(Protocol):
    """The functions of an implementation; `interpret` is for kernels on a CPU."""

    def round_rows(
        self, x: jax.Array, factor: jax.Array | None = None, owner: jax.Array | None = None, *,
        dtype: Any = E4M3, interpret: bool = False,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """Returns e4m3 [T, K] and scales [T, 1] of x, or of x · factor in float32; see `quantised.rows.round_rows`.

        Args:
            factor: [K], or with `owner` [E, K].
            owner: int32, e of every block of T / blocks rows, a power of two.
            dtype: that the values of e4m3 are written in.
        """
        ...

    def finish(
        self, sums: jax.Array, row_scales: jax.Array, column_scales: jax.Array | None, s: jax.Array, bank: jax.Array,
        block_adapter: jax.Array, *, rank_offset: int = 0, interpret: bool = False,
    ) -> jax.Array:  # fmt: skip
        """Returns y[t, n] = sums[t, n] · row_scale[t] · column_scale[n] + S[t] B[k, :, n] in the type of S.

        Args:
            sums: [T, N]; row_scales: [T, 1]; column_scales: [N].
            s: [T, >= R]; columns rank_offset .. rank_offset + R belong to this product.
            bank: [A, R, N], scales folded in; padding rows are served by an adapter of zeros.
            block_adapter: int32, k of every block of T / blocks rows, a power of two.
        """
        ...


def plain() -> Passes:
    """Returns XLA's passes."""
    return cast(Passes, importlib.import_module("pallas_kernels.quantised.passes.xla"))


@functools.cache
def load() -> Passes:
    """Returns the kernels, or XLA's passes where this version of jax has no Triton lowering."""
    try:
        return cast(Passes, importlib.import_module("pallas_kernels.quantised.passes.pallas"))
    except ImportError as missing:
        warnings.warn(
            f"8-bit products run with plain XLA around them and are slower: kernels cannot be imported ({missing})",
            stacklevel=2,
        )
        return plain()
