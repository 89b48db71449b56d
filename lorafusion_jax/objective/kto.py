"""Kahneman-Tversky optimisation: answers that are good or bad on their own, without pairs. Never imports jax.

A sample is a group of consecutive rows of the file. Of pairs, all chosen answers come before all rejected ones, as in
TRL. Their completions, each after the prompt of another row, give the estimate of how far the adapter is from the
reference: TRL's mismatched texts, with the group for its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from lorafusion_jax.objective.fields import PREFERENCE_DEFAULTS, Positive
from lorafusion_jax.objective.pairs import (
    STAND_INS,
    TYPES,
    asks,
    chosen_and_rejected,
    prompt_and_answer,
    same_prompt,
    split_conversation,
    with_system,
)
from lorafusion_jax.objective.protocol import REFERENCE, Objective, Sample, Segment

BALANCED = (1.0, 4 / 3)  # the weights of good rows over those of bad rows, as the paper advises


@dataclass(frozen=True, kw_only=True)
class KTOOptions:
    """Settings of `kto`.

    Attributes:
        beta: how far the adapter may move from the reference: larger stays closer.
        loss: kto, or apo_zero_unpaired, which compares with the reference alone.
        desirable_weight, undesirable_weight: of rows whose label is true, and false.
        group: consecutive rows of the file that share an estimate of the divergence; it is a sample.
    """

    beta: Positive = 0.1
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    desirable_weight: Positive = 1.0
    undesirable_weight: Positive = 1.0
    group: Annotated[int, Field(ge=2, le=256)] = 4


def rows_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a row with a label, or the two rows of a pair.

    Raises:
        ValueError: the row is neither or both, or its label is not true or false.
    """
    if row.get("chosen") or row.get("rejected"):
        if beside := [name for name in ("label", "completion") if row.get(name) not in (None, "")]:
            raise ValueError(f"it has a pair and a {beside[0]}: one of them, a pair holds a good and a bad answer")
        return [
            {"prompt": segment, "completion": None, "label": label}
            for segment, label in zip(chosen_and_rejected(row), (True, False), strict=True)
        ]
    if row.get("label") not in (True, False):  # 0 and 1 are equal to them
        raise ValueError("it has neither a label that is true or false nor a chosen and a rejected answer")
    prompt, completion = row.get("prompt"), row.get("completion")
    if completion is None and isinstance(prompt, list):  # a conversation that ends with it, as LLaMA-Factory has
        prompt, completion = prompt[:-1], [] if asks(prompt[-1:]) else prompt[-1:]
    if not completion:
        raise ValueError("it has no completion")
    prompt, completion = with_system(row.get("system"), prompt, completion)
    prompt, completion = split_conversation("completion", prompt, completion)
    return [{"prompt": prompt, "completion": completion, "label": bool(row["label"])}]


def kto_segments(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Segment, Segment]]:
    """Returns, for each row of a group, its text and its prompt with the completion of a row before.

    That row is the last one with another prompt, in a circle: several answers of one prompt may follow each other.

    Raises:
        ValueError: the group has one prompt only.
    """
    texts = [_parts(row) for row in rows]
    segments = []
    for number, (prompt, completion, raw) in enumerate(texts):
        before = [*texts[number + 1 :], *texts[:number]]
        others = [other for other_prompt, other, _ in before if not same_prompt(other_prompt, prompt)]
        if not others:
            raise ValueError(
                f"all {len(rows)} rows of its group have the same prompt, so no answer is one to another prompt: "
                "shuffle the rows of the file, or set a larger objective.group"
            )
        mismatched = _segment("mismatched", prompt, others[-1], raw)
        segments.append((_segment("completion", prompt, completion, raw), mismatched))
    return segments


def kto_loss(samples: Sample, options: KTOOptions) -> tuple[Any, dict[str, Any]]:
    """Returns the mean over the group of w_d (1 - σ(β (r - kl))) and w_u (1 - σ(β (kl - r))), r = π - ρ.

    kl = max(0, mean of r over the mismatched texts), without a gradient.
    """
    import jax
    import jax.numpy as jnp

    gains = samples.reference_nll - samples.nll  # [G, 2]
    kl = jax.lax.stop_gradient(jnp.maximum(gains[:, 1].mean(), 0.0))
    good = samples.numbers["label"] > 0
    gain = gains[:, 0]
    against = kl if options.loss == "kto" else 0.0
    signed = options.beta * jnp.where(good, gain - against, against - gain)
    weight = jnp.where(good, options.desirable_weight, options.undesirable_weight)
    rewards = options.beta * gain

    def mean_where(rows: Any, values: Any) -> tuple[Any, Any]:
        return jnp.where(rows, values, 0.0).sum(), rows.sum()

    return (weight * (1 - jax.nn.sigmoid(signed))).mean(), {
        "kl": kl,
        "rewards/chosen": mean_where(good, rewards),
        "rewards/rejected": mean_where(~good, rewards),
        "logps/chosen": mean_where(good, -samples.nll[:, 0]),
        "logps/rejected": mean_where(~good, -samples.nll[:, 0]),
    }


def review_labels(numbers: Mapping[str, Any], options: KTOOptions) -> list[str]:
    """Returns a note if good and bad rows weigh very differently.

    Raises:
        ValueError: all labels are equal.
    """
    labels = numbers["label"] > 0
    good, bad = int(labels.sum()), int((~labels).sum())
    if not good or not bad:
        raise ValueError(f"all {good + bad} labels are {'true' if good else 'false'}: there is nothing to tell apart")
    ratio = options.desirable_weight * good / (options.undesirable_weight * bad)
    if BALANCED[0] <= ratio <= BALANCED[1]:
        return []
    low, high = (round(bound * options.undesirable_weight * bad / good, 2) for bound in BALANCED)
    return [
        f"[objective.balance] {good} good and {bad} bad rows: objective.desirable_weight from {low} to {high} would "
        "balance them"
    ]


def _parts(row: Mapping[str, Any]) -> tuple[Any, Any, bool]:
    """Returns prompt and completion, and whether they are joined as they are."""
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(prompt, Segment):
        return prompt, completion, False
    if prompt.messages is not None:
        first = prompt.prompt_messages or 0
        return list(prompt.messages[:first]), list(prompt.messages[first:]), False
    return prompt.prompt, prompt.answer, not prompt.template


def _segment(name: str, prompt: Any, completion: Any, raw: bool) -> Segment:
    return prompt_and_answer(name, prompt, completion, template=not raw)


KTO = Objective(
    segments=kto_segments,
    num_segments=2,
    optional_columns=("prompt", "completion", "label", "chosen", "rejected", "system"),
    types={**TYPES, "label": "flag"},
    stand_ins=STAND_INS,
    numbers=lambda row: {"label": float(row["label"])},
    expand=rows_of,
    by_part=True,
    group=lambda options: options.group,
    loss=kto_loss,
    metrics={
        "kl": "nats",
        "rewards/chosen": "nats",
        "rewards/rejected": "nats",
        "logps/chosen": "nats",
        "logps/rejected": "nats",
    },
    ratios=frozenset({"rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"}),
    review=review_labels,
    options=KTOOptions,
    needs=frozenset({REFERENCE}),
    defaults=PREFERENCE_DEFAULTS,
)
