"""Which backend a call gets when it names none: a kernel only where it measured at least as fast as XLA.

Measured on one NVIDIA H200, forward and backward of whole ops (see benchmarks/LOG.md): the Hopper backend wins every
row from 2048 tokens on; the Triton backend loses on that card, because its products reach 80 % of cuBLAS.

T packed tokens · K in features · N out features
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.device import is_hopper
from pallas_kernels.problem import Operands, Static

MIN_ROWS = 2048  # fewer rows leave multiprocessors of the memory-bound passes idle
MIN_FEATURES = 1024


def preferred(static: Static, ops: Operands) -> tuple[str, ...]:
    """Names of backends, fastest first; the last one serves every call."""
    if not ops.with_lora or _inside_shard_map(ops.x) or not is_hopper():
        return ("xla",)
    widest = max(ops.ws[i].shape[1] for i in ops.with_lora)
    large = ops.x.shape[0] >= MIN_ROWS and min(ops.x.shape[1], widest) >= MIN_FEATURES
    if large and ops.x.dtype in (jnp.bfloat16, jnp.float16):
        return ("pallas_mosaic_gpu", "xla")
    return ("xla",)


def _inside_shard_map(x: jax.Array) -> bool:
    """Kernels do not tell shard_map over which mesh axes their results vary, so XLA serves there."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    return bool(getattr(aval, "vma", ()) if manual is None else manual.varying)
