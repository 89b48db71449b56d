"""The gated delta net of a config.json."""

from __future__ import annotations

from lorafusion_jax.families.delta_net import DeltaNet
from lorafusion_jax.families.hf_config import HFConfig
from lorafusion_jax.families.mlp import Activation
from lorafusion_jax.families.table import Family


def read_delta_net(hf: HFConfig, family: Family, activation: Activation, malformed: list[str]) -> DeltaNet | None:
    """The gated delta net of a model whose family has one."""
    if family.delta_net is None:
        return None
    key_heads, value_heads = hf.linear_num_key_heads or 1, hf.linear_num_value_heads or 1
    if value_heads % key_heads:
        malformed.append(f"linear_num_value_heads={value_heads} is not a multiple of linear_num_key_heads={key_heads}")
    return DeltaNet(
        width=hf.hidden_size or 1,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=hf.linear_key_head_dim or 1,
        value_dim=hf.linear_value_head_dim or 1,
        kernel=hf.linear_conv_kernel_dim or 1,
        activation=activation,
        **family.delta_net,
    )
