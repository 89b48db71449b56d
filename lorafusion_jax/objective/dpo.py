"""Direct preference optimisation: chosen answers gain on rejected ones, against a reference. Never imports jax.

π, ρ: log-likelihood of an answer under the adapter and under the reference, Σ over its tokens; |y| its tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator

from lorafusion_jax.objective.fields import PREFERENCE_DEFAULTS, NotNegative, Positive, Smoothing, as_tuple
from lorafusion_jax.objective.pairs import COLUMNS, OPTIONAL, STAND_INS, TYPES, chosen_and_rejected
from lorafusion_jax.objective.protocol import REFERENCE, Objective, Sample

type Loss = Literal["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "bco_pair", "apo_zero", "apo_down", "sft"]
METRICS = {
    "rewards/chosen": "nats",
    "rewards/rejected": "nats",
    "rewards/margins": "nats",
    "rewards/accuracies": "share of pairs",
    "logps/chosen": "nats",
    "logps/rejected": "nats",
}


@dataclass(frozen=True, kw_only=True)
class DPOOptions:
    """Settings of `dpo`.

    Attributes:
        beta: how far the adapter may move from the reference: larger stays closer.
        loss: one of the losses of `TERMS`, or a list, whose terms are added.
        loss_weights: weight of each loss of the list (None: 1).
        label_smoothing: share of pairs whose answers are thought to be swapped; of sigmoid and robust.
        sft: weight of the chosen answers' negative log-likelihood, a mean over the tokens of the global batch.
    """

    beta: Positive = 0.1
    loss: Annotated[tuple[Loss, ...], BeforeValidator(as_tuple)] = ("sigmoid",)
    loss_weights: tuple[NotNegative, ...] | None = None
    label_smoothing: Smoothing = 0.0
    sft: NotNegative = 0.0

    def __post_init__(self) -> None:
        if not self.loss:
            raise ValueError("settings with at least one loss")
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss):
            raise ValueError(f"settings with a number in loss_weights for each of {len(self.loss)} losses")
        if "robust" in self.loss and not self.label_smoothing:
            raise ValueError("settings with label_smoothing above 0, which the loss robust needs")
        if self.label_smoothing and not {"sigmoid", "robust"} & set(self.loss):
            raise ValueError("settings without label_smoothing, which only the losses sigmoid and robust use")

    @property
    def weights(self) -> tuple[float, ...]:
        return self.loss_weights or (1.0,) * len(self.loss)


class Gains(NamedTuple):
    """What the losses compare: π - ρ.

    Attributes:
        chosen, rejected: of the answers.
        delta: chosen - rejected.
        by_token: the same of (π - ρ) / |y|.
        nll: -π of the chosen answer, as a term of the mean over all chosen tokens.
    """

    chosen: Any
    rejected: Any
    delta: Any
    by_token: Any
    nll: Any


def preference_loss(sample: Sample, options: DPOOptions) -> tuple[Any, dict[str, Any]]:
    """Returns the sum of the losses, each times its weight, and TRL's metrics."""
    chosen, rejected = sample.reference_nll - sample.nll
    by_token = (sample.reference_nll - sample.nll) / sample.tokens
    gains = Gains(
        chosen, rejected, chosen - rejected, by_token[0] - by_token[1], sample.nll[0] * sample.token_weight[0]
    )
    terms = [weight * TERMS[name](gains, options) for name, weight in zip(options.loss, options.weights, strict=True)]
    if options.sft:
        terms.append(options.sft * gains.nll)
    return sum(terms), {
        "rewards/chosen": options.beta * chosen,
        "rewards/rejected": options.beta * rejected,
        "rewards/margins": options.beta * gains.delta,
        "rewards/accuracies": chosen > rejected,
        "logps/chosen": -sample.nll[0],
        "logps/rejected": -sample.nll[1],
    }


def _sigmoid(gains: Gains, options: DPOOptions) -> Any:
    """-(1 - ε) log σ(β Δ) - ε log σ(-β Δ)"""
    keep, swap = _log_sigmoids(options.beta * gains.delta)
    return -(1 - options.label_smoothing) * keep - options.label_smoothing * swap


def _robust(gains: Gains, options: DPOOptions) -> Any:
    """(-(1 - ε) log σ(β Δ) + ε log σ(-β Δ)) / (1 - 2 ε)"""
    keep, swap = _log_sigmoids(options.beta * gains.delta)
    smoothing = options.label_smoothing
    return (-(1 - smoothing) * keep + smoothing * swap) / (1 - 2 * smoothing)


def _hinge(gains: Gains, options: DPOOptions) -> Any:
    """max(0, 1 - β Δ)"""
    import jax

    return jax.nn.relu(1 - options.beta * gains.delta)


def _ipo(gains: Gains, options: DPOOptions) -> Any:
    """(h - 1 / 2β)², h of the means over tokens"""
    return (gains.by_token - 1 / (2 * options.beta)) ** 2


def _sigmoid_norm(gains: Gains, options: DPOOptions) -> Any:
    """-log σ(β h), h of the means over tokens"""
    return -_log_sigmoids(options.beta * gains.by_token)[0]


def _bco_pair(gains: Gains, options: DPOOptions) -> Any:
    """-log σ(β chosen) - log σ(-β rejected)"""
    return -_log_sigmoids(options.beta * gains.chosen)[0] - _log_sigmoids(options.beta * gains.rejected)[1]


def _apo_zero(gains: Gains, options: DPOOptions) -> Any:
    """1 - σ(β chosen) + σ(β rejected)"""
    import jax

    return 1 - jax.nn.sigmoid(options.beta * gains.chosen) + jax.nn.sigmoid(options.beta * gains.rejected)


def _apo_down(gains: Gains, options: DPOOptions) -> Any:
    """σ(β chosen) + 1 - σ(β Δ)"""
    import jax

    return jax.nn.sigmoid(options.beta * gains.chosen) + 1 - jax.nn.sigmoid(options.beta * gains.delta)


def _log_sigmoids(x: Any) -> tuple[Any, Any]:
    """Returns log σ(x) and log σ(-x)."""
    import jax

    return jax.nn.log_sigmoid(x), jax.nn.log_sigmoid(-x)


TERMS: dict[str, Callable[[Gains, DPOOptions], Any]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "robust": _robust,
    "sigmoid_norm": _sigmoid_norm,
    "bco_pair": _bco_pair,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "sft": lambda gains, options: gains.nll,
}
DPO = Objective(
    segments=chosen_and_rejected,
    num_segments=2,
    columns=COLUMNS,
    optional_columns=OPTIONAL,
    types=TYPES,
    stand_ins=STAND_INS,
    loss=preference_loss,
    metrics=METRICS,
    options=DPOOptions,
    needs=frozenset({REFERENCE}),
    defaults=PREFERENCE_DEFAULTS,
)


@dataclass(frozen=True, kw_only=True)
class IPOOptions(DPOOptions):
    """Settings of `ipo`, which is short for `dpo` with `loss: ipo`."""

    loss: Annotated[tuple[Literal["ipo"]], BeforeValidator(as_tuple)] = ("ipo",)


IPO = replace(DPO, options=IPOOptions)
