"""How rewards become advantages. P prompts · G answers to each

NaN is an answer that no reward judged: it counts in no mean, and its advantage is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

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


def _mean(rewards: np.ndarray, axis: int | None = 1) -> np.ndarray:
    judged = ~np.isnan(rewards)
    counts = judged.sum(axis=axis, keepdims=True)
    sums = np.where(judged, rewards, 0.0).sum(axis=axis, keepdims=True)
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)


def _deviation(rewards: np.ndarray, axis: int | None = 1) -> np.ndarray:
    """The standard deviation of a sample: with n - 1. NaN of a single answer, as in TRL."""
    judged = ~np.isnan(rewards)
    counts = judged.sum(axis=axis, keepdims=True)
    squares = np.where(judged, rewards - _mean(rewards, axis), 0.0) ** 2
    sums = squares.sum(axis=axis, keepdims=True)
    return np.sqrt(np.divide(sums, counts - 1, out=np.full(sums.shape, np.nan), where=counts > 1))


def _leave_one_out(rewards: np.ndarray) -> np.ndarray:
    judged = ~np.isnan(rewards)
    others = judged.sum(axis=1, keepdims=True) - 1
    sums = np.where(judged, rewards, 0.0).sum(axis=1, keepdims=True) - rewards
    return rewards - np.divide(sums, others, out=np.full(sums.shape, np.nan), where=others > 0)


_ESTIMATORS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "group": lambda rewards: (rewards - _mean(rewards)) / (_deviation(rewards) + SMALL),
    "batch": lambda rewards: (rewards - _mean(rewards)) / (_deviation(rewards, None) + SMALL),
    "mean": lambda rewards: rewards - _mean(rewards),
    "leave_one_out": _leave_one_out,
    "global": lambda rewards: rewards - _mean(rewards, None),
    "none": lambda rewards: rewards,
}
