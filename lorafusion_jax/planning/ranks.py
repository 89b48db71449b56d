"""What ranks above 16 add to the predicted time of a layer on Hopper GPUs. Default rates are those of rank 16.

The fused kernels serve up to 64 ranks of a call; of larger ones they take the first 16, and passes of their own visit
the rows of adapters that have more, in blocks of 64 ranks (`pallas_kernels.linear.extra_ranks`). If all adapters have
the same large rank, the passes take all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lorafusion_jax.adapters.spec import AdapterSpec, bank_columns, common_rank
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.layer import Linear
from pallas_kernels.policy import MAX_RANK, MIN_RANK, extra_blocks, padded_rank

FORWARD_SHARE = 1 / 3  # down and up; backward has dS, dA, dB and dx


class RankRates(NamedTuple):
    """Seconds per feature, in plus out, of a projection and its gradients.

    Args:
        rank: per token and rank from 16 to 64, inside the fused kernels.
        token: per token where some adapters have extra ranks, beside the fused kernels.
        row: per row of an adapter that has some.
        block: per such row and block of its ranks.
    """

    rank: float
    token: float
    row: float
    block: float


# Fitted to H200 runs of Qwen3-8B's shape, 8192 tokens, four adapters (`benchmarks/results/ranks_h200_2026-11-24`).
# An H100 is the same chip.
_HOPPER = RankRates(rank=3.4e-14, token=1.85e-12, row=1.73e-12, block=1.23e-12)
RATES: Mapping[str, RankRates] = {"h200": _HOPPER, "h100": _HOPPER}


def seconds_per_token(
    adapters: Sequence[AdapterSpec], model: ModelConfig, rates: RankRates, tokens: Mapping[str, int] | None = None
) -> float:
    """Returns what the ranks of a job add to a layer's forward and backward, per token of a microbatch.

    Args:
        tokens: of each adapter's samples, for its share of the rows (None: equal shares).
    """
    weights = {spec.name: 1 if tokens is None else tokens[spec.name] for spec in adapters}
    shares = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    of_kind = [sum(_site_s(adapters, shares, site, rates) for site in layer.sites.values()) for layer in model.kinds]
    return sum(of_kind[model.kind_of(number)] for number in range(model.num_layers)) / model.num_layers


def _site_s(
    adapters: Sequence[AdapterSpec],
    shares: Mapping[str, float],
    linears: Sequence[Linear],
    rates: RankRates,
) -> float:
    """The same of the projections that share an input, which are one call."""
    ranks = {linear: bank_columns(adapters, linear.name) for linear in linears}
    features = {linear: max(linear.active, 1) * sum(linear.shape) for linear in linears}
    if padded_rank(max(ranks.values())) <= MAX_RANK:
        return sum(rates.rank * max(0, ranks[linear] - MIN_RANK) * features[linear] for linear in linears)
    mixed = common_rank([spec.columns for spec in adapters]) is None
    first, token = (MIN_RANK, rates.token) if mixed else (0, 0.0)
    seconds = 0.0
    for linear in linears:
        blocks = {spec.name: extra_blocks((spec.columns,), first) for spec in adapters if linear.name in spec.targets}
        if any(blocks.values()):
            rows = sum(shares[name] * (rates.row + rates.block * count) for name, count in blocks.items() if count)
            seconds += features[linear] * (token + rows)
    return seconds
