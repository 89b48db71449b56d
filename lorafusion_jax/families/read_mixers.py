"""Mamba-2 and short convolutions of a config.json."""

from __future__ import annotations

import math
from typing import Any, Literal

from lorafusion_jax.families.delta_net import DeltaNet
from lorafusion_jax.families.family import Family
from lorafusion_jax.families.hf_config import HFConfig, shortened
from lorafusion_jax.families.latent_attention import LatentAttention
from lorafusion_jax.families.mamba import Mamba
from lorafusion_jax.families.mlp import Activation
from lorafusion_jax.families.short_convolution import ShortConvolution
from lorafusion_jax.layout.layer import MAMBA

# The latent attention of a config.json.

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


# The gated delta net of a config.json.


def read_delta_net(hf: HFConfig, family: Family, activation: Activation, malformed: list[str]) -> DeltaNet | None:
    """The gated delta net of a model whose family has one."""
    if family.delta_net is None:
        return None
    heads = hf.num_attention_heads or 1
    key_heads, value_heads = hf.linear_num_key_heads or heads, hf.linear_num_value_heads or heads
    if value_heads % key_heads:
        malformed.append(f"linear_num_value_heads={value_heads} is not a multiple of linear_num_key_heads={key_heads}")
    key_dim = hf.linear_key_head_dim or max(int(0.75 * (hf.hidden_size or 1) / key_heads), 1)
    return DeltaNet(
        width=hf.hidden_size or 1,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=hf.linear_value_head_dim or 2 * key_dim,
        kernel=hf.linear_conv_kernel_dim or 1,
        activation=activation,
        doubled=bool(hf.linear_allow_neg_eigval),
        **family.delta_net,
    )


def read_mixer(
    hf: HFConfig, family: Family, activation: Activation, malformed: list[str], unsupported: list[str]
) -> Mamba | ShortConvolution | None:
    """What layers have in place of attention, in families with such layers."""
    width = hf.hidden_size or 1
    if family.mixer == "convolution":
        return ShortConvolution(width=width, kernel=hf.conv_L_cache or 1, bias=bool(hf.conv_bias))
    if family.mixer != "mamba":
        return None
    heads, groups, inner = hf.mamba_n_heads or 1, hf.mamba_n_groups or 1, (hf.mamba_expand or 1) * width
    inner = hf.mamba_d_ssm or inner
    size = inner // heads if hf.mamba_d_head in (None, "auto") else hf.mamba_d_head
    if "mamba_expand" not in family.meanings and isinstance(size, int):
        inner = heads * size
    if not isinstance(size, int) or size * heads != inner:
        malformed.append(
            f"mamba_d_head={shortened(hf.mamba_d_head)} and mamba_n_heads={heads} are not mamba_expand · hidden_size"
        )
    if heads % groups:
        malformed.append(f"mamba_n_heads={heads} is not a multiple of mamba_n_groups={groups}")
    least, most = _limits(hf, malformed)
    norm: Literal["gated", "before gate", "none"] = "before gate" if hf.mamba_norm_before_gate else "gated"
    factors, bias = tuple(hf.ssm_multipliers or ()), bool(hf.mamba_proj_bias)
    return Mamba(
        width=width,
        heads=heads,
        head_dim=size if isinstance(size, int) else 1,
        groups=groups,
        state=hf.mamba_d_state or 1,
        kernel=hf.mamba_d_conv or 1,
        activation=activation,
        bias=bias,
        out_bias=bias if hf.projectors_bias is None else hf.projectors_bias,
        conv_bias=hf.mamba_conv_bias is not False,
        least=least if hf.time_step_min is None else hf.time_step_min,
        most=most,
        in_factor=hf.ssm_in_multiplier or 1.0,
        factors=() if factors == (1.0,) * 5 else factors,
        out_factor=hf.ssm_out_multiplier or 1.0,
        adapted_out="out_proj" not in family.frozen,
        norm="none" if hf.mamba_rms_norm is False else norm,
        module=family.fields.get("attention_module", MAMBA),
    )


def _limits(hf: HFConfig, malformed: list[str]) -> tuple[float, float]:
    limits = [0.0, math.inf] if hf.time_step_limit is None else list(hf.time_step_limit)
    infinity = {"__float__": "Infinity"}  # as transformers writes it
    values = [math.inf if value in ("Infinity", infinity) else value for value in limits]
    if len(values) != 2 or not all(isinstance(value, int | float) and value >= 0 for value in values):
        malformed.append(f"time_step_limit={shortened(hf.time_step_limit)} is not a pair of numbers")
        return 0.0, math.inf
    return float(values[0]), float(values[1])
