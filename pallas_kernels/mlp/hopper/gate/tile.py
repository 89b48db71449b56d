"""What both passes over the gate do with a tile, and how their programs are launched."""

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

LOW_SWIZZLE = 16  # elements: rows of S may be as short as that, and what they meet must lie alike
# exp2 as the hardware has it, 2 units in the last place: the exact one is a fifth of all instructions
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
    """Runs `work` for every unit, a warpgroup each.

    Args:
        work: (unit, operands and results, **tiles and barriers of its own); a barrier is a function of its number.
        tiles: name -> what `tile` and `low` return.
        barriers: name -> (arrivals, how many of them a warpgroup has).
    """

    def kernel(*gmem):
        wg = lax.axis_index("wg")
        unit = lax.axis_index("program") * warpgroups + wg

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
            own = {key: scratch[key].at[wg] for key in tiles}
            own |= {key: functools.partial(_barrier, scratch[key], wg, count) for key, (_, count) in barriers.items()}
            pl.when(unit < units)(lambda: work(unit, gmem, **own))

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
    """Wide tiles, of which a part's columns can be taken."""
    return plgpu.SMEM((*shape, WIDTH), dtype, transforms=transforms(PART, dtype))


def low(*shape: int, dtype: jnp.dtype):
    """Rows of S, or of what they meet."""
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


def products(*given: tuple[Any, Any]) -> tuple[jax.Array, ...]:
    """Products of (left [64, R], right [R, 32]), with one wait for all and what was issued before."""

    def run(*accs):
        for acc, (left, right) in zip(accs, given, strict=True):
            plgpu.wgmma(acc, left, right)
        plgpu.wgmma_wait(0)
        return tuple(acc[...] for acc in accs)

    return pl.run_scoped(run, *[plgpu.ACC((ROWS, PART), jnp.float32)] * len(given))


def low_factors(left, right, place: Place) -> tuple[Any, Any]:
    """Columns of S and the rows of a bank that they meet, as `products` takes them."""
    return left.at[:, pl.ds(*place)], right.at[pl.ds(*place), :]


def sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))
