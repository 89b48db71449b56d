"""Preferences without a reference: CPO, SimPO and ORPO. Never imports jax.

π: log-likelihood of an answer, Σ over its tokens; |y| its tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lorafusion_jax.objective.dpo import METRICS
from lorafusion_jax.objective.fields import PREFERENCE_DEFAULTS, NotNegative, Positive, Smoothing
from lorafusion_jax.objective.pairs import COLUMNS, OPTIONAL, STAND_INS, TYPES, chosen_and_rejected
from lorafusion_jax.objective.protocol import LOGPROBS, Objective, Sample, Segment


@dataclass(frozen=True, kw_only=True)
class CPOOptions:
    """Settings of `cpo`.

    Attributes:
        beta: scale of the difference.
        loss: sigmoid or hinge.
        label_smoothing: share of pairs whose answers are thought to be swapped; of sigmoid.
        nll: weight of the chosen answers' negative log-likelihood, a mean over the tokens of the global batch; TRL's
            `cpo_alpha`.
    """

    beta: Positive = 0.1
    loss: Literal["sigmoid", "hinge"] = "sigmoid"
    label_smoothing: Smoothing = 0.0
    nll: NotNegative = 1.0

    def __post_init__(self) -> None:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError("settings without label_smoothing, which only the loss sigmoid uses")


def cpo_loss(sample: Sample, options: CPOOptions) -> tuple[Any, dict[str, Any]]:
    """Returns -(1 - ε) log σ(β (π_c - π_r)) - ε log σ(-β (π_c - π_r)) + nll · NLL, or the hinge."""
    import jax

    rewards = -options.beta * sample.nll
    margin = rewards[0] - rewards[1]
    if options.loss == "hinge":
        term = jax.nn.relu(1 - margin)
    else:
        smoothing = options.label_smoothing
        term = -(1 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)
    return term + options.nll * sample.nll[0] * sample.token_weight[0], _metrics(sample, rewards)


@dataclass(frozen=True, kw_only=True)
class SimPOOptions:
    """Settings of `simpo`.

    Attributes:
        beta: scale of the difference of mean log-likelihoods per token.
        gamma: margin that the scaled difference should have.
        nll: as in `cpo`; the paper has none.
    """

    beta: Positive = 2.0
    gamma: NotNegative = 0.5
    nll: NotNegative = 0.0


def simpo_loss(sample: Sample, options: SimPOOptions) -> tuple[Any, dict[str, Any]]:
    """Returns -log σ(β (π_c / |y_c| - π_r / |y_r|) - γ) + nll · NLL."""
    import jax

    rewards = -options.beta * sample.nll / sample.tokens
    term = -jax.nn.log_sigmoid(rewards[0] - rewards[1] - options.gamma)
    return term + options.nll * sample.nll[0] * sample.token_weight[0], _metrics(sample, rewards)


@dataclass(frozen=True, kw_only=True)
class ORPOOptions:
    """Settings of `orpo`.

    Attributes:
        beta: weight of the odds ratio; the paper's λ.
    """

    beta: Positive = 0.1


def orpo_segments(row: Mapping[str, Any]) -> tuple[Segment, Segment]:
    """Like `chosen_and_rejected`; the prompt of the chosen answer is learned, too."""
    chosen, rejected = chosen_and_rejected(row)
    return replace(chosen, learn="all"), rejected


def orpo_loss(sample: Sample, options: ORPOOptions) -> tuple[Any, dict[str, Any]]:
    """Returns NLL of prompt and chosen answer - β log σ(log odds_c - log odds_r), odds = p / (1 - p).

    log p is the mean log-likelihood per token of an answer.
    """
    import jax
    import jax.numpy as jnp

    of_answer = sample.answer & (sample.segment == jnp.arange(2)[:, None])
    counts = jnp.maximum(of_answer.sum(axis=1), 1)
    mean_2 = jnp.where(of_answer, sample.logprobs, 0.0).sum(axis=1) / counts
    # A mean of 0 is a sure answer, with infinite odds.
    log_odds_2 = mean_2 - jnp.log(-jnp.expm1(jnp.minimum(mean_2, -1e-7)))
    ratio = log_odds_2[0] - log_odds_2[1]
    nll = sample.nll[0] * sample.token_weight[0]
    metrics = _metrics(sample, options.beta * mean_2) | {
        "logps/chosen": mean_2[0],
        "logps/rejected": mean_2[1],
        "log_odds_ratio": jax.nn.log_sigmoid(ratio),
        "log_odds_chosen": ratio,
    }
    return nll - options.beta * jax.nn.log_sigmoid(ratio), metrics


def _metrics(sample: Sample, rewards: Any) -> dict[str, Any]:
    return {
        "rewards/chosen": rewards[0],
        "rewards/rejected": rewards[1],
        "rewards/margins": rewards[0] - rewards[1],
        "rewards/accuracies": rewards[0] > rewards[1],
        "logps/chosen": -sample.nll[0],
        "logps/rejected": -sample.nll[1],
        "nll_loss": sample.nll[0] * sample.token_weight[0],
    }


CPO = Objective(
    segments=chosen_and_rejected,
    num_segments=2,
    columns=COLUMNS,
    optional_columns=OPTIONAL,
    types=TYPES,
    stand_ins=STAND_INS,
    loss=cpo_loss,
    metrics=METRICS | {"nll_loss": "nats per token"},
    options=CPOOptions,
    defaults=PREFERENCE_DEFAULTS,
)
SIMPO = replace(CPO, loss=simpo_loss, options=SimPOOptions)
ORPO = replace(
    CPO,
    segments=orpo_segments,
    loss=orpo_loss,
    metrics={**CPO.metrics, "log_odds_ratio": "nats", "log_odds_chosen": "nats"},
    options=ORPOOptions,
    needs=frozenset({LOGPROBS}),
)
