"""Rewards of answers: the right answer, an expression, a function, an address, a reward adapter, or a sum of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lorafusion_jax.config.rollout_section import Reward
from lorafusion_jax.data.rollouts import PromptRow
from lorafusion_jax.errors import RunError
from lorafusion_jax.rollout.functions import Functions

LARGEST = 1e6  # sums of larger ones lose digits of the small


def rewards_of(
    rewards: Sequence[Reward],
    prompts: Sequence[PromptRow],
    completions: Sequence[str],
    functions: Functions,
    scores_by: Callable[[str], list[float]] | None = None,
) -> np.ndarray:
    """Returns the weighted sum of all rewards for each answer; NaN where none of them judges it.

    Args:
        scores_by: returns the scores of a reward adapter; needed if there is one.

    Raises:
        RunError: `rollout.function`; `rollout.reward`, its numbers cannot be used.
    """
    parts = np.array([_part(reward, prompts, completions, functions, scores_by) for reward in rewards])
    weights = np.array([reward.weight for reward in rewards])[:, None]
    total = np.nansum(parts * weights, axis=0)
    return np.where(np.isnan(parts).all(axis=0), np.nan, total)


def _part(
    reward: Reward,
    prompts: Sequence[PromptRow],
    completions: Sequence[str],
    functions: Functions,
    scores_by: Callable[[str], list[float]] | None,
) -> list[float]:
    """Returns one reward; NaN is an answer that it does not judge."""
    if reward.kind == "adapter":
        assert scores_by is not None
        return _checked(reward, scores_by(reward.value), len(completions))
    if reward.kind == "exact":
        pairs = zip(prompts, completions, strict=True)
        return [float(text.strip() == str(prompt.row[reward.value]).strip()) for prompt, text in pairs]
    raw_prompts = [prompt.prompt for prompt in prompts]
    arguments = {"prompts": raw_prompts, "completions": list(completions), "columns": _columns(prompts)}
    return _checked(reward, functions.call(reward.kind, reward.value, arguments), len(completions))


def _columns(prompts: Sequence[PromptRow]) -> Mapping[str, list[Any]]:
    """The columns of the rows, but for the prompts."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.row if name != "prompt")
    return {name: [prompt.row.get(name) for prompt in prompts] for name in names}


def _checked(reward: Reward, values: Any, count: int) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        has = f"{len(values)} numbers" if isinstance(values, list) else f"a {type(values).__name__}"
        raise _refused(reward, f"it gave {has} for {count} completions", "one number for each completion")
    for number, value in enumerate(values):
        if value is not None and not (isinstance(value, int | float) and abs(value) <= LARGEST):  # nor NaN
            why = f"completion {number} has the reward {value}"
            raise _refused(reward, why, f"numbers from -{LARGEST:g} to {LARGEST:g}, or None: not judged")
    return [math.nan if value is None else float(value) for value in values]


def _refused(reward: Reward, why: str, fix: str) -> RunError:
    return RunError("rollout.reward", f"the reward {reward} cannot be used: {why}.", fix=fix)
