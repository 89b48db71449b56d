"""Costs from a device's rates, where nobody has measured."""

from __future__ import annotations

from typing import NamedTuple

from scheduling.cost_model import CostModel, PassCost, StageCost
from scheduling.cost_parts import CostParts
from scheduling.errors import PlanError


class _Rates(NamedTuple):
    gemm_flops: float  # sustained by large bf16 matrix products
    attention_flops: float
    link_bytes: float  # between stages, per second
    fixed_tokens: float  # a pass costs as much as if it had that many more tokens


# H200: 8192 tokens of an 8B model, frozen, in 374 ms = 700 TFLOP/s; packed attention at 600 (FLOPs counted causal);
# device_put over NVLink 112 GB/s; a GEMM of 4096 rows takes 1/1.95 of one of 8192. H100: same chip, 5 % lower clocks
# under load. CPU: order of magnitude of two cores in float32.
_RATES = {
    "h200": _Rates(700e12, 600e12, 112e9, 200),
    "h100": _Rates(665e12, 570e12, 112e9, 200),
    "cpu": _Rates(60e9, 20e9, 5e9, 20),
}
_LORA = 1.09  # one H200, whole layer: forward + backward with LoRA over frozen


def default_cost_model(
    device: str = "h200",
    *,
    num_stages: int = 1,
    parameters: float = 8.0e9,
    num_layers: int = 32,
    hidden_size: int = 4096,
) -> CostModel:
    """Predicts from the device's rates: forward and backward take 2·P FLOPs a token each (a frozen base has no dW).

    Raises:
        PlanError: an unknown device; the message lists the known ones.

    >>> round(8192 / sum(default_cost_model("h200").stages[0].forward.seconds(8192, 0) * 2 for _ in range(1)), -3)
    20000.0
    """
    rates = _rates(device)
    token_s = _LORA * 2 * parameters / num_stages / rates.gemm_flops
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
    loss_share: float = 1.0,
) -> CostParts:
    """Predicts a layer and the head from the device's rates.

    layer: 2 · P FLOPs a token in each pass, attention beside it;  head: 4 · D · V in forward, which makes the gradient
    of the loss while the logits are there, and nothing in backward;  embedding: nothing.

    Args:
        layer_parameters: of one layer's linears.
        table_parameters: D · V.
        attention_width: heads · width of a head (None: hidden_size).
        loss_share: rows that have a target; the others skip the head.

    Raises:
        PlanError: an unknown device; the message lists the known ones.

    >>> parts = default_cost_parts("h200", layer_parameters=218e6, table_parameters=525e6, hidden_size=4096)
    >>> round(1e3 * parts.layer.forward.seconds(8192, 13 * 630**2), 1)  # ms
    5.8
    """
    rates = _rates(device)
    token_s = _LORA * 2 * layer_parameters / rates.gemm_flops
    square_s = 2 * (attention_width or hidden_size) / rates.attention_flops
    forward = PassCost(fixed_s=rates.fixed_tokens * token_s, token_s=token_s, square_s=square_s)
    backward = PassCost(fixed_s=rates.fixed_tokens * token_s, token_s=token_s, square_s=2.5 * square_s)
    head = PassCost(token_s=4 * table_parameters * loss_share / rates.gemm_flops)
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
