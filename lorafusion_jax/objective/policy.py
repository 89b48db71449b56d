"""Losses on advantages: importance sampling, REINFORCE, RLOO, GRPO's family and CISPO; and dft. Never imports jax.

Any sampler can feed them: rows hold what it sampled, how much better than expected that was, and how likely it was.
r = exp(log p - log p of the sampler), per token · A advantage
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from lorafusion_jax.objective.fields import NotNegative, Positive
from lorafusion_jax.objective.pairs import prompt_and_answer, with_system
from lorafusion_jax.objective.protocol import LOGPROBS, REFERENCE, CellType, Objective, Sample, Segment

ADVANTAGES, OLD = "advantages", "old_logprobs"
TEXTS, IDS, SYSTEM = ("prompt", "completion"), ("prompt_ids", "completion_ids"), "system"
ROW = (*TEXTS, *IDS, "advantage", ADVANTAGES, OLD, SYSTEM)
TYPES: Mapping[str, CellType] = {
    **dict.fromkeys(TEXTS, "messages"),
    **dict.fromkeys(("advantage", *IDS, ADVANTAGES, OLD), "list"),
}


def sampled_segments(row: Mapping[str, Any]) -> tuple[Segment]:
    """Returns what was sampled, with its advantages and log-likelihoods.

    Raises:
        ValueError: the row has no advantage, or log-likelihoods above 0.
    """
    advantages = [row[name] for name in ("advantage", ADVANTAGES) if row.get(name) is not None]
    if len(advantages) != 1:
        raise ValueError(f"it has {'both an advantage and advantages' if advantages else 'no advantage'}")
    values = {ADVANTAGES: numbers_of(advantages[0], "advantages")}
    if row.get(OLD) is not None:
        old = numbers_of(row[OLD], OLD)
        if any(number > 0 for number in (old if isinstance(old, list) else [old])):
            raise ValueError(f"it has {OLD} above 0, which no probability has")
        values[OLD] = old
    if row.get(IDS[0]) is not None or row.get(IDS[1]) is not None:
        for name in IDS:
            if not isinstance(row.get(name), list):
                raise ValueError(f"its {name} is no list of token ids")
        if row.get(SYSTEM):
            raise ValueError(f"it has a '{SYSTEM}' text, and its {IDS[0]} hold the whole prompt")
        ids = Segment(name="completion", prompt_ids=row[IDS[0]], answer_ids=row[IDS[1]], values=values)
        return (ids,)
    prompt, completion = with_system(row.get(SYSTEM), row.get("prompt"), row.get("completion"))
    return (prompt_and_answer("completion", prompt, completion, values=values),)


def off_policy_segments(row: Mapping[str, Any]) -> tuple[Segment]:
    """Like `sampled_segments` for losses that need the sampler's log-likelihoods."""
    if row.get(OLD) is None:
        raise ValueError(f"it has no {OLD}: how likely each sampled token was, from the sampler")
    return sampled_segments(row)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Settings of `importance_sampling`: none."""


def importance_sampling_loss(sample: Sample, options: SamplingOptions) -> tuple[Any, dict[str, Any]]:
    """Returns -r A, a mean over the tokens of the global batch."""
    del options  # unused
    ratio, advantages = ratio_of(sample), sample.values[ADVANTAGES]
    return token_mean(sample, -ratio * advantages), {"ratio": mean(sample, ratio), **entropy(sample)}


@dataclass(frozen=True, kw_only=True)
class GRPOOptions:
    """Settings of `grpo`.

    Attributes:
        loss: how tokens are averaged: dapo over those of the global batch, grpo over those of a completion and then
            over completions, dr_grpo over completions of `completion_tokens` each.
        epsilon, epsilon_high: the ratio is clipped to 1 - epsilon, 1 + epsilon_high (None: epsilon).
        ratio: of each token, or one of the sequence: the geometric mean over its tokens (GSPO, with the loss grpo).
        beta: weight of the divergence from the reference; 0: there is no reference.
        completion_tokens: constant of dr_grpo.
    """

    loss: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    epsilon: Positive = 0.2
    epsilon_high: Positive | None = None
    ratio: Literal["token", "sequence"] = "token"
    beta: NotNegative = 0.0
    completion_tokens: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        if (self.loss == "dr_grpo") != (self.completion_tokens is not None):
            raise ValueError("settings with completion_tokens if the loss is dr_grpo, and only then")


def grpo_loss(sample: Sample, options: GRPOOptions) -> tuple[Any, dict[str, Any]]:
    """Returns -min(r A, clip(r) A) + β KL, averaged as `loss` says; without old_logprobs r is 1 with its gradient.

    KL = exp(log ρ - log π) - (log ρ - log π) - 1 for each token.
    """
    import jax.numpy as jnp

    ratio, advantages = ratio_of(sample, by_sequence=options.ratio == "sequence"), sample.values[ADVANTAGES]
    losses, outside = clipped_ratio(ratio, advantages, options.epsilon, options.epsilon_high)
    metrics = {"ratio": mean(sample, ratio), "clip_ratio": mean(sample, outside), **entropy(sample)}
    divergence = jnp.zeros_like(losses)
    if options.beta:
        difference = jnp.where(sample.mask, sample.reference_logprobs - sample.logprobs, 0.0)
        divergence = jnp.expm1(difference) - difference
        losses += options.beta * divergence
    metrics["kl"] = mean(sample, divergence)
    if options.loss == "grpo":
        return mean(sample, losses), metrics
    if options.completion_tokens is not None:
        return jnp.where(sample.mask, losses, 0.0).sum() / options.completion_tokens, metrics
    return token_mean(sample, losses), metrics


@dataclass(frozen=True, kw_only=True)
class GSPOOptions:
    """Settings of `gspo`, which is `grpo` with a ratio of the sequence; see there."""

    epsilon: Positive = 3e-4
    epsilon_high: Positive | None = 4e-4
    beta: NotNegative = 0.0


def gspo_loss(sample: Sample, options: GSPOOptions) -> tuple[Any, dict[str, Any]]:
    clips = {"epsilon": options.epsilon, "epsilon_high": options.epsilon_high}
    return grpo_loss(sample, GRPOOptions(loss="grpo", ratio="sequence", beta=options.beta, **clips))


@dataclass(frozen=True, kw_only=True)
class RLOOOptions:
    """Settings of `rloo`.

    Attributes:
        epsilon, epsilon_high: the ratio of a completion is clipped to 1 - epsilon, 1 + epsilon_high (None: epsilon).
        beta: Σ log π - log ρ over a completion is taken off its reward so many times, in rollouts; 0: no reference.
    """

    epsilon: Positive = 0.2
    epsilon_high: Positive | None = None
    beta: NotNegative = 0.05


def rloo_loss(sample: Sample, options: RLOOOptions) -> tuple[Any, dict[str, Any]]:
    """Returns -min(r A, clip(r) A), a mean over completions; r is the product of the ratios of all tokens."""
    import jax.numpy as jnp

    ratio, advantage = jnp.exp(_difference(sample).sum()), mean(sample, sample.values[ADVANTAGES])
    loss, outside = clipped_ratio(ratio, advantage, options.epsilon, options.epsilon_high)
    metrics = {"ratio": ratio, "clip_ratio": outside, **entropy(sample), "kl": _kl(sample, options.beta)}
    return loss, metrics


@dataclass(frozen=True, kw_only=True)
class ReinforceOptions:
    """Settings of `reinforce`; `beta` as of `rloo`."""

    beta: NotNegative = 0.0


def reinforce_loss(sample: Sample, options: ReinforceOptions) -> tuple[Any, dict[str, Any]]:
    """Returns -Σ r A over the tokens of a completion, a mean over completions."""
    import jax.numpy as jnp

    ratio = ratio_of(sample)
    metrics = {"ratio": mean(sample, ratio), **entropy(sample), "kl": _kl(sample, options.beta)}
    return jnp.where(sample.mask, -ratio * sample.values[ADVANTAGES], 0.0).sum(), metrics


@dataclass(frozen=True, kw_only=True)
class CISPOOptions:
    """Settings of `cispo`.

    Attributes:
        epsilon_high: largest ratio.
    """

    epsilon_high: Positive = 5.0


def cispo_loss(sample: Sample, options: CISPOOptions) -> tuple[Any, dict[str, Any]]:
    """Returns -min(r, ε_high) A log p, r without a gradient, a mean over the tokens of the global batch."""
    import jax
    import jax.numpy as jnp

    ratio, advantages = jax.lax.stop_gradient(ratio_of(sample)), sample.values[ADVANTAGES]
    losses = -jnp.minimum(ratio, options.epsilon_high) * advantages * sample.logprobs
    clipped = (ratio > options.epsilon_high) & (advantages > 0)
    metrics = {"ratio": mean(sample, ratio), "clip_ratio": mean(sample, clipped), **entropy(sample)}
    return token_mean(sample, losses), metrics


@dataclass(frozen=True, kw_only=True)
class DFTOptions:
    """Settings of `dft`: none."""


def dft_loss(sample: Sample, options: DFTOptions) -> tuple[Any, dict[str, Any]]:
    """Returns -p log p, p without a gradient, a mean over the tokens of the global batch."""
    import jax
    import jax.numpy as jnp

    del options  # unused
    weight = jax.lax.stop_gradient(jnp.exp(sample.logprobs))
    return token_mean(sample, -weight * sample.logprobs), {"nll_loss": sample.nll[0] * sample.token_weight[0]}


def clipped_ratio(ratio: Any, advantages: Any, epsilon: float, epsilon_high: float | None) -> tuple[Any, Any]:
    """Returns -min(r A, clip(r) A), and where the clip took the gradient."""
    import jax.numpy as jnp

    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    outside = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages), outside


def ratio_of(sample: Sample, *, by_sequence: bool = False) -> Any:
    """Returns r [L]; 1 where there is no token."""
    import jax.numpy as jnp

    difference = _difference(sample)
    if by_sequence:
        difference = jnp.broadcast_to(difference.sum() / sample.tokens[0], difference.shape)
    return jnp.exp(difference)


def _difference(sample: Sample) -> Any:
    """Returns log r [L]; 0 where there is no token, so that padding has no gradient."""
    import jax
    import jax.numpy as jnp

    old = sample.values[OLD] if OLD in sample.values else jax.lax.stop_gradient(sample.logprobs)
    return jnp.where(sample.mask, sample.logprobs - old, 0.0)


def _kl(sample: Sample, beta: float) -> Any:
    """Returns the mean of log π - log ρ; 0 without a reference."""
    import jax.numpy as jnp

    return mean(sample, sample.logprobs - sample.reference_logprobs) if beta else jnp.zeros(())


def token_mean(sample: Sample, values: Any) -> Any:
    import jax.numpy as jnp

    return jnp.where(sample.mask, values, 0.0).sum() * sample.token_weight[0]


def mean(sample: Sample, values: Any) -> Any:
    """Mean over the tokens of a sample."""
    import jax.numpy as jnp

    return jnp.where(sample.mask, values, 0.0).sum() / sample.tokens[0]


def entropy(sample: Sample) -> dict[str, Any]:
    return {"logps": -sample.nll[0] / sample.tokens[0]}


def numbers_of(value: Any, name: str) -> Any:
    numbers = value if isinstance(value, list) else [value]
    if not numbers or any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers):
        raise ValueError(f"its {name} are not a number or a list of numbers")
    return value


def review_ratio(numbers: Mapping[str, Any], options: GRPOOptions) -> list[str]:
    """Returns a note where a ratio of sequences counts once for each token."""
    del numbers  # unused
    if options.ratio == "token" or options.loss == "grpo":
        return []
    return [
        f"[objective.ratio] objective.ratio: sequence with loss: {options.loss} counts a completion's ratio once for "
        "each of its tokens, so long ones weigh more; GSPO is ratio: sequence with loss: grpo"
    ]


def _needs(options: Any) -> frozenset[str]:
    return frozenset({LOGPROBS, REFERENCE} if options.beta else {LOGPROBS})


_METRICS = {"ratio": "of probabilities", "logps": "nats per token"}
_CLIPPED = _METRICS | {"clip_ratio": "share of tokens", "kl": "nats per token"}
_DEFAULTS = {"lora.dropout": 0.0, "optim.lr": 1e-5}
IMPORTANCE_SAMPLING = Objective(
    segments=off_policy_segments,
    optional_columns=ROW,
    types=TYPES,
    loss=importance_sampling_loss,
    metrics=_METRICS,
    options=SamplingOptions,
    needs=frozenset({LOGPROBS}),
    defaults=_DEFAULTS,
    advantages="mean",
)
GRPO = Objective(
    segments=sampled_segments,
    optional_columns=ROW,
    types=TYPES,
    loss=grpo_loss,
    metrics=_CLIPPED,
    options=GRPOOptions,
    review=review_ratio,
    needs=_needs,
    defaults=_DEFAULTS,
    advantages="group",
)
GSPO = replace(GRPO, loss=gspo_loss, options=GSPOOptions, review=None)
RLOO = replace(
    GRPO,
    loss=rloo_loss,
    metrics=_CLIPPED | {"clip_ratio": "share of completions"},
    options=RLOOOptions,
    review=None,
    advantages="leave_one_out",
    reward_kl=lambda options: options.beta,
)
REINFORCE = replace(
    GRPO,
    loss=reinforce_loss,
    metrics=_METRICS | {"kl": "nats per token"},
    options=ReinforceOptions,
    review=None,
    advantages="global",
    reward_kl=lambda options: options.beta,
)
CISPO = Objective(
    segments=off_policy_segments,
    optional_columns=ROW,
    types=TYPES,
    loss=cispo_loss,
    metrics=_METRICS | {"clip_ratio": "share of tokens"},
    options=CISPOOptions,
    needs=frozenset({LOGPROBS}),
    defaults=_DEFAULTS,
    advantages="group",
)
DFT = Objective(loss=dft_loss, metrics={"nll_loss": "nats per token"}, options=DFTOptions, needs=frozenset({LOGPROBS}))
