"""Shared by both passes over the gate: tiles, products and the launch of a program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.hopper.tiling import ROWS, store_fragment, transforms
from pallas_kernels.mlp.hopper.gate.config import PART, WIDTH, Place
from pallas_kernels.quantised.rows import E4M3

LOW_SWIZZLE = 16  # elements: the shortest rows of S; the operands they meet must have the same swizzle
# The hardware's exp2, within 2 units in the last place. The exact one would be a fifth of all instructions.
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True)


def launch(
    work: Callable[..., None],
    operands: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
    *,
    units: int,
    warpgroups: int,
    tiles: Mapping[str, Any],
    barriers: Mapping[str, tuple[int, int]],
    name: str,
):
    """Runs `work` for every unit, in a warpgroup.

    Args:
        work: (unit, operands and results, **tiles and barriers of its warpgroup); a barrier is a function of a number.
        tiles: name -> a warpgroup's tile, from `tile` or `low`.
        barriers: name -> (arrivals, number of barriers of a warpgroup).
    """

    def kernel(*gmem):
        wg = lax.axis_index("wg")
        unit = lax.axis_index("program") * warpgroups + wg

        # Warpgroups of a block share no data: each has its tiles and barriers, cut out of common allocations, because
        # an allocation is made by all warpgroups together.
        @functools.partial(
            pl.run_scoped,
            **{
                key: plgpu.SMEM((warpgroups, *ref.shape), ref.dtype, transforms=ref.transforms)
                for key, ref in tiles.items()
            },
            **{
                key: plgpu.Barrier(num_arrivals=arrivals, num_barriers=warpgroups * count)
                for key, (arrivals, count) in barriers.items()
            },
            collective_axes="wg",
        )
        def _(**scratch):
            parts = {key: scratch[key].at[wg] for key in tiles}
            parts |= {key: functools.partial(_barrier, scratch[key], wg, count) for key, (_, count) in barriers.items()}
            # The last block may have a warpgroup too many; it takes part in the allocation and does nothing.
            pl.when(unit < units)(lambda: work(unit, gmem, **parts))

    return plgpu.kernel(
        kernel,
        out_type=tuple(out_type),
        grid=(-(-units // warpgroups),),
        grid_names=("program",),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name=name,
        compiler_params=COMPILER_PARAMS,
    )(*operands)


def _barrier(barriers, wg, count: int, number=0):
    return barriers.at[wg * count + number]


def tile(*shape: int, dtype: jnp.dtype):
    """Tiles of WIDTH columns, of which PART columns can be read or multiplied."""
    return plgpu.SMEM((*shape, WIDTH), dtype, transforms=transforms(PART, dtype))


def low(*shape: int, dtype: jnp.dtype):
    """Rows of S, or of a bank that they meet."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(LOW_SWIZZLE, dtype))


def rounded_tile(*shape: int):
    """A tile of 8-bit floats on its way to device memory."""
    return plgpu.SMEM((*shape, ROWS, WIDTH), E4M3, transforms=transforms(PART, E4M3))


def store_rounded(target, values: jax.Array, inverse: jax.Array) -> None:
    """Writes rows times the inverse of their scales as 8-bit floats, a part of a tile's columns."""
    scaled = values * lax.broadcast_in_dim(inverse, values.shape, [0])
    store_fragment(target, scaled.astype(E4M3))


def registers(tile_smem) -> jax.Array:
    return plgpu.load(tile_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def products(*pairs: tuple[Any, Any]) -> tuple[jax.Array, ...]:
    """Products of (left [64, R], right [R, 32]). Waits once, for all of them and for all that was issued before."""

    def run(*accs):
        for acc, (left, right) in zip(accs, pairs, strict=True):
            plgpu.wgmma(acc, left, right)
        plgpu.wgmma_wait(0)
        return tuple(acc[...] for acc in accs)

    return pl.run_scoped(run, *[plgpu.ACC((ROWS, PART), jnp.float32)] * len(pairs))


def low_factors(left, right, part: Place) -> tuple[Any, Any]:
    """A projection's columns of S and rows of the bank, for `products`."""
    return left.at[:, pl.ds(*part)], right.at[pl.ds(*part), :]


def sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))
