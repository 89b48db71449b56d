"""Packed causal attention by cuDNN: the only file that touches jax's private function, which moves between versions.

Dims: `T` packed tokens · `H` heads · `K` key heads · `C` head width · `M` segment slots.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .segments import Segments

_DTYPES = (jnp.bfloat16, jnp.float16)


def cudnn_attention(q_THC: jax.Array, k_TKC: jax.Array, v_TKC: jax.Array, segments: Segments) -> jax.Array:
    """softmax(q kᵀ / √C) v over the earlier rows of the same segment, by offsets and lengths.

    Raises:
        NotImplementedError: dtype, head width or device is out of its reach.
    """
    if reason := why_not(q_THC):
        raise NotImplementedError(f"cuDNN packed attention {reason}")
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    offsets, lengths = jnp.asarray(segments.offsets)[None], jnp.asarray(segments.lengths)[None]
    # By keyword only: jax 0.12 inserted `score_mod_args` among the positional ones.
    out = cudnn.dot_product_attention(
        query=q_THC[None],
        key=k_TKC[None],
        value=v_TKC[None],
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=q_THC.shape[-1] ** -0.5,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        qkv_layout="BTNH",
    )
    return (out[0] if isinstance(out, tuple | list) else out)[0]


def why_not(q_THC: jax.Array) -> str:
    """Why cuDNN cannot serve these queries, whatever the device; empty if it can."""
    C = q_THC.shape[-1]
    if q_THC.dtype not in _DTYPES:
        return f"wants bfloat16 or float16, not {q_THC.dtype}"
    if C % 8 or C > 256:
        return f"wants a head width that is a multiple of 8 and at most 256, not {C}"
    return ""


def on_hopper_or_later() -> bool:
    """Whether the default device is an NVIDIA GPU of compute capability 9.0 or more."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return False
    # ROCm devices report names such as "gfx942" here.
    major = str(getattr(device, "compute_capability", "0")).split(".")[0]
    return major.isdigit() and int(major) >= 9
