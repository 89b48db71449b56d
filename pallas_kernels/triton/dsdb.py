"""dS = scale dY B^T and dB = scale S^T dY in one pass over dY.

A program owns a few row blocks of one adapter and a range of columns.  The dS accumulators of its rows stay in registers
over all columns; dB of a column block is summed over its rows and written as one partial sum.

T packed tokens · N out features · R padded rank · A adapters · C chunks
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.chunks import Chunks
from pallas_kernels.triton.common import call, dot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DsdbConfig:
    block_t: int = 64
    blocks_per_chunk: int = 2
    block_n: int = 128
    split_n: int = 4
    num_warps: int = 4
    num_stages: int = 3


def dsdb(
    dy: jax.Array,
    s: jax.Array,
    b: jax.Array,
    scale: jax.Array,
    chunks: Chunks,
    *,
    rank_offset: int = 0,
    config: DsdbConfig,
    contiguous: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns dS [T, R] in dy.dtype and partial sums of dB, float32 [C, N, R] (without scale; transposed).

    Args:
        s: [T, >= R]; columns rank_offset .. rank_offset + R belong to this projection.
        b: [A + 1, R, N]; scale: float32 [A + 1]; the last adapter is zero and serves padding rows.
        contiguous: chunk c holds the blocks [c * size, (c + 1) * size), all present: no table is read.
    """
    num_rows, num_out = dy.shape
    rank = b.shape[1]
    rows, columns, size = config.block_t, config.block_n, config.blocks_per_chunk
    steps = num_out // config.split_n // columns
    total = chunks.blocks.shape[0]

    def kernel(dy_ref, s_ref, b_ref, scale_ref, blocks_ref, count_ref, adapter_ref, ds_ref, db_ref):
        chunk, part = pl.program_id(0), pl.program_id(1)

        def work(num_blocks: int, row0s, adapter):
            s_tiles = [s_ref[pl.ds(row0, rows), pl.ds(rank_offset, rank)] for row0 in row0s]

            def step(i, accs):
                col0 = (part * steps + i) * columns
                b_tile = b_ref[adapter, :, pl.ds(col0, columns)]
                db = jnp.zeros((columns, rank), jnp.float32)
                out = []
                for j in range(num_blocks):
                    dy_tile = dy_ref[pl.ds(row0s[j], rows), pl.ds(col0, columns)]
                    out.append(accs[j] + dot(dy_tile, b_tile, trans_rhs=True))
                    db = db + dot(dy_tile, s_tiles[j], trans_lhs=True)
                db_ref[chunk, pl.ds(col0, columns), :] = db
                return tuple(out)

            start = tuple(jnp.zeros((rows, rank), jnp.float32) for _ in range(num_blocks))
            accs = lax.fori_loop(0, steps, step, start)
            for j in range(num_blocks):
                ds_ref[part, pl.ds(row0s[j], rows), :] = (accs[j] * scale_ref[adapter]).astype(ds_ref.dtype)

        if contiguous:
            work(size, [(chunk * size + j) * rows for j in range(size)], 0)
            return
        # a chunk may hold fewer blocks: one program text per count, chosen once per program
        adapter, count = adapter_ref[chunk], count_ref[chunk]
        for num_blocks in range(1, size + 1):

            @pl.when(count == num_blocks)
            def _(num_blocks=num_blocks):
                work(num_blocks, [blocks_ref[chunk, j] * rows for j in range(num_blocks)], adapter)

    ds_dtype = dy.dtype if config.split_n == 1 else jnp.float32
    ds, db = call(
        kernel,
        [dy, s, b, scale, chunks.blocks, chunks.count, chunks.adapter],
        name="lora_dsdb",
        grid=(total, config.split_n),
        out_shape=(
            jax.ShapeDtypeStruct((config.split_n, num_rows, rank), ds_dtype),
            jax.ShapeDtypeStruct((total, num_out, rank), jnp.float32),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return (ds[0] if config.split_n == 1 else ds.sum(0).astype(dy.dtype)), db
