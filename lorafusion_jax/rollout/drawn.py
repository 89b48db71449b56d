"""A batch of answers as it was drawn and rewarded: in files of a run, and as samples of its step.

Dims: `P` prompts · `G` answers to each. NaN is an answer that no reward judged: it counts in no mean, and its advantage
is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from lorafusion_jax.config.rollout_section import estimator_of
from lorafusion_jax.config.schema import AdapterConfig
from lorafusion_jax.data.rollouts import PromptRow, RolloutBatch, Sampled, samples_of
from lorafusion_jax.data.tokenized_set import DataReport, TokenizedSet
from lorafusion_jax.objective.policy import OLD

SMALL = 1e-4  # as in TRL


def advantages_of(rewards_PG: np.ndarray, estimator: str) -> np.ndarray:
    """Returns the advantage of every answer, float64 [P, G].

    | estimator | advantage | TRL |
    |---|---|---|
    | group | (r - mean of the group) / (its standard deviation + 1e-4) | GRPO, `scale_rewards: group` |
    | batch | (r - mean of the group) / (standard deviation of the batch + 1e-4) | `scale_rewards: batch` |
    | mean | r - mean of the group | `scale_rewards: none` |
    | leave_one_out | r - mean of the others of the group | RLOO |
    | global | r - mean of the batch | |
    | none | r | |

    >>> advantages_of(np.array([[1.0, 0.0, 0.5], [2.0, 2.0, np.nan]]), "leave_one_out").tolist()
    [[0.75, -0.75, 0.0], [0.0, 0.0, 0.0]]
    """
    rewards = np.asarray(rewards_PG, np.float64)
    return np.nan_to_num(_ESTIMATORS[estimator](rewards), nan=0.0)


def _above_least(rewards: np.ndarray, axis: int | None = 1) -> tuple[np.ndarray, np.ndarray]:
    """Returns rewards less the least of them, and that one: sums of equal rewards have no rounding."""
    least = np.where(np.isnan(rewards), np.inf, rewards).min(axis=axis, keepdims=True)
    return rewards - least, least


def _mean(rewards: np.ndarray, axis: int | None = 1) -> np.ndarray:
    above, least = _above_least(rewards, axis)
    judged = ~np.isnan(rewards)
    counts = judged.sum(axis=axis, keepdims=True)
    sums = np.where(judged, above, 0.0).sum(axis=axis, keepdims=True)
    return least + np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)


def _deviation(rewards: np.ndarray, axis: int | None = 1) -> np.ndarray:
    """The standard deviation of a sample: with n - 1. NaN of a single answer, as in TRL."""
    judged = ~np.isnan(rewards)
    counts = judged.sum(axis=axis, keepdims=True)
    squares = np.where(judged, rewards - _mean(rewards, axis), 0.0) ** 2
    sums = squares.sum(axis=axis, keepdims=True)
    return np.sqrt(np.divide(sums, counts - 1, out=np.full(sums.shape, np.nan), where=counts > 1))


def _leave_one_out(rewards: np.ndarray) -> np.ndarray:
    above, _ = _above_least(rewards)
    judged = ~np.isnan(rewards)
    others = judged.sum(axis=1, keepdims=True) - 1
    sums = np.where(judged, above, 0.0).sum(axis=1, keepdims=True) - above
    return above - np.divide(sums, others, out=np.full(sums.shape, np.nan), where=others > 0)


_ESTIMATORS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "group": lambda rewards: (rewards - _mean(rewards)) / (_deviation(rewards) + SMALL),
    "batch": lambda rewards: (rewards - _mean(rewards)) / (_deviation(rewards, None) + SMALL),
    "mean": lambda rewards: rewards - _mean(rewards),
    "leave_one_out": _leave_one_out,
    "global": lambda rewards: rewards - _mean(rewards, None),
    "none": lambda rewards: rewards,
}


@dataclass(slots=True, kw_only=True)
class Turns:
    """What was drawn after one prompt.

    Attributes:
        tokens, learned, logprobs: as of `data.rollouts.Sampled`.
        texts: of the answers, one a turn.
        ended: whether the last answer ended itself, rather than by a limit.
        reward: None: no reward judges it.
        reference: log p of each token under the reference, 0 for those of the tool; empty without one.
        policy: log p of each token under the adapter, of a pass like that of the reference: the divergence of equal
            weights is exactly 0, and not rounding of the sampler's products. Empty: those of the sampler.
    """

    tokens: list[int]
    learned: list[bool]
    logprobs: list[float]
    texts: list[str]
    ended: bool = False
    reward: float | None = None
    reference: list[float]
    policy: list[float] = field(default_factory=list)

    @classmethod
    def empty(cls) -> Turns:
        return cls(tokens=[], learned=[], logprobs=[], texts=[], reference=[])

    def add(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Adds tokens; those of a tool have no log-probabilities."""
        self.tokens += tokens
        self.learned += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs

    @property
    def sampled(self) -> Sampled:
        return Sampled(tokens=self.tokens, learned=self.learned, logprobs=self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A global batch of an adapter.

    Attributes:
        batch: its number, from 0.
        lag: steps that the adapter takes between drawing and training it.
        answers: in the order of the adapter's stream.
    """

    adapter: str
    batch: int
    lag: int
    answers: list[Turns]

    @property
    def key(self) -> tuple[str, int, int]:
        return self.adapter, self.batch, self.lag

    def row(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Drawn:
        """Inverse of `row`.

        Raises:
            TypeError, KeyError: it is none.
        """
        return cls(**{**row, "answers": [Turns(**answer) for answer in row["answers"]]})

    def samples(self, prompts: Sequence[PromptRow], report: DataReport) -> TokenizedSet:
        """Returns the batch without advantages."""
        sampled = [answer.sampled for answer in self.answers]
        return samples_of(prompts, sampled, np.zeros(len(sampled)), report)

    def take_reference(self, samples: TokenizedSet, reference_T: np.ndarray, policy_T: np.ndarray | None) -> None:
        """Notes log p of the samples under the reference and, where rewards need the difference, the adapter."""
        for answer, end in zip(self.answers, samples.offsets[1:].tolist(), strict=True):
            start = end - len(answer.tokens)
            answer.reference = reference_T[start:end].tolist()
            answer.policy = [] if policy_T is None else policy_T[start:end].tolist()

    def to_batch(self, adapter: AdapterConfig, prompts: Sequence[PromptRow], report: DataReport) -> RolloutBatch:
        """Returns the samples with their advantages, and the metrics of the step."""
        objective, options = adapter.objective.chosen.objective, adapter.objective.chosen.options
        rewards = np.array([math.nan if answer.reward is None else answer.reward for answer in self.answers])
        penalised, samples = rewards, self.samples(prompts, report)
        reference, policy = (_of_tokens(samples, self.answers, name) for name in ("reference", "policy"))
        old = samples.values[OLD]
        policy = old if policy is None else policy
        if reference is not None and objective.reward_kl is not None:
            kl = samples.sum_segments(np.where(samples.loss_mask, policy - reference, 0.0))[:, 0]
            penalised = rewards - objective.reward_kl(options) * kl
        advantages = advantages_of(penalised.reshape(-1, adapter.rollout.group), estimator_of(adapter)).reshape(-1)
        if objective.advantages == "none":  # it makes advantages of the rewards itself, and of NaN none
            advantages = np.where(np.isnan(rewards), np.nan, advantages)
            if reference is not None:  # it takes the difference to the sampler's log p off the reward of each token
                reference = old - (policy - reference)
        samples = samples_of(prompts, [answer.sampled for answer in self.answers], advantages, report)
        judged = rewards[~np.isnan(rewards)]
        return RolloutBatch(
            samples=replace(samples, reference=reference),
            metrics={
                "reward": float(judged.mean()) if len(judged) else math.nan,
                "reward_std": float(judged.std()) if len(judged) else math.nan,
                "lag": float(self.lag),
                "answer_tokens": float(np.mean([sum(answer.learned) for answer in self.answers])),
                "cut_answers": float(np.mean([not answer.ended for answer in self.answers])),
                "loss_tokens": float(samples.loss_mask.sum()),
            },
        )


def _of_tokens(samples: TokenizedSet, answers: Sequence[Turns], name: str) -> np.ndarray | None:
    """The values of an attribute of the answers, at their tokens; None where they have none."""
    if not getattr(answers[0], name):
        return None
    values = np.zeros(len(samples.tokens), np.float32)
    for answer, end in zip(answers, samples.offsets[1:].tolist(), strict=True):
        values[end - len(answer.tokens) : end] = getattr(answer, name)
    return values
