"""Packed causal attention by cuDNN. Only this file uses JAX's private function, which changes between versions.

Dims: `T` packed tokens · `H` heads · `K` key heads · `C` head width · `M` segment slots · `B` = 1.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from lorafusion_jax.models.attention.rule import ScoreRule, checkpointed
from lorafusion_jax.models.segments import Segments
from pallas_kernels.device import is_hopper

_DTYPES = (jnp.bfloat16, jnp.float16)


def cudnn_forward(q_THC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, segments: Segments, rule: ScoreRule):
    """Returns softmax(scale · q kᵀ) v over the earlier rows of the same segment, and the residuals.

    Raises:
        NotImplementedError: cuDNN does not support dtype, head width or device.
    """
    if reason := unsupported_reason(q_THC):
        raise NotImplementedError(f"cuDNN packed attention {reason}")
    o_BTHC, pullback = jax.vjp(partial(_attention, segments, rule), q_THC[None], k_TKC[None], v_TKC[None])
    o_BTHC, pullback = checkpointed((o_BTHC, pullback))
    return o_BTHC[0], pullback


def cudnn_backward(pullback, do_THC: jax.Array, rule: ScoreRule):
    """Gradients of q, k and v."""
    del rule  # in the pullback
    return tuple(grad[0] for grad in pullback(do_THC[None]))


def _attention(
    segments: Segments, rule: ScoreRule, q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array
) -> jax.Array:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    offsets, lengths = jnp.asarray(segments.offsets)[None], jnp.asarray(segments.lengths)[None]
    # Arguments by keyword: jax 0.12 inserted `score_mod_args` among the positional ones.
    out = cudnn.dot_product_attention(
        query=q_BTHC,
        key=k_BTKC,
        value=v_BTKC,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=rule.scale,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        qkv_layout="BTNH",
    )
    return out[0] if isinstance(out, tuple | list) else out


def unsupported_reason(q_THC: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why cuDNN does not support these queries on any device; None if it does."""
    C = q_THC.shape[-1]
    if q_THC.dtype not in _DTYPES:
        return f"wants bfloat16 or float16, not {q_THC.dtype}"
    if C % 8 or C > 256:
        return f"wants a head width that is a multiple of 8 and at most 256, not {C}"
    return None


def on_hopper(*, or_later: bool = False) -> bool:
    """Whether the device of a program is an NVIDIA GPU of compute capability 9, or a later one."""
    if getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is not None:
        return is_hopper()  # an ahead-of-time lowering names its device, not its capability
    device = jax.devices()[0]
    if device.platform != "gpu":
        return False
    # ROCm devices report names such as "gfx942" here.
    major = str(getattr(device, "compute_capability", "0")).split(".")[0]
    return major.isdigit() and (int(major) == 9 or (or_later and int(major) > 9))
