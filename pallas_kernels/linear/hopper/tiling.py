"""How tiles lie in shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

SMEM_BYTES = 232448 - 2048  # what a block may ask for on Hopper, less barriers
ROWS = 64  # rows of a tile of the passes over x and dY: one warpgroup


def transforms(columns: int, dtype: Any) -> tuple[Any, ...]:
    """Tiling and the widest swizzle for rows of that many elements: what TMA writes and the tensor cores read."""
    item = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * item * 8)
    return (plgpu.TilingTransform((8, swizzle // item)), plgpu.SwizzleTransform(swizzle))


def store_fragment(ref: Any, value: Any) -> None:
    """Writes registers to device memory as they lie: 32-byte pieces of a row, no exchange between threads."""
    if hasattr(plgpu, "store"):  # jax 0.12: insists on 128-byte lines unless told otherwise
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def block_of_chunk(blocks_gmem: Any, chunk: Any, size: int, step: Any) -> Any:
    """Row block of a step over a chunk of at most `size` blocks; a step after the last one gets the last block."""
    return blocks_gmem[chunk * size + lax.min(step, jnp.int32(size - 1))]


class StagedConfig(Protocol):
    """Tiles of a kernel that streams its operands through `stages` slots in shared memory."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def stages(self) -> int: ...

    def smem_bytes(self, rank: int) -> int: ...


def fit[C: StagedConfig](config: C, rank: int) -> C:
    """Removes pipeline stages until a block fits into shared memory, but for the last one."""
    while config.stages > 1 and config.smem_bytes(rank) > SMEM_BYTES:
        config = dataclasses.replace(config, stages=config.stages - 1)
    return config
