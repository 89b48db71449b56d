"""One projection of every expert with the LoRA of many adapters, on rows sorted by (expert, adapter).

M sorted rows · K in · N out · E experts · A adapters · R padded rank
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Literal, NamedTuple

import jax
from jaxtyping import Array, Float

from pallas_kernels.checkpoint_names import named_s
from pallas_kernels.device import target_platform
from pallas_kernels.experts import xla
from pallas_kernels.experts.fp8 import Fp8Experts, Kernels
from pallas_kernels.experts.rows import ExpertRows

ExpertImplementation = Literal["xla", "pallas_triton"]


class Lora(NamedTuple):
    """The low-rank pairs of all adapters and experts, and each adapter's factor."""

    a: Float[Array, "A E K R"]
    b: Float[Array, "A E R N"]
    scale: Float[Array, " A"]


def expert_linear(
    x: Float[Array, "M K"],
    w: Float[Array, "EK N"] | Fp8Experts,
    rows: ExpertRows,
    lora: Lora | None = None,
    *,
    experts: int,
    implementation: ExpertImplementation | None = None,
) -> Float[Array, "M N"]:
    """Applies the projection of each row's expert plus the LoRA of the row's adapter for this expert.

    y[m] = x[m] W[e] + scale[p] · (x[m] A[p, e]) B[p, e],  e and p = expert and adapter of the row's tile

    W is frozen and gets no gradient. Sums of a gradient run over an adapter's tiles in order, without atomics, and
    nothing of one adapter is multiplied into another.

    Args:
        x: rows in the order of `sort_rows`; padding rows are zero.
        w: the kernels of all experts, one below the other, [E · K, N], or the same in 8-bit floats, which multiplies
            rounded rows (see `experts.fp8`).
        rows: where the rows come from.
        lora: None: the frozen projections alone.
        experts: E.
        implementation: None: Triton's kernels on an NVIDIA GPU where they serve the shapes, else "xla".

    Returns:
        y in the type of x; zero in tiles without rows.

    Raises:
        NotImplementedError: the named implementation cannot serve this call.

    Source: grouped products over sorted rows, Gale et al. 2022 (arXiv:2211.15841).
    """
    static = Static(_choose(x, w, experts, lora, implementation), experts)
    if lora is None:
        return _frozen(static, x, w, rows)
    return _with_lora(static, x, w, rows, lora.a, lora.b, lora.scale)


@dataclass(frozen=True, slots=True)
class Static:
    """What a call knows besides arrays: its backend, a module, and E."""

    backend: ModuleType
    experts: int


def _choose(x: Array, w: Kernels, experts: int, lora: Lora | None, implementation: str | None) -> ModuleType:
    if implementation == "xla" or (implementation is None and target_platform() not in ("gpu", "cuda")):
        return xla
    try:
        triton = importlib.import_module("pallas_kernels.experts.triton.backend")
        reason = triton.unsupported_reason(x, w, experts, 0 if lora is None else lora.a.shape[-1])
    except ImportError as missing:  # jax has announced the end of this lowering
        triton, reason = xla, str(missing)
    if reason is not None and implementation is not None:
        raise NotImplementedError(f"{implementation} cannot serve this call: {reason}")
    return xla if reason is not None else triton


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _frozen(static: Static, x: Array, w: Kernels, rows: ExpertRows) -> Array:
    return static.backend.product(x, w, rows, static.experts)


def _frozen_fwd(static: Static, x: Array, w: Kernels, rows: ExpertRows):
    return _frozen(static, x, w, rows), (w, rows)


def _frozen_bwd(static: Static, residuals, dy: Array):
    w, rows = residuals
    return static.backend.product(dy, w, rows, static.experts, transposed=True), None, None


_frozen.defvjp(_frozen_fwd, _frozen_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_lora(static: Static, x: Array, w: Kernels, rows: ExpertRows, a: Array, b: Array, scale: Array) -> Array:
    return _with_lora_fwd(static, x, w, rows, a, b, scale)[0]


def _with_lora_fwd(static: Static, x: Array, w: Kernels, rows: ExpertRows, a: Array, b: Array, scale: Array):
    y, s = static.backend.forward(x, w, rows, static.experts, a, b, scale)
    # Residuals hold the caller's own arrays, so a caller that stores residuals can recognise the frozen weights.
    return y, (x, w, rows, a, b, scale, named_s(s))


def _with_lora_bwd(static: Static, residuals, dy: Array):
    x, w, rows, a, b, scale, s = residuals
    dx, da, db = static.backend.backward(x, w, rows, static.experts, a, b, scale, s, dy)
    return dx, None, None, da.astype(a.dtype), db.astype(b.dtype), None


_with_lora.defvjp(_with_lora_fwd, _with_lora_bwd)
