"""Mamba-2 and short convolutions of a config.json."""

from __future__ import annotations

import math

from lorafusion_jax.families.hf_config import HFConfig, shortened
from lorafusion_jax.families.mamba import Mamba
from lorafusion_jax.families.mlp import Activation
from lorafusion_jax.families.short_convolution import ShortConvolution
from lorafusion_jax.families.table import Family


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
    size = inner // heads if hf.mamba_d_head in (None, "auto") else hf.mamba_d_head
    if not isinstance(size, int) or size * heads != inner:
        malformed.append(
            f"mamba_d_head={shortened(hf.mamba_d_head)} and mamba_n_heads={heads} are not mamba_expand · hidden_size"
        )
    if heads % groups:
        malformed.append(f"mamba_n_heads={heads} is not a multiple of mamba_n_groups={groups}")
    least, most = _limits(hf, malformed)
    return Mamba(
        width=width,
        heads=heads,
        head_dim=size if isinstance(size, int) else 1,
        groups=groups,
        state=hf.mamba_d_state or 1,
        kernel=hf.mamba_d_conv or 1,
        activation=activation,
        bias=bool(hf.mamba_proj_bias),
        conv_bias=hf.mamba_conv_bias is not False,
        least=least,
        most=most,
    )


def _limits(hf: HFConfig, malformed: list[str]) -> tuple[float, float]:
    limits = [0.0, math.inf] if hf.time_step_limit is None else list(hf.time_step_limit)
    named = {"__float__": "Infinity"}  # as transformers writes it
    values = [math.inf if value in ("Infinity", named) else value for value in limits]
    if len(values) != 2 or not all(isinstance(value, int | float) and value >= 0 for value in values):
        malformed.append(f"time_step_limit={shortened(hf.time_step_limit)} is not a pair of numbers")
        return 0.0, math.inf
    return float(values[0]), float(values[1])
