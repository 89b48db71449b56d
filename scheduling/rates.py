"""Default costs from a device's rates, for use without measurements."""

from __future__ import annotations

from typing import NamedTuple

from scheduling.cost_model import CostModel, PassCost, StageCost
from scheduling.cost_parts import CostParts
from scheduling.errors import PlanError


class _Rates(NamedTuple):
    gemm_flops: float  # sustained by large bf16 matrix products
    width_s: float  # everything but matrix products, forward plus backward: per token and column of a layer's width
    attention_flops: float
    link_bytes: float  # between stages, per second
    fixed_tokens: float  # fixed cost of a pass, in tokens


def _from_sheet(peak_flops: float, memory_bytes: float, link_bytes: float) -> _Rates:
    """Rates of a device that was never measured: an H200's, scaled by the figures of both data sheets."""
    share, slower = peak_flops / 989e12, 4.8e12 / memory_bytes
    return _Rates(716e12 * share, 18e-12 * slower, 600e12 * share, link_bytes, 200)


# H200: fitted to whole training runs. The GEMM rate is that of the head. The width rate covers LoRA's passes, norms,
# gate and lower clocks of an 8B layer at 8192 tokens. Attention counts causal FLOPs. The link rate is device_put over
# NVLink. H100: the same chip, so the same products; the width rate is fitted to a run of five jobs
# (`benchmarks/results/online_real_h100_2026-11-24`). CPU: order of magnitude of two cores in float32. Others: never
# measured; from data sheets, with dense bfloat16 products, memory bandwidth, and what a link between two devices
# carries in one direction.
_RATES = {
    "a100-40gb": _from_sheet(312e12, 1.555e12, 75e9),
    "a100": _from_sheet(312e12, 2.04e12, 75e9),
    "l40s": _from_sheet(362e12, 0.864e12, 25e9),
    "a6000": _from_sheet(155e12, 0.768e12, 25e9),
    "rtx6000-ada": _from_sheet(364e12, 0.96e12, 25e9),
    "h200": _Rates(716e12, 18e-12, 600e12, 112e9, 200),
    "h100": _Rates(716e12, 22e-12, 600e12, 112e9, 200),
    "cpu": _Rates(55e9, 0.0, 20e9, 5e9, 20),
}
MLP_OVER_MODEL_WIDTH = 3.5  # as in Llama 3


def default_cost_model(
    device: str = "h200",
    *,
    num_stages: int = 1,
    parameters: float = 8.0e9,
    num_layers: int = 32,
    hidden_size: int = 4096,
) -> CostModel:
    """Predicts stage costs from the device's rates.

    Forward and backward take 2·P FLOPs per token each, because a frozen base has no dW.

    Raises:
        PlanError: unknown device; the message lists the known ones.

        >>> costs = default_cost_model("h200").stages[0]
    >>> round(8192 / (costs.forward.seconds(8192, 13 * 630**2) + costs.backward.seconds(8192, 13 * 630**2)), -3)
    17000.0
    """
    rates = _rates(device)
    width = num_layers * hidden_size * (1 + MLP_OVER_MODEL_WIDTH)
    token_s = (2 * parameters / rates.gemm_flops + width * rates.width_s / 2) / num_stages
    square_s = 2 * hidden_size * num_layers / num_stages / rates.attention_flops  # Q K^T and P V, causal half
    forward = PassCost(fixed_s=rates.fixed_tokens * token_s, token_s=token_s, square_s=square_s)
    backward = PassCost(fixed_s=rates.fixed_tokens * token_s, token_s=token_s, square_s=2.5 * square_s)
    return CostModel(
        stages=(StageCost(forward=forward, backward=backward, update_s=2 * rates.fixed_tokens * token_s / 10),),
        transfer_s=2e-5,
        transfer_token_s=2 * hidden_size / rates.link_bytes,
        source=f"default rates of {device}, {parameters / 1e9:g}B parameters in {num_stages} stages (not measured)",
    )


def default_cost_parts(
    device: str = "h200",
    *,
    layer_parameters: float,
    table_parameters: float,
    hidden_size: int,
    attention_width: int | None = None,
    mlp_width: int | None = None,
) -> CostParts:
    """Predicts the costs of a layer and of the head from the device's rates.

    layer: 2 · P FLOPs per token in each pass, plus attention and elementwise passes over D + F columns.
    head: 4 · D · V FLOPs in forward, which also computes the gradient from the logits; nothing in backward.
    embedding: nothing.

    Args:
        layer_parameters: parameters of one layer's linears.
        table_parameters: D · V.
        attention_width: heads · head width (None: hidden_size).
        mlp_width: F (None: 3.5 · hidden_size).

    Raises:
        PlanError: unknown device; the message lists the known ones.

    >>> parts = default_cost_parts("h200", layer_parameters=218e6, table_parameters=525e6, hidden_size=4096)
    >>> round(1e3 * parts.layer.forward.seconds(8192, 13 * 630**2), 1)  # ms
    6.6
    """
    rates = _rates(device)
    width = hidden_size + (mlp_width or MLP_OVER_MODEL_WIDTH * hidden_size)
    token_s = 2 * layer_parameters / rates.gemm_flops + width * rates.width_s / 2
    square_s = 2 * (hidden_size if attention_width is None else attention_width) / rates.attention_flops
    forward = PassCost(fixed_s=rates.fixed_tokens * token_s, token_s=token_s, square_s=square_s)
    backward = PassCost(fixed_s=rates.fixed_tokens * token_s, token_s=token_s, square_s=2.5 * square_s)
    head = PassCost(token_s=4 * table_parameters / rates.gemm_flops)
    return CostParts(
        layer=StageCost(forward=forward, backward=backward, update_s=rates.fixed_tokens * token_s / 5),
        head=StageCost(forward=head, backward=PassCost()),
        transfer_s=2e-5,
        transfer_token_s=2 * hidden_size / rates.link_bytes,
        source=f"default rates of {device} (not measured)",
    )


def _rates(device: str) -> _Rates:
    if device not in _RATES:
        raise PlanError(
            "plan.device", f"no default costs for {device!r}", fix=f"one of {', '.join(_RATES)}, or measure"
        )
    return _RATES[device]
