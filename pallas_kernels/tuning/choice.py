"""Which backend a call gets when it names none: a kernel only where it measured at least as fast as XLA.

Measured on one NVIDIA H200, forward and backward of whole ops (benchmarks/LOG.md, benchmarks/results/): the Hopper
backend wins every row from 2048 tokens on but those excluded below and two: 8192 x 14336 -> 4096 with one adapter of
rank 64 without dropout (0.988x, 1.064x when measured again) and one of 2048 x 5120 x 5120 (0.997x). The Triton backend
is the fastest nowhere by more than 6 %: its products reach 70 to 85 % of cuBLAS. H100 has the same multiprocessors and
less memory bandwidth, so the passes over x and dY cost more, for XLA as for the kernels: it is treated alike. A100 and
L40S have no Hopper instructions and nothing was measured on them: XLA serves, and `implementation="pallas_triton"` is
there to be tried.

T packed tokens · K in features · N out features
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.device import is_hopper, num_sms
from pallas_kernels.problem import Operands, Static
from pallas_kernels.split_graph import rank_layout

MIN_ROWS = 2048  # fewer rows leave multiprocessors idle in the passes over x and dY
MIN_FEATURES = 1024
MAX_RANK = 64  # of all projections of a call together: more leaves no shared memory for deep pipelines
# 2048 x 5120 x 5120 fills its last round of output tiles so badly (0.81) that cuBLAS wins by up to 5 % without dropout.
# With it, or with several adapters of rank 64, XLA's passes cost more than that: the kernels are 0.99 to 1.25 times as
# fast with dropout (20 rows, two below 1, four runs), 1.09 and 1.18 times with four and 16 such adapters without it.
MIN_WAVE, MIN_WAVE_OF_DEAR_PASSES = 0.85, 0.8
DEAR_RANK = 64


def preferred(static: Static, ops: Operands) -> tuple[str, ...]:
    """Names of backends, fastest first; the last one serves every call."""
    hopper = ("pallas_mosaic_gpu", "xla")
    if not ops.with_lora or not is_hopper():
        return ("xla",)
    rows, num_in = ops.x.shape
    widest = max(ops.ws[i].shape[1] for i in ops.with_lora)
    if ops.x.dtype not in (jnp.bfloat16, jnp.float16) or rows < MIN_ROWS or min(num_in, widest) < MIN_FEATURES:
        return ("xla",)
    rank = rank_layout(ops).total
    if rank > MAX_RANK:
        return ("xla",)
    dear = ops.dropout is not None or (static.num_adapters > 1 and rank >= DEAR_RANK)
    if min(_wave(rows, widest), _wave(rows, num_in)) < (MIN_WAVE_OF_DEAR_PASSES if dear else MIN_WAVE):
        return ("xla",)
    return hopper


def better_apart(static: Static, ops: Operands) -> bool:
    """True for siblings whose ranks together are too large for one call of the kernels, but not one by one."""
    if len(ops.with_lora) < 2 or preferred(static, ops)[0] != "xla":
        return False
    return any(preferred(static, only(ops, i))[0] != "xla" for i in ops.with_lora)


def only(ops: Operands, i: int) -> Operands:
    """The call with a single one of its projections."""
    lists = {name: (getattr(ops, name)[i],) for name in ("ws", "as_", "bs", "biases")}
    return dataclasses.replace(ops, **lists)


def _wave(rows: int, columns: int) -> float:
    """Share of the multiprocessors' time that 128 x 256 output tiles keep busy."""
    rounds = -(-rows // 128) * -(-columns // 256) / num_sms()
    return rounds / math.ceil(rounds)
