"""Reduces token losses of a microbatch to loss and metrics per adapter, each by its own objective.

The objectives of a run are known at tracing. A run with only supervised fine-tuning just sums rows and needs no table
of samples.
T packed tokens · A adapters · M places for segments · N places for samples · S segments of a sample
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.objective.loss import sum_by
from lorafusion_jax.objective.protocol import Chosen, SampleSums


def totals_of(losses_T: Array, batch: Any, chosen: Sequence[Chosen]) -> dict[str, Array]:
    """Sums of a microbatch per adapter: "loss" and the metrics of all objectives, each float32 [A].

    The result of an adapter depends only on its own rows, even if others are not finite.

    Args:
        losses_T: weighted token losses, from `token_losses`.
        batch: a `Microbatch`; with the table of samples if an objective takes its mean over samples.
        chosen: the objective of each adapter.
    """
    totals = {"loss": sum_by(losses_T, batch.row_adapter, len(chosen))}
    groups = [(first, members) for first, members in _groups(chosen) if first.of_samples]
    if not groups:
        return totals
    places = batch.segment_lengths.shape[0]
    nll_M = sum_by(losses_T, batch.segment_ids, places)
    tokens_M = sum_by((batch.weights != 0).astype(jnp.float32), batch.segment_ids, places)
    for first, members in groups:
        is_member = jnp.array([index in members for index in range(len(chosen))])
        own = _of_samples(first, is_member, nll_M, tokens_M, batch.samples)
        for name, sums in own.items():
            before = totals.get(name, jnp.zeros(len(chosen), jnp.float32))
            totals[name] = jnp.where(is_member, sums, before)
    return totals


def metric_names(chosen: Sequence[Chosen]) -> list[str]:
    """Names of the metrics that `totals_of` returns in addition to the loss, in order."""
    return list(dict.fromkeys(name for each in chosen for name in each.objective.metrics))


def _groups(chosen: Sequence[Chosen]) -> Iterator[tuple[Chosen, list[int]]]:
    """Groups adapters with the same objective and settings."""
    seen: list[Chosen] = []
    for each in chosen:
        if not any(each.same_as(other) for other in seen):
            seen.append(each)
            yield each, [index for index, other in enumerate(chosen) if each.same_as(other)]


def _of_samples(chosen: Chosen, is_member: Array, nll_M: Array, tokens_M: Array, table: Any) -> dict[str, Array]:
    objective = chosen.objective
    assert objective.loss is not None
    mine_N = (table.adapter >= 0) & is_member[table.adapter]
    segments_NS = table.segments[:, : objective.num_segments]
    take = partial(jnp.where, mine_N[:, None])
    # Samples of other groups are replaced before the loss, which also blocks their gradients.
    sums = SampleSums(nll=take(nll_M[segments_NS], 0.0), tokens=take(tokens_M[segments_NS], 1.0))
    loss_N, metrics = jax.vmap(lambda sample: _loss(chosen, sample))(sums)
    owner_N = jnp.where(mine_N, table.adapter, -1)

    def mean(values_N: Array) -> Array:
        return sum_by(jnp.where(mine_N, table.weight * values_N, 0.0), owner_N, len(is_member))

    return {name: mean(values) for name, values in {"loss": loss_N, **metrics}.items()}


def _loss(chosen: Chosen, sample: SampleSums) -> tuple[Array, dict[str, Array]]:
    assert chosen.objective.loss is not None
    loss, metrics = chosen.objective.loss(sample, chosen.options)
    return jnp.asarray(loss, jnp.float32), {name: jnp.asarray(metrics[name], jnp.float32) for name in metrics}


def check_loss(chosen: Chosen) -> None:
    """Traces an objective's loss on shapes, before anything is loaded or written.

    Raises:
        ConfigError: `objective.broken`, the loss fails or does not return what the objective declares.
    """
    if chosen.objective.loss is None:
        return
    S = jax.ShapeDtypeStruct((chosen.objective.num_segments,), jnp.float32)
    try:
        loss, metrics = jax.eval_shape(lambda sample: _loss(chosen, sample), SampleSums(S, S))
        shapes = {name: value.shape for name, value in {"loss": loss, **metrics}.items() if value.shape != ()}
        wrong = f"these are no scalars: {shapes}" if shapes else ""
        if metrics.keys() != chosen.objective.metrics.keys():
            wrong = f"it returns the metrics {sorted(metrics)} and declares {sorted(chosen.objective.metrics)}"
    except Exception as problem:  # code of another package may raise anything
        wrong = f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"
    if wrong:
        raise ConfigError(
            "objective.broken",
            f"the loss of objective {chosen.name} cannot be used.",
            why=wrong,
            fix="update or repair the package that it comes from",
        )
