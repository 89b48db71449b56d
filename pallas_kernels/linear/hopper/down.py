"""S = drop(x) A and the packed keep bits in one pass over x, for Hopper.

A program has 64 rows and a part of the columns; tiles of x and A come through a ring of `stages` slots.  While they
travel, each thread hashes the keep words of its elements.  The tile is masked in shared memory, where the tensor cores
read it, and the words are stored for the backward pass.

T packed tokens · K in features · R padded rank (of all projections together) · A adapters
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dropout import BLOCK, WORDS, Dropout, threshold
from pallas_kernels.linear.hopper.mask import apply_words, make_words
from pallas_kernels.linear.hopper.tiling import ROWS, store_fragment, transforms
from pallas_kernels.manual_axes import vary_like
from pallas_kernels.policy import HOPPER_SMS
from pallas_kernels.sizes import split_loop


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DropDownConfig:
    split_k: int = 2
    stages: int = 3
    block_k: int = 128

    block_t = ROWS

    def smem_bytes(self, rank: int) -> int:
        """Shared memory of a program with 2-byte operands."""
        return 2 * self.stages * self.block_k * (ROWS + rank)


def drop_down_config(num_rows: int, num_in: int) -> DropDownConfig:
    """Two programs a multiprocessor: one makes keep bits while the other multiplies."""
    split = split_loop(num_rows // ROWS, num_in // BLOCK, wanted=2 * HOPPER_SMS)
    return DropDownConfig(split_k=split)


def drop_down(
    x: jax.Array, a: jax.Array, block_adapter: jax.Array, dropout: Dropout, *, config: DropDownConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns S [T, R] in x.dtype and the keep bits uint32 [T, K / 256, 8].

    Args:
        a: [A + 1, R, K], the dropout scale folded in; padding rows are served by an adapter of zeros.
        block_adapter: int32 [T / 64], 0..A.
    """
    num_rows, num_in = x.shape
    rank = a.shape[1]
    steps = num_in // BLOCK // config.split_k
    width, halves = config.block_k, BLOCK // config.block_k
    stages = min(config.stages, steps * halves)
    last = dropout.key.shape[0] - 1

    def kernel(x_gmem, a_gmem, adapter_gmem, key_gmem, thresh_gmem, row_key_gmem, s_gmem, bits_gmem):
        part = lax.axis_index("part")
        rows = pl.ds(lax.axis_index("block") * ROWS, ROWS)
        adapter = adapter_gmem[lax.axis_index("block")]
        keyed = lax.min(adapter, jnp.asarray(last, adapter.dtype))  # padding rows meet zeros of A: any key will do
        key, thresh = key_gmem[keyed], thresh_gmem[keyed]
        row_key = plgpu.load(row_key_gmem.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

        @functools.partial(
            pl.run_scoped,
            x_smem=plgpu.SMEM((stages, ROWS, width), x.dtype, transforms=transforms(width, x.dtype)),
            a_smem=plgpu.SMEM((stages, rank, width), x.dtype, transforms=transforms(width, x.dtype)),
            barrier=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        )
        def _(x_smem, a_smem, barrier):
            def fetch(step, slot):
                columns = pl.ds(part * steps * BLOCK + step * width, width)
                plgpu.copy_gmem_to_smem(x_gmem.at[rows, columns], x_smem.at[slot], barrier.at[slot])
                plgpu.copy_gmem_to_smem(a_gmem.at[adapter].at[:, columns], a_smem.at[slot], barrier.at[slot])

            for step in range(stages):
                fetch(step, step)

            @functools.partial(pl.run_scoped, acc=plgpu.ACC((ROWS, rank), jnp.float32))
            def _(acc):
                def body(number, _):
                    block = part * steps + number
                    words = make_words(key, thresh, row_key, block)  # arithmetic, while the copies travel
                    store_fragment(bits_gmem.at[rows, block, :], words)
                    for half in range(halves):
                        step = number * halves + half
                        slot = lax.rem(step, stages)
                        plgpu.barrier_wait(barrier.at[slot])  # x and A of these columns have arrived
                        apply_words(x_smem.at[slot], words, first=half * width // WORDS)  # ends in a barrier

                        # The previous step's slot is free: its product has completed, and every warp is past it.
                        @pl.when((step > 0) & (step - 1 + stages < steps * halves))
                        def _(step=step):
                            fetch(step - 1 + stages, lax.rem(step - 1, stages))

                        plgpu.wgmma(acc, x_smem.at[slot], a_smem.at[slot].transpose((1, 0)))
                        plgpu.wgmma_wait(0)

                lax.fori_loop(0, steps, body, None)
                store_fragment(s_gmem.at[part, rows, :], acc[...].astype(s_gmem.dtype))

    run = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((config.split_k, num_rows, rank), x.dtype if config.split_k == 1 else jnp.float32),
            jax.ShapeDtypeStruct((num_rows, num_in // BLOCK, WORDS), jnp.uint32),
        ),
        grid=(num_rows // ROWS, config.split_k),
        grid_names=("block", "part"),
        kernel_name="lora_drop_down",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    key, row_key = (array.astype(jnp.uint32) for array in (dropout.key, dropout.row_key))
    s, bits = vary_like(run(x, a, block_adapter, key, threshold(dropout.rate), row_key), x)
    return (s[0] if config.split_k == 1 else s.sum(0).astype(x.dtype)), bits
