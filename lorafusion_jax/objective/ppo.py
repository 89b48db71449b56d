"""PPO: clipped losses of the policy and of a value head of the adapter's own. Never imports jax.

V: value of the state before a token, the product of the head and the final-normed state that predicts the token
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from lorafusion_jax.adapters.kind import Draw, Leaf
from lorafusion_jax.objective.fields import NotNegative, Positive
from lorafusion_jax.objective.policy import (
    ADVANTAGES,
    IDS,
    OLD,
    SYSTEM,
    TEXTS,
    TYPES,
    clipped_ratio,
    entropy,
    mean,
    numbers_of,
    ratio_of,
    sampled_segments,
    token_mean,
)
from lorafusion_jax.objective.protocol import LOGPROBS, REFERENCE, TOKEN_SCORE, Objective, Sample, Segment

REWARD, REWARDS, OLD_VALUES = "reward", "rewards", "old_values"
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class PPOOptions:
    """Settings of `ppo`.

    Attributes:
        epsilon, epsilon_high: the ratio is clipped to 1 - epsilon, 1 + epsilon_high (None: epsilon).
        value_clip: values are clipped to this distance from those of sampling.
        value_weight: of the loss of the values.
        gamma, lam: discount, and λ of the generalised advantage estimation.
        beta: log π - log ρ of each token is taken off its reward so many times; 0: there is no reference.
    """

    epsilon: Positive = 0.2
    epsilon_high: Positive | None = None
    value_clip: Positive = 0.2
    value_weight: NotNegative = 0.1
    gamma: Share = 1.0
    lam: Share = 0.95
    beta: NotNegative = 0.05


def rewarded_segments(row: Mapping[str, Any]) -> tuple[Segment]:
    """Returns what was sampled, with its reward or those of its tokens.

    Raises:
        ValueError: the row has no reward, or log-likelihoods above 0.
    """
    rewards = {name: row[name] for name in (REWARD, REWARDS) if row.get(name) is not None}
    if len(rewards) != 1:
        raise ValueError(f"it has {'both a reward and rewards' if rewards else 'no reward'}")
    ((name, reward),) = rewards.items()
    if isinstance(reward, list) != (name == REWARDS):
        raise ValueError("its reward is one number, and rewards is a list with one for each token")
    (segment,) = sampled_segments({**row, "advantage": reward, ADVANTAGES: None})
    values = dict(segment.values)
    if name == REWARDS:
        values[REWARDS] = values.pop(ADVANTAGES)
    if row.get(OLD_VALUES) is not None:
        values[OLD_VALUES] = numbers_of(row[OLD_VALUES], OLD_VALUES)
    return (replace(segment, values=values),)


def ppo_loss(sample: Sample, options: PPOOptions) -> tuple[Any, dict[str, Any]]:
    """Returns -min(r A, clip(r) A) + w ½ max((V - R)², (clip(V) - R)²), a mean over the tokens of the global batch.

    A is the generalised advantage estimation from rewards and the values of sampling, R = A + these values. Where the
    row has no `old_values`, they are V itself, without a gradient: an adapter takes one step for each batch it samples.
    """
    import jax
    import jax.numpy as jnp

    ratio, values = ratio_of(sample), jnp.where(sample.mask, sample.token_score, 0.0)
    old = jnp.where(sample.mask, sample.values.get(OLD_VALUES, jax.lax.stop_gradient(values)), 0.0)
    rewards, counts, kl = _rewards(sample, options)
    advantages = jnp.where(counts, generalised_advantages(rewards, old, options.gamma, options.lam), 0.0)
    returns = advantages + old
    policy, outside = clipped_ratio(ratio, advantages, options.epsilon, options.epsilon_high)
    clipped = jnp.clip(values, old - options.value_clip, old + options.value_clip)
    squares = 0.5 * jnp.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    squares = jnp.where(counts, squares, 0.0)
    loss = token_mean(sample, policy) + options.value_weight * token_mean(sample, squares)
    return loss, {
        "ratio": mean(sample, ratio),
        "clip_ratio": mean(sample, outside),
        "kl": mean(sample, kl),
        "value": mean(sample, values),
        "value_loss": mean(sample, squares),
        **entropy(sample),
    }


def generalised_advantages(rewards: Any, values: Any, gamma: float, lam: float) -> Any:
    """Returns A_t = δ_t + γ λ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t, [L]; both are 0 behind the end."""
    import jax
    import jax.numpy as jnp

    following = jnp.concatenate([values[1:], jnp.zeros_like(values[:1])])
    deltas = rewards + gamma * following - values

    def add(after: Any, delta: Any) -> tuple[Any, Any]:
        advantage = delta + gamma * lam * after
        return advantage, advantage

    return jax.lax.scan(add, jnp.zeros_like(deltas[0]), deltas, reverse=True)[1]


def _rewards(sample: Sample, options: PPOOptions) -> tuple[Any, Any, Any]:
    """Returns the reward of each token, which tokens count, and log π - log ρ. NaN: no reward judged the answer."""
    import jax
    import jax.numpy as jnp

    if REWARDS in sample.values:
        rewards = sample.values[REWARDS]
    else:
        following = jnp.concatenate([sample.mask[1:], jnp.zeros_like(sample.mask[:1])])
        rewards = jnp.where(following, 0.0, sample.values[ADVANTAGES])
    counts = sample.mask & ~jnp.isnan(jnp.where(sample.mask, rewards, 0.0).sum())
    rewards, kl = jnp.where(counts, rewards, 0.0), jnp.zeros_like(rewards)
    if options.beta:
        sampled = sample.values.get(OLD, jax.lax.stop_gradient(sample.logprobs))
        kl = jnp.where(sample.mask, sampled - sample.reference_logprobs, 0.0)
        rewards -= options.beta * kl
    return rewards, counts, kl


def _needs(options: Any) -> frozenset[str]:
    return frozenset({LOGPROBS, TOKEN_SCORE}) | (frozenset({REFERENCE}) if options.beta else frozenset())


def _zeros(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    del draw  # unused
    return np.zeros(shape, np.float32)


PPO = Objective(
    segments=rewarded_segments,
    optional_columns=(*TEXTS, *IDS, REWARD, REWARDS, OLD, OLD_VALUES, SYSTEM),
    types={**TYPES, REWARD: "number", REWARDS: "list", OLD_VALUES: "list"},
    loss=ppo_loss,
    metrics={
        "ratio": "of probabilities",
        "clip_ratio": "share of tokens",
        "kl": "nats per token",
        "value": "reward",
        "value_loss": "squared reward",
        "logps": "nats per token",
    },
    options=PPOOptions,
    needs=_needs,
    head=(Leaf(name="value", axes=("D", 1), init=_zeros, lr_group="value"),),  # no PEFT name: it stays in the run
    defaults={"lora.dropout": 0.0, "optim.lr": 1e-5},
    advantages="none",
)
