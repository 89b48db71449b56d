"""The small passes around the products: keep bits, banks, passes over x and dY, joins and sums of partial sums.

Hopper's backend and Triton's both call them. There are two implementations of the same functions:

    pallas/   kernels in Pallas's Triton lowering: the ones whose speed is published. JAX has announced the end of that
              lowering; then this folder goes, together with the `triton/` folders and `triton_call.py`.
    xla.py    plain jnp, compiled by XLA. It serves where the lowering is missing, with a warning: it is slower.

T packed tokens · K in features · N out features · R padded rank · A adapters · C chunks
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Sequence
from typing import Protocol, cast

import jax

from pallas_kernels.dropout import Dropout
from pallas_kernels.linear.chunks import Chunks
from pallas_kernels.linear.passes.config import DaConfig, DownConfig, DsdbConfig, ExtraConfig


class Passes(Protocol):
    """The functions of an implementation; `interpret` is for kernels on a CPU."""

    def keep_words(
        self, dropout: Dropout, block_adapter: jax.Array, num_columns: int, *, block_t: int, interpret: bool = False
    ) -> jax.Array:
        """Returns the packed keep bits, uint32 [T, ceil(K / 256), 8], the same bits as `dropout.keep_words`.

        Args:
            block_adapter: int32 [T / block_t]; numbers without an adapter get some adapter's bits, which are not read.
        """
        ...

    def transposed_bank(
        self, pieces: Sequence[jax.Array], factor: jax.Array, total: int, dtype: jax.typing.DTypeLike, *,
        interpret: bool = False,
    ) -> jax.Array:  # fmt: skip
        """Returns [A + 1, total, K]: factor[k] * A[k]^T of every piece, one below the other, then zeros.

        Adapter A is zero: it serves padding rows.

        Args:
            pieces: [A, K, R_i] each, K a multiple of 64 and R_i a power of two.
            factor: float32 [A].
        """
        ...

    def down(
        self, x: jax.Array, a: jax.Array, block_adapter: jax.Array, bits: jax.Array | None, *, config: DownConfig,
        interpret: bool = False,
    ) -> jax.Array:  # fmt: skip
        """Returns S = drop(x) A, [T, R] in x.dtype.

        Args:
            a: [A, K, R], the dropout scale folded in; padding rows are served by an adapter of zeros.
            block_adapter: int32 [T / block_t].
            bits: uint32 [T, K / 256, 8]; None without dropout.
        """
        ...

    def da(
        self, x: jax.Array, ds: jax.Array, bits: jax.Array | None, chunks: Chunks, *, config: DaConfig,
        contiguous: bool, interpret: bool = False,
    ) -> jax.Array:  # fmt: skip
        """Returns partial sums of dA = drop(x)^T dS, float32 [C, K, R], without the dropout scale."""
        ...

    def dsdb(
        self, dy: jax.Array, s: jax.Array, b: jax.Array, chunk_adapter: jax.Array, *, rank_offset: int = 0,
        config: DsdbConfig, interpret: bool = False,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """Returns partial sums of dS [parts, T, R] and of dB, float32 [C, N, R] (without scale; transposed).

        Args:
            s: [T, >= R]; columns rank_offset .. rank_offset + R belong to this projection.
            b: [A, R, N], the scale folded in; padding rows are served by an adapter of zeros.
            chunk_adapter: int32 [T / config.chunk].
        """
        ...

    def extra_down(
        self, x: jax.Array, bank: jax.Array, block_adapter: jax.Array, active: jax.Array, bits: jax.Array | None, *,
        transposed: bool, config: ExtraConfig, interpret: bool = False,
    ) -> jax.Array:  # fmt: skip
        """Returns drop(x) bank[adapter of the row], [T, R] in x.dtype; zeros beyond the active blocks of 64 ranks.

        Args:
            bank: [A, M, R], or [A, R, M] transposed; R a multiple of 64.
            block_adapter: int32 [T / config.block_t], 0 .. A - 1.
            active: int32 [T / config.block_t], how many blocks of ranks these rows have; 0: none.
            bits: uint32 [T, M / 256, 8]; None without dropout.
        """
        ...

    def extra_up(
        self, y: jax.Array | None, s: jax.Array, bank: jax.Array, block_adapter: jax.Array, active: jax.Array,
        bits: jax.Array | None, *, first: int, stride: int, transposed: bool, config: ExtraConfig,
        interpret: bool = False,
    ) -> jax.Array:  # fmt: skip
        """Returns y + mask * (s bank[adapter of the row]), rounded once more; rows without extra ranks as they are.

        Args:
            y: [T, M]; a kernel may take its memory. None: 0.
            s: [T, .], whose blocks of 64 columns first, first + stride, ... meet those of the bank.
            bank: [A, R, M], or [A, M, R] transposed.
            bits: over the columns of y.
        """
        ...

    def extra_sums(
        self, x: jax.Array, s: jax.Array, chunks: Chunks, active: jax.Array, bits: jax.Array | None, *,
        config: ExtraConfig, interpret: bool = False,
    ) -> jax.Array:  # fmt: skip
        """Returns partial sums of drop(x)^T s, float32 [C, R / config.ranks, M, config.ranks].

        Args:
            chunks: of blocks of config.sum_rows rows; what a chunk without any holds is not defined.
            active: int32 [C], blocks of ranks of a chunk's adapter.
        """
        ...

    def join(
        self, pieces: Sequence[jax.Array], dtype: jax.typing.DTypeLike, *, columns: int = 0, rows: int = 0,
        interpret: bool = False,
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        """Returns dS [T, columns], where columns are asked for, then dS^T [rows, T], where rows are.

        Args:
            pieces: [parts, T, R_i] each, summed in float32 and rounded once; zeros follow the last piece.
        """
        ...

    def sum_partials(
        self, partials: jax.Array, adapter: jax.Array, factor: jax.Array, parts: Sequence[tuple[int, int]], *,
        transposed: bool, interpret: bool = False,
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        """Returns factor[k] * sum of the partial sums of adapter k: float32 [A, M, rank], or [A, rank, M] transposed.

        Args:
            partials: float32 [C, M, R].
            adapter: int32 [C]; chunks of other numbers than 0 .. A - 1 are padding.
            parts: first column and rank of each result.
        """
        ...


@functools.cache
def load() -> Passes:
    """Returns the kernels, or XLA's passes where this version of jax has no Triton lowering."""
    try:
        return cast(Passes, importlib.import_module("pallas_kernels.linear.passes.pallas"))
    except ImportError as missing:
        warnings.warn(
            f"small passes run as plain XLA and are slower: their kernels cannot be imported ({missing})", stacklevel=2
        )
        return cast(Passes, importlib.import_module("pallas_kernels.linear.passes.xla"))
