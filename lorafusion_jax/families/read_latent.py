"""The latent attention of a config.json."""

from __future__ import annotations

from typing import Any

from lorafusion_jax.families.hf_config import HFConfig
from lorafusion_jax.families.latent_attention import LatentAttention
from lorafusion_jax.families.table import Family

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def read_latent(
    hf: HFConfig, family: Family, bias: bool, malformed: list[str], unsupported: list[str]
) -> LatentAttention | None:
    """The attention of a model whose family has latents."""
    if not family.latent:
        return None
    malformed += [f"{key} is missing" for key in _SIZES if getattr(hf, key) is None]
    heads = hf.num_attention_heads or 1
    if (hf.num_key_value_heads or heads) != heads:
        unsupported.append(f"num_key_value_heads={hf.num_key_value_heads} and latent attention of {heads} heads")
    return LatentAttention(
        width=hf.hidden_size or 1,
        heads=heads,
        q_rank=hf.q_lora_rank,
        kv_rank=hf.kv_lora_rank or 1,
        plain_dim=hf.qk_nope_head_dim or 1,
        rotary_dim=hf.qk_rope_head_dim or 2,
        value_dim=hf.v_head_dim or 1,
        mscale=_mscale(hf.rope_parameters or hf.rope_scaling or {}),
        bias=bias,
        interleaved=bool(hf.rope_interleave) if "rope_interleave" in family.meanings else True,
    )


def _mscale(rope: dict[str, Any]) -> float:
    share = rope.get("mscale_all_dim")
    return float(share) if isinstance(share, int | float) else 0.0
