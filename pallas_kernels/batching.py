"""What runs under `jax.vmap`: XLA's form and Pallas-Triton's kernels do; Hopper's kernels and automatic axes refuse."""

from __future__ import annotations

from typing import Any

import jax


@jax.custom_batching.custom_vmap
def refuse_vmap(arrays: Any) -> Any:
    """Returns the arrays; under `jax.vmap` it raises NotImplementedError, which says what to do instead."""
    return arrays


@refuse_vmap.def_vmap
def _vmap_rule(axis_size, in_batched, arrays):
    del axis_size, in_batched, arrays
    raise NotImplementedError(
        "Hopper's kernels, and kernels on a mesh with automatic axes, do not run under jax.vmap: leave the batch "
        "dimension to x, whose leading dimensions are batch dimensions already (several adapters belong into one "
        'multi_lora_linear call with a tile_adapter table), or pass implementation="xla"'
    )
