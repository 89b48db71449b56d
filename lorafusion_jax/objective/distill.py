"""Distillation: the adapter's distributions over the vocabulary follow those of a teacher. Never imports jax.

The teacher is `objective.reference`: an adapter of the job before its first step, or a PEFT folder. Its states of the
learned tokens are stored with the run, so the head makes both distributions, chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from lorafusion_jax.objective.fields import Positive
from lorafusion_jax.objective.protocol import DIVERGENCE, Divergence, Objective, Sample


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """Settings of `distill`.

    Attributes:
        beta: 0 is the forward divergence KL(teacher ‖ adapter), 1 the reverse one, between them the generalised
            Jensen-Shannon divergence, as in TRL.
        temperature: logits of both are divided by it.
    """

    beta: Annotated[float, Field(ge=0, le=1)] = 0.0
    temperature: Positive = 1.0


def distill_loss(sample: Sample, options: DistillOptions) -> tuple[Any, dict[str, Any]]:
    """Returns the divergence, a mean over the tokens of the global batch."""
    del options  # unused: the head knows them
    loss = sample.divergence[0] * sample.token_weight[0]
    return loss, {"nll_loss": sample.nll[0] * sample.token_weight[0]}


DISTILL = Objective(
    loss=distill_loss,
    metrics={"nll_loss": "nats per token"},
    options=DistillOptions,
    needs=frozenset({DIVERGENCE}),
    divergence=lambda options: Divergence(options.beta, options.temperature),
    defaults={"lora.dropout": 0.0},
)
