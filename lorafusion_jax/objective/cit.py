"""Contrastive instruction tuning: an instruction and its paraphrase should lead to the same state. Never imports jax.

A sample is a group of consecutive rows, each an instruction, its paraphrase and their answer.
h, h': final-normed states of the last token of the answer, after the instruction and after the paraphrase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from lorafusion_jax.objective.fields import NotNegative, Positive
from lorafusion_jax.objective.pairs import prompt_and_answer, split_conversation, with_system
from lorafusion_jax.objective.protocol import HIDDEN, Objective, Sample, Segment


@dataclass(frozen=True, kw_only=True)
class CITOptions:
    """Settings of `cit`.

    Attributes:
        temperature: similarities are divided by it.
        weight: largest weight of the contrastive loss; the paper's λ.
        group: consecutive rows of the file that are told apart; it is a sample.
    """

    temperature: Positive = 0.05
    weight: NotNegative = 1.0
    group: Annotated[int, Field(ge=2, le=256)] = 4


def cit_segments(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Segment, Segment]]:
    """Returns the answer of each row, after its prompt and after its paraphrase."""
    parts = []
    for row in rows:
        if not row.get("paraphrase") or row["paraphrase"] == row.get("prompt"):
            raise ValueError("it has no paraphrase" if not row.get("paraphrase") else "its paraphrase is its prompt")
        paraphrase, *_ = with_system(row.get("system"), row["paraphrase"])
        prompt, completion = with_system(row.get("system"), row.get("prompt"), row.get("completion"))
        prompt, completion = split_conversation("completion", prompt, completion)
        parts.append(
            (
                prompt_and_answer("completion", prompt, completion),
                prompt_and_answer("completion", paraphrase, completion),
            )
        )
    return parts


def cit_loss(samples: Sample, options: CITOptions) -> tuple[Any, dict[str, Any]]:
    """Returns NLL of both answers + min(λ, NLL / C) · C, the weight without a gradient.

    C = (CE of rows + CE of columns) / 2 of the cosines of all h and h' of the group, divided by the temperature.
    """
    import jax
    import jax.numpy as jnp

    states = samples.hidden  # [G, 2, D]
    units = states / jnp.maximum(jnp.linalg.norm(states, axis=-1, keepdims=True), 1e-12)
    cosines = jnp.matmul(units[:, 0], units[:, 1].T, precision="highest")
    logits = cosines / options.temperature
    log_p = jnp.diagonal(jax.nn.log_softmax(logits, axis=0)) + jnp.diagonal(jax.nn.log_softmax(logits, axis=1))
    contrast = -log_p.mean() / 2
    by_token = samples.nll.sum() / samples.tokens.sum()
    weight = jnp.minimum(options.weight, jax.lax.stop_gradient(by_token / jnp.maximum(contrast, 1e-12)))
    # Both texts count as one set of tokens: 1 / token_weight is the mean number of tokens of a group.
    share = 1 / (1 / samples.token_weight).sum(axis=1)
    nll = (samples.nll.sum(axis=1) * share).sum()
    metrics = {"contrastive": contrast, "similarity": jnp.diagonal(cosines).mean(), "nll_loss": nll}
    return nll + weight * contrast, metrics


CIT = Objective(
    segments=cit_segments,
    num_segments=2,
    columns=("prompt", "paraphrase", "completion"),
    optional_columns=("system",),
    types=dict.fromkeys(("prompt", "paraphrase", "completion"), "messages"),
    group=lambda options: options.group,
    loss=cit_loss,
    metrics={"contrastive": "nats", "similarity": "cosine", "nll_loss": "nats per token"},
    options=CITOptions,
    needs=frozenset({HIDDEN}),
    defaults={"lora.dropout": 0.0, "data.max_length": 1024},
)
