"""Work of a layer's parts, in weights that a row is multiplied by: 2 FLOPs each in forward, and again in backward.

Some parts take longer than their FLOPs at the rate of a device's large products. They count as more weights, as
measured on one H200 (`benchmarks/results/experts_h200_2026-11-24/` and `delta_net_h200_2026-11-27/`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from lorafusion_jax.families.attention import Attention
from lorafusion_jax.families.delta_net import DeltaNet
from lorafusion_jax.families.latent_attention import LatentAttention
from lorafusion_jax.families.layer import Layer
from lorafusion_jax.families.mamba import Mamba
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.layer import Half
from lorafusion_jax.weights.table import StoredKind

EXPERTS = 2.0  # products of experts: rows are sorted and padded, and tiles are small
# The gated delta rule: float32, and one step per chunk, forward and backward on average; by kernels and in XLA's form.
RULE, XLA_RULE = 46.0, 108.0


def row_weights(
    layer: Layer, half: Half | None = None, *, hopper: bool = True, kind: StoredKind | None = None
) -> float:
    """Weights of a layer or half that a row passes through.

    Args:
        hopper: whether the devices are Hopper GPUs, which have kernels for the gated delta rule.
        kind: how projections are stored, if their products then take another time; None: as for plain ones.
    """
    products = 0.0
    for linear in layer.linears_of(half):
        speed = 1.0 if kind is None else kind.of(linear.experts).product_speed
        products += prod(linear.row_shape) * (EXPERTS if linear.experts else 1) / speed
    return products + (_rule(layer.second or layer.attention, hopper) if half != "mlp" else 0)


def attention_elements(layer: Layer, sample_tokens: float) -> float:
    """Products per row of scores and of their values, whose time grows with a sample: reach · H · C."""
    mixer = layer.attention
    return mixer.reach(sample_tokens) * mixer.queries if isinstance(mixer, Attention | LatentAttention) else 0.0


def mean_over_layers(model: ModelConfig, value: Callable[[Layer], float]) -> float:
    """The mean of a value over the layers of a model."""
    by_kind = [value(layer) for layer in model.kinds]
    return sum(by_kind[model.kind_of(number)] for number in range(model.num_layers)) / model.num_layers


def _rule(mixer: object, hopper: bool) -> float:
    rule = RULE if hopper else XLA_RULE
    if isinstance(mixer, Mamba):  # whose space is computed by XLA everywhere
        return XLA_RULE * mixer.reach(1) * mixer.queries
    return rule * mixer.reach(1) * mixer.queries if isinstance(mixer, DeltaNet) else 0.0
