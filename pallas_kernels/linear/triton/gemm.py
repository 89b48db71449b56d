"""The frozen product with the low-rank product as the accumulator's start value.

forward:   y  = x W + S B[k]                 (scale folded into B)
backward:  dx = dY W^T + mask * (dS A[k]^T)   (dropout scale folded into A)

GEMM letters: M rows · C contracted features · N columns of the result (T, K and N of the layer forward; T, N and K
backward) · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import shared_memory_bytes
from pallas_kernels.sizes import row_block
from pallas_kernels.triton_call import call, dot, keep_tile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3

    def shared_bytes(self, rank: int, item: int, *, drops: bool = False) -> int:
        """Shared memory of a program: the operands under way, and those of the low-rank product."""
        return item * (self.block_m + self.block_n) * (self.num_stages * self.block_k + rank)


def gemm_config(num_in: int, num_out: int, rank: int, tile: int, item: int = 2) -> GemmConfig:
    """The largest tiles that fit into the device's shared memory: an A100 has 163 KiB for a program, an L40S 99.

    Args:
        num_in: contracted; num_out: columns of the result; item: bytes of an element.
    """
    rows, room = row_block(tile, 128), shared_memory_bytes()
    wide, deep = 256 if rank <= 64 and rows >= 64 else 128, 64 if rank <= 128 else 32
    sizes = (
        (128, wide, deep, 3),
        (128, 128, deep, 3),
        (128, 128, 32, 3),
        (128, 64, 32, 3),
        (64, 64, 32, 2),
        (32, 32, 16, 2),
    )
    configs = [
        GemmConfig(
            block_m=min(rows, height), block_n=row_block(num_out, columns), block_k=row_block(num_in, depth),
            num_stages=stages, num_warps=8 if min(rows, height) == 128 else 4,
        )
        for height, columns, depth, stages in sizes
    ]  # fmt: skip
    return next((config for config in configs if config.shared_bytes(rank, item) <= room), configs[-1])


def gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    low: jax.Array,
    bank: jax.Array,
    block_adapter: jax.Array,
    *,
    transposed: bool,
    low_offset: int = 0,
    bits: jax.Array | None = None,
    bias: jax.Array | None = None,
    config: GemmConfig,
    interpret: bool = False,
) -> jax.Array:
    """Returns lhs @ rhs + mask * (low @ bank[adapter of the row]) + bias, [M, N] in lhs.dtype.

    Args:
        low: [M, >= R]; its columns low_offset .. low_offset + R meet the bank.
        transposed: rhs is [N, C] and bank [A + 1, N, R]; otherwise rhs is [C, N] and bank [A + 1, R, N].
        block_adapter: int32 [M / block_m], 0..A; adapter A is zero and serves padding rows.
        bits: uint32 [M, N / 256, 8], keep bits over the output's columns.
    """
    num_m = lhs.shape[0] // config.block_m
    rank = bank.shape[2] if transposed else bank.shape[1]
    out_features = rhs.shape[0] if transposed else rhs.shape[1]
    num_n = out_features // config.block_n
    rows, columns, depth = config.block_m, config.block_n, config.block_k

    def kernel(lhs_ref, rhs_ref, low_ref, bank_ref, adapter_ref, *rest):
        rest = list(rest)
        # From the end: the result, then the bias, the last optional operand. Keep bits remain.
        out_ref = rest.pop()
        bias_ref = rest.pop() if bias is not None else None
        block_row, block_col = _snake(pl.program_id(0), num_m, num_n, config.group_m)
        row0, col0 = block_row * rows, block_col * columns
        # Tiles of rows are whole blocks of one adapter, so its number is read once and no row is selected.
        adapter = adapter_ref[block_row]
        # The low-rank product comes first, so that it can be masked before the frozen product is added to it. Both sum
        # in the same float32 registers: it costs no pass over memory.
        low_tile = low_ref[pl.ds(row0, rows), pl.ds(low_offset, rank)]
        if transposed:
            acc = dot(low_tile, bank_ref[adapter, pl.ds(col0, columns), :], trans_rhs=True)
        else:
            acc = dot(low_tile, bank_ref[adapter, :, pl.ds(col0, columns)])
        if bits is not None:  # selected, not multiplied: NaN · 0 is NaN
            acc = jnp.where(keep_tile(rest[0], row0, col0, rows, columns), acc, jnp.float32(0))
        if bias_ref is not None:
            acc = acc + bias_ref[pl.ds(col0, columns)].astype(jnp.float32)[None, :]

        # Tiles of both operands are loaded `num_stages` steps before they are multiplied.
        def step(i, acc):
            lhs_tile = lhs_ref[pl.ds(row0, rows), pl.ds(i * depth, depth)]
            if transposed:  # W is read as it is stored: a transposed copy would take its size
                return acc + dot(lhs_tile, rhs_ref[pl.ds(col0, columns), pl.ds(i * depth, depth)], trans_rhs=True)
            return acc + dot(lhs_tile, rhs_ref[pl.ds(i * depth, depth), pl.ds(col0, columns)])

        acc = lax.fori_loop(0, lhs.shape[1] // depth, step, acc)
        # The only rounding: both products and the bias are summed in float32.
        out_ref[pl.ds(row0, rows), pl.ds(col0, columns)] = acc.astype(out_ref.dtype)

    optional = [array for array in (bits, bias) if array is not None]
    return call(
        kernel,
        [lhs, rhs, low, bank, block_adapter, *optional],
        name="lora_dx" if transposed else "lora_fwd",
        grid=(num_m * num_n,),
        out_shape=jax.ShapeDtypeStruct((lhs.shape[0], out_features), lhs.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        flops=2 * lhs.shape[0] * out_features * (lhs.shape[1] + rank),
    )


def _snake(program, num_m: int, num_n: int, group_m: int):
    """Walks the output in bands of `group_m` row blocks, so that neighbours in time share operands in L2."""
    per_band = group_m * num_n
    first = program // per_band * group_m
    # The last band may have fewer row blocks than the others.
    height = jnp.minimum(num_m - first, group_m)
    inside = lax.rem(program, per_band)
    return first + lax.rem(inside, height), inside // height
