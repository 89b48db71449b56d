"""Rewards of answers: a scalar head of the adapter's own on the last state of a text. Never imports jax.

s: score of a text, the product of the head and the final-normed state of its last token
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lorafusion_jax.adapters.kind import Draw, Leaf
from lorafusion_jax.objective.fields import NotNegative
from lorafusion_jax.objective.pairs import COLUMNS, OPTIONAL, STAND_INS, TYPES, chosen_and_rejected
from lorafusion_jax.objective.protocol import SCORE, Objective, Sample, Segment

MARGIN = "margin"


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """Settings of `reward`.

    Attributes:
        center: weight of the squared sum of both scores, which keeps their mean near 0; TRL's
            `center_rewards_coefficient`.
    """

    center: NotNegative = 0.0


def reward_segments(row: Mapping[str, Any]) -> tuple[Segment, Segment]:
    """Like `chosen_and_rejected`; no token is learned."""
    chosen, rejected = chosen_and_rejected(row)
    return replace(chosen, learn="nothing"), replace(rejected, learn="nothing")


def margin_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns by how much the chosen answer of a row should at least be better, if the row says so.

    Raises:
        ValueError: the margin is no number.
    """
    margin = row.get(MARGIN)
    if margin is None:
        return {}
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise ValueError(f"its margin is no number, but {type(margin).__name__}")
    return {MARGIN: float(margin)}


def reward_loss(sample: Sample, options: RewardOptions) -> tuple[Any, dict[str, Any]]:
    """Returns -log σ(s_c - s_r - margin) + center · (s_c + s_r)², Bradley and Terry's model, and TRL's metrics."""
    import jax

    chosen, rejected = sample.score
    loss = -jax.nn.log_sigmoid(chosen - rejected - sample.numbers.get(MARGIN, 0.0))
    if options.center:
        loss += options.center * (chosen + rejected) ** 2
    return loss, {
        "accuracy": chosen > rejected,
        "margin": chosen - rejected,
        "mean_reward": (chosen + rejected) / 2,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
    }


def normal(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """N(0, 0.02²), as transformers draws the head of a classifier (Box and Muller's transformation)."""
    count = math.prod(shape)
    radius, angle = draw(2 * count).reshape(2, count).astype(np.float64)
    values = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)
    return (0.02 * values).astype(np.float32).reshape(shape)


REWARD = Objective(
    segments=reward_segments,
    num_segments=2,
    columns=COLUMNS,
    optional_columns=(*OPTIONAL, MARGIN),
    types={**TYPES, MARGIN: "number"},
    stand_ins=STAND_INS,
    numbers=margin_of,
    loss=reward_loss,
    metrics={
        "accuracy": "share of pairs",
        "margin": "score",
        "mean_reward": "score",
        "rewards/chosen": "score",
        "rewards/rejected": "score",
    },
    options=RewardOptions,
    needs=frozenset({SCORE}),
    head=(Leaf(name="score", axes=("D", 1), init=normal, peft_name="score.weight"),),
    task="SEQ_CLS",
    defaults={"lora.dropout": 0.0, "optim.lr": 1e-4, "data.max_length": 1024, "data.on_long": "drop"},
)
