"""Packed causal attention for NVIDIA GPUs from sm_80 on, as two pure functions.

Finite inputs of one document never reach another one. NaN and infinity must be cut out first: 0 · NaN is NaN.

The kernels are imported when they run, because JAX has announced the end of Pallas's Triton lowering.

T packed rows · H query heads · K key heads, H a multiple · C head width
"""

from __future__ import annotations

from importlib.util import find_spec

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import policy
from pallas_kernels.attention.api import Saved
from pallas_kernels.attention.triton.config import AttentionConfig, attention_config
from pallas_kernels.device import interprets, target_platform, wide_integers


def triton_attention_forward(
    q_THC: Float[Array, "T H C"],
    k_TKC: Float[Array, "T K C"],
    v_TKC: Float[Array, "T K C"],
    first_T: Int[Array, " T"],
    end_T: Int[Array, " T"],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    config: AttentionConfig | None = None,
) -> tuple[Float[Array, "T H C"], Saved]:
    """Returns o[t] = Σ_s softmax_s(cap(scale · q[t]·k[s])) v[s] over first[t] ≤ s ≤ t, and the residuals.

    Args:
        q_THC, k_TKC, v_TKC: finite.
        first_T, end_T: int32, first row and end of each row's document, see `document_rows`.
        scale: None: 1 / √C.
        soft_cap: cap(z) = soft_cap · tanh(z / soft_cap) (None: z).
    Raises:
        NotImplementedError: see `triton_unsupported_reason`.
    """
    if reason := triton_unsupported_reason(q_THC, k_TKC):
        raise NotImplementedError(f"packed attention by Triton {reason}")
    from pallas_kernels.attention.triton.kernels import forward

    config = config or attention_config(q_THC.shape[2], q_THC.dtype.itemsize)
    options = {"scale": _scale(q_THC, scale), "soft_cap": soft_cap, "config": config, "interpret": interprets()}
    o, lse2 = forward(q_THC, k_TKC, v_TKC, first_T, **options)
    return o, Saved(q_THC, k_TKC, v_TKC, o, lse2, first_T, end_T)


def triton_attention_backward(
    saved: Saved,
    do_THC: Float[Array, "T H C"],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    config: AttentionConfig | None = None,
) -> tuple[Float[Array, "T H C"], Float[Array, "T K C"], Float[Array, "T K C"]]:
    """Returns the gradients of q, k and v. Sums have a fixed order."""
    from pallas_kernels.attention.triton.kernels import dkv, dq

    q, k, v, o, lse2, first_T, end_T = saved
    config = config or attention_config(q.shape[2], q.dtype.itemsize)
    options = {"scale": _scale(q, scale), "soft_cap": soft_cap, "config": config, "interpret": interprets()}
    grad_q, delta_HT = dq(q, k, v, o, do_THC, lse2, first_T, **options)
    return grad_q, *dkv(q, k, v, do_THC, lse2, delta_HT, first_T, end_T, **options)


def _scale(q_THC: jax.Array, scale: float | None) -> float:
    return q_THC.shape[-1] ** -0.5 if scale is None else scale


def triton_unsupported_reason(
    q_THC: jax.Array | jax.ShapeDtypeStruct, k_TKC: jax.Array | jax.ShapeDtypeStruct
) -> str | None:
    """Why the kernels do not serve these arrays on this device; None if they do."""
    T, H, C = q_THC.shape
    if find_spec("jax.experimental.pallas.triton") is None:
        return "cannot be imported: this jax has no Triton lowering"
    if target_platform() not in ("gpu", "cuda", "cpu"):
        return f"needs an NVIDIA GPU, not {target_platform()!r}"
    if wide_integers():
        return "counts in 32 bits: turn jax_enable_x64 off"
    sizes = {"rows": T, "heads": H, "key_heads": k_TKC.shape[1], "width": C, "dtype": str(q_THC.dtype)}
    return policy.triton_attention_unsupported_reason(**sizes)
