"""dS = scale dY B^T and dB = scale S^T dY in one pass over dY.

A program owns a few row blocks of one adapter and a range of columns.  The dS accumulators of its rows stay in
registers over all columns; dB of a column block is summed over its rows and written as one partial sum.

T packed tokens · N out features · R padded rank · A adapters · C chunks of rows
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.triton.common import call, dot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DsdbConfig:
    block_t: int = 64
    blocks_per_chunk: int = 2
    block_n: int = 128
    split_n: int = 4
    num_warps: int = 4
    num_stages: int = 3

    @property
    def chunk(self) -> int:
        """Rows of a chunk; they must belong to one adapter."""
        return self.block_t * self.blocks_per_chunk

    def shared_bytes(self, rank: int, item: int, *, drops: bool = False) -> int:
        """Shared memory of a program at most: tiles of dY and B under way, S of a chunk, and dB as it is written."""
        under_way = self.num_stages if item == 2 else max(1, self.num_stages - 1)  # float32 waits in registers
        operands = under_way * self.block_n * (self.chunk + rank)
        return item * (operands + self.chunk * rank) + 4 * self.block_n * rank


def dsdb(
    dy: jax.Array,
    s: jax.Array,
    b: jax.Array,
    chunk_adapter: jax.Array,
    *,
    rank_offset: int = 0,
    config: DsdbConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns partial sums of dS [split_n, T, R] and of dB, float32 [C, N, R] (without scale; transposed).

    Those of dS are float32; a single one is in dy.dtype.

    Args:
        s: [T, >= R]; columns rank_offset .. rank_offset + R belong to this projection.
        b: [A, R, N], the scale folded in; padding rows are served by an adapter of zeros.
        chunk_adapter: int32 [T / config.chunk].
    """
    num_rows, num_out = dy.shape
    rank = b.shape[1]
    rows, columns, size = config.block_t, config.block_n, config.blocks_per_chunk
    steps = num_out // config.split_n // columns

    def kernel(dy_ref, s_ref, b_ref, adapter_ref, ds_ref, db_ref):
        chunk, part = pl.program_id(0), pl.program_id(1)
        adapter = adapter_ref[chunk]
        row_ranges = [pl.ds((chunk * size + j) * rows, rows) for j in range(size)]
        s_tiles = [s_ref[row_range, pl.ds(rank_offset, rank)] for row_range in row_ranges]

        def step(i, accs):
            col_range = pl.ds((part * steps + i) * columns, columns)
            b_tile = b_ref[adapter, :, col_range]
            db = jnp.zeros((columns, rank), jnp.float32)
            out = []
            for row_range, s_tile, acc in zip(row_ranges, s_tiles, accs, strict=True):
                dy_tile = dy_ref[row_range, col_range]
                out.append(acc + dot(dy_tile, b_tile, trans_rhs=True))
                db = db + dot(dy_tile, s_tile, trans_lhs=True)
            db_ref[chunk, col_range, :] = db
            return tuple(out)

        accs = lax.fori_loop(0, steps, step, tuple(jnp.zeros((rows, rank), jnp.float32) for _ in range(size)))
        for row_range, acc in zip(row_ranges, accs, strict=True):
            ds_ref[part, row_range, :] = acc.astype(ds_ref.dtype)

    num_chunks = num_rows // config.chunk
    ds_dtype = dy.dtype if config.split_n == 1 else jnp.float32
    return call(
        kernel,
        [dy, s, b, chunk_adapter],
        name="lora_dsdb",
        grid=(num_chunks, config.split_n),
        out_shape=(
            jax.ShapeDtypeStruct((config.split_n, num_rows, rank), ds_dtype),
            jax.ShapeDtypeStruct((num_chunks, num_out, rank), jnp.float32),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        flops=4 * num_rows * num_out * rank,
    )
