"""Launch of the Hopper attention kernels.

T packed rows · H query heads · K key heads · G = H / K · C head width
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.attention.hopper.config import WARPGROUPS, AttentionConfig, Units
from pallas_kernels.attention.hopper.walk import Walk
from pallas_kernels.manual_axes import vary_like


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """Static parameters of a kernel."""

    scale: float
    width: int  # C
    dtype: Any
    group: int  # G
    stages: int  # depth of the ring of streamed tiles
    walk: Walk
    config: AttentionConfig

    @property
    def units(self) -> Units:
        return Units(group=self.group)


def static_of(
    q_THC, k_TKC, *, rows: int, repeats: int, stages: int, scale: float, sms: int, config: AttentionConfig
) -> Static:
    """Static parameters for blocks of `rows` rows, whose tiles an item streams `repeats` times."""
    T, H, C = q_THC.shape
    blocks, num_keys = T // rows, k_TKC.shape[1]
    return Static(
        scale=scale,
        width=C,
        dtype=q_THC.dtype,
        group=H // num_keys,
        stages=stages,
        walk=Walk(blocks=blocks, heads=num_keys, sms=min(sms, blocks * num_keys), repeats=repeats),
        config=config,
    )


def launch[R](
    static: Static,
    *,
    make_refs: Callable[..., R],
    stream: Callable[[Static, R], None],
    compute: Callable[[Static, R, Any], None],
    operands: Mapping[str, jax.Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
) -> tuple[jax.Array, ...]:
    """Runs one block per multiprocessor: two warpgroups compute and one streams.

    Args:
        make_refs: record of all references, by the names of operands, results and scratch: `_g` in device memory, `_s`
            in shared memory, and barriers.
        stream: fills shared memory; called with (static, refs).
        compute: called by the two compute warpgroups with (static, refs, index of the warpgroup).
        operands, results, scratch: by the names of the refs.
    """

    def body(*arrays):
        refs = make_refs(**dict(zip((*operands, *results, *scratch), arrays, strict=True)))
        wg = lax.axis_index("wg")

        @pl.when(wg == WARPGROUPS)
        def _():
            # A block's warpgroups share its registers: what the copies do not need goes to the accumulators.
            plgpu.set_max_registers(static.config.memory_registers, action="decrease")
            stream(static, refs)

        @pl.when(wg < WARPGROUPS)
        def _():
            plgpu.set_max_registers(static.config.compute_registers, action="increase")
            compute(static, refs, wg)
            plgpu.wait_smem_to_gmem(0)  # results are written before the block ends

    run = plgpu.kernel(
        body,
        out_type=tuple(results.values()),
        grid=(static.walk.sms,),
        grid_names=("sm",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=tuple(scratch.values()),  # positional, because named scratch is allocated in alphabetical order
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return vary_like(run(*operands.values()), operands["q_g"])
