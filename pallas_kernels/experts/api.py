"""One projection of every expert with the LoRA of many adapters, on rows sorted by (expert, adapter).

M sorted rows · K in · N out · E experts · A adapters · R padded rank
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
from jaxtyping import Array, Float

from pallas_kernels.checkpoint_names import named_s
from pallas_kernels.experts import xla
from pallas_kernels.experts.rows import ExpertRows

ExpertImplementation = Literal["xla", "pallas_triton"]


class Lora(NamedTuple):
    """The low-rank pairs of all adapters and experts, and each adapter's factor."""

    a: Float[Array, "A E K R"]
    b: Float[Array, "A E R N"]
    scale: Float[Array, " A"]


def expert_linear(
    x: Float[Array, "M K"],
    w: Float[Array, "EK N"],
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
        w: the kernels of all experts, one below the other, [E · K, N].
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
    static = Static(_choose(rows, implementation), experts)
    tiles = (rows.tile_expert, rows.tile_adapter)
    if lora is None:
        return _frozen(static, x, w, tiles)
    return _with_lora(static, x, w, tiles, lora.a, lora.b, lora.scale)


@dataclass(frozen=True, slots=True)
class Static:
    """What a call knows besides arrays: its backend and E."""

    backend: str
    experts: int


def _choose(rows: ExpertRows, implementation: str | None) -> str:
    del rows
    if implementation in (None, "xla"):
        return "xla"
    raise NotImplementedError(f"{implementation} has no products of experts")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _frozen(static: Static, x: Array, w: Array, tiles: xla.Tiles) -> Array:
    return xla.product(x, xla.kernels(w, static.experts), tiles[0])


def _frozen_fwd(static: Static, x: Array, w: Array, tiles: xla.Tiles):
    return _frozen(static, x, w, tiles), (w, tiles)


def _frozen_bwd(static: Static, residuals, dy: Array):
    w, tiles = residuals
    return xla.product(dy, xla.kernels(w, static.experts), tiles[0], transposed=True), None, None


_frozen.defvjp(_frozen_fwd, _frozen_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_lora(static: Static, x: Array, w: Array, tiles: xla.Tiles, a: Array, b: Array, scale: Array) -> Array:
    return _with_lora_fwd(static, x, w, tiles, a, b, scale)[0]


def _with_lora_fwd(static: Static, x: Array, w: Array, tiles: xla.Tiles, a: Array, b: Array, scale: Array):
    y, s = xla.forward(x, xla.kernels(w, static.experts), tiles, a, b, scale)
    # Residuals hold the caller's own arrays, so a caller that stores residuals can recognise the frozen weights.
    return y, (x, w, tiles, a, b, scale, named_s(s))


def _with_lora_bwd(static: Static, residuals, dy: Array):
    x, w, tiles, a, b, scale, s = residuals
    dx, da, db = xla.backward(x, xla.kernels(w, static.experts), tiles, a, b, scale, s, dy)
    return dx, None, None, da.astype(a.dtype), db.astype(b.dtype), None


_with_lora.defvjp(_with_lora_fwd, _with_lora_bwd)
