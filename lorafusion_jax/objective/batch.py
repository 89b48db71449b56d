"""Reduces token losses of a microbatch to loss and metrics per adapter, each by its own objective.

The objectives of a run are known at tracing. A run with only supervised fine-tuning just sums rows and needs no table
of samples.
T packed tokens · A adapters · M places for segments · N places for samples · S segments of a sample · G rows of a group
· L learned tokens of a sample · D model width
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.objective.loss import sum_by
from lorafusion_jax.objective.protocol import (
    DIVERGENCE,
    HIDDEN,
    LOGPROBS,
    REFERENCE,
    SCORE,
    TOKEN_SCORE,
    Chosen,
    Divergence,
    Sample,
)

_DIFFERENTIABLE = ("nll", "logprobs", "hidden", "divergence", "token_score")
COUNT = " count"  # suffix of the name of a ratio's second sum


def totals_of(
    losses_T: Array,
    batch: Any,
    chosen: Sequence[Chosen],
    hidden_TD: Array | None = None,
    divergence_T: Array | None = None,
    heads: Mapping[str, Array] = {},
    scores: Mapping[str, Array] = {},
) -> dict[str, Array]:
    """Sums of a microbatch per adapter: "loss" and the metrics of all objectives, each float32 [A].

    The result of an adapter depends only on its own rows, even if others are not finite.

    Args:
        losses_T: weighted token losses, from `token_losses`.
        batch: a `Microbatch`; with the table of samples if an objective takes its mean over samples.
        chosen: the objective of each adapter; with `batch.lora` the objectives that `batch.lora.objective` numbers.
        hidden_TD: output of the final norm; for objectives that need hidden states or scores.
        divergence_T: weighted divergences from a reference, from `token_divergences`; for objectives that need them.
        heads: key of a head's leaf, see `Head.by_key` → tensor of each sample's adapter, [N, ...].
        scores: the same → its product with each row, [T]; for objectives that need scores of tokens.
    """
    A = len(chosen) if batch.lora is None else batch.lora.objective.shape[0]
    totals = {"loss": sum_by(losses_T, batch.row_adapter, A)}
    groups = [(first, is_member) for first, is_member in _members(batch, chosen) if first.of_samples]
    if not groups:
        return totals
    table = batch.samples
    places = batch.segment_lengths.shape[0]
    nll_M = sum_by(losses_T, batch.segment_ids, places)
    tokens_M = sum_by((batch.weights != 0).astype(jnp.float32), batch.segment_ids, places)
    everything = Sample(
        nll=nll_M[table.segments],
        tokens=tokens_M[table.segments],
        token_weight=table.token_weight,
        numbers=table.numbers,
        reference_nll=table.reference,
        hidden=None if table.last is None or hidden_TD is None else hidden_TD[table.last].astype(jnp.float32),
    )
    if divergence_T is not None:
        divergence_M = sum_by(divergence_T, batch.segment_ids, places)
        everything = everything._replace(divergence=divergence_M[table.segments])
    if table.rows is not None:
        everything = _with_tokens(everything, losses_T, batch, scores)
    everything = everything._replace(head=heads)
    for first, is_member in groups:
        for name, sums in _of_objective(first, is_member, everything, table, alone=batch.lora is not None).items():
            before = totals.get(name, jnp.zeros(A, jnp.float32))
            totals[name] = jnp.where(is_member, sums, before)
    return totals


def divergence_rows(batch: Any, chosen: Sequence[Chosen]) -> tuple[Array, Array, Array]:
    """Returns weight, β and temperature of the divergence of each row, [T]; the weight is 0 where none is needed."""
    divergences = [
        choice.objective.divergence(choice.options)
        if choice.objective.divergence and DIVERGENCE in choice.needs
        else None
        for choice in chosen
    ]
    settings_A3 = jnp.array(
        [[0.0, *Divergence(0.0)] if settings is None else [1.0, *settings] for settings in divergences]
    )
    if batch.lora is not None:
        settings_A3 = settings_A3[jnp.maximum(batch.lora.objective, 0)]
    has_divergence, betas, temperatures = settings_A3[jnp.maximum(batch.row_adapter, 0)].T
    weights = jnp.where((batch.row_adapter >= 0) & (batch.weights != 0), has_divergence, 0.0)
    return weights, betas, temperatures


def metric_names(chosen: Sequence[Chosen]) -> list[str]:
    """Names of the sums that `totals_of` returns in addition to the loss, in order; see `finished_metrics`."""
    names = [name for adapter in chosen for name in adapter.objective.metrics]
    counts = [f"{name}{COUNT}" for adapter in chosen for name in adapter.objective.metrics if name in adapter.ratios]
    return list(dict.fromkeys([*names, *counts]))


def finished_metrics(chosen: Chosen, sums: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of one adapter from the sums of its batch; a ratio of nothing is left out.

    >>> from lorafusion_jax.objective.table import OBJECTIVES
    >>> kto = Chosen(name="kto", objective=OBJECTIVES["kto"], options=OBJECTIVES["kto"].options())
    >>> finished_metrics(kto, dict.fromkeys(metric_names([kto]), 0.5) | {"rewards/chosen count": 0.0})["kl"]
    0.5
    """
    finished = {}
    for name in chosen.objective.metrics:
        count = sums[f"{name}{COUNT}"] if name in chosen.ratios else 1.0
        if count:
            finished[name] = sums[name] / count
    return finished


def _members(batch: Any, chosen: Sequence[Chosen]) -> Iterator[tuple[Chosen, Array]]:
    """Yields every objective with its settings, and which adapters have it, bool [A]."""
    if batch.lora is not None:
        yield from ((choice, batch.lora.objective == number) for number, choice in enumerate(chosen))
        return
    distinct: list[Chosen] = []
    for first in chosen:
        if not any(first.same_as(other) for other in distinct):
            distinct.append(first)
            yield first, jnp.array([first.same_as(other) for other in chosen])


def _with_tokens(everything: Sample, losses_T: Array, batch: Any, scores: Mapping[str, Array]) -> Sample:
    """Adds what the table holds per learned token, [N, L]."""
    table, rows_NL = batch.samples, batch.samples.rows
    mask_NL = rows_NL < losses_T.shape[0]

    def take(array_T: Array) -> Array:  # every row belongs to one sample, so the gradient has no sums
        return array_T.at[rows_NL].get(mode="fill", fill_value=0)

    first_N1 = table.segments[:, :1]  # the segments of a sample have consecutive numbers
    return everything._replace(
        logprobs=-take(losses_T),
        mask=mask_NL,
        answer=take(table.in_answer),
        segment=jnp.where(mask_NL, take(batch.segment_ids) - first_N1, 0),
        reference_logprobs=None if table.reference_logprobs is None else take(table.reference_logprobs),
        values={name: take(array_T) for name, array_T in table.values.items()},
        token_score={key: take(score_T) for key, score_T in scores.items()},
    )


def _of_objective(chosen: Chosen, is_member: Array, everything: Sample, table: Any, *, alone: bool) -> dict[str, Array]:
    """Computes loss and metrics of the adapters of one objective.

    Which optional numbers and values a loss gets is a fact of each sample, whatever others have. So the loss is traced
    once for each set of names that occurs.

    Args:
        alone: compile the loss apart from everything else, so that its bits do not depend on the other objectives.
    """
    mine_N = (table.adapter >= 0) & is_member[table.adapter]
    sums = partial(_of_samples, chosen, len(is_member), table=table, alone=alone)
    if not table.fields or chosen.objective.segments is None:
        return sums(everything, mine_N)
    of_fields = [(fields, has_N) for fields, has_N in table.fields.items() if fields.objective == chosen.name]
    totals = dict.fromkeys(["loss", *metric_names([chosen])], jnp.zeros(len(is_member), jnp.float32))
    for fields, has_N in of_fields:  # none where no data of the objective is in these microbatches
        sample = everything._replace(
            numbers={name: everything.numbers[name] for name in fields.numbers},
            values={name: array for name, array in everything.values.items() if name in fields.values},
        )
        part = sums(sample, mine_N if len(of_fields) == 1 else mine_N & has_N)
        totals = part if len(of_fields) == 1 else {name: totals[name] + part[name] for name in part}
    return totals


def _of_samples(
    chosen: Chosen, num_adapters: int, everything: Sample, mine_N: Array, *, table: Any, alone: bool
) -> dict[str, Array]:
    # Samples of other groups are replaced before the loss, which also blocks their gradients.
    samples = _own_samples(chosen, everything, mine_N)
    if alone:
        differentiable = {name: getattr(samples, name) for name in _DIFFERENTIABLE}
        samples = samples._replace(**lax.optimization_barrier(differentiable))
    loss_N, metrics = jax.vmap(partial(_loss, chosen))(samples)
    if alone:
        loss_N, metrics = lax.optimization_barrier((loss_N, metrics))
    owner_N = jnp.where(mine_N, table.adapter, -1)

    def mean(values_N: Array) -> Array:
        return sum_by(jnp.where(mine_N, table.weight * values_N, 0.0), owner_N, num_adapters)

    return {name: mean(values) for name, values in {"loss": loss_N, **metrics}.items()}


def _own_samples(chosen: Chosen, everything: Sample, mine_N: Array) -> Sample:
    """Returns what an objective declares to need of its samples, with neutral values for those of others."""
    S, G, needs = chosen.num_segments, chosen.group, chosen.needs

    def take(array: Array, neutral: float = 0.0) -> Array:
        return jnp.where(mine_N.reshape(-1, *(1,) * (array.ndim - 1)), array, neutral)

    def by_segment(array: Array, neutral: float = 0.0) -> Array:
        array = take(array[:, :S], neutral)
        return array if G is None else array.reshape(len(array), G, S // G, *array.shape[2:])

    sample = Sample(
        nll=by_segment(everything.nll),
        tokens=by_segment(everything.tokens, 1.0),
        token_weight=by_segment(everything.token_weight),
        numbers={
            name: take(numbers[:, :G] if G is not None else numbers[:, 0])
            for name, numbers in everything.numbers.items()
        },
        reference_nll=by_segment(everything.reference_nll) if REFERENCE in needs else None,
        hidden=None if needs.isdisjoint({HIDDEN, SCORE}) else by_segment(everything.hidden),
        divergence=by_segment(everything.divergence) if DIVERGENCE in needs else None,
        head={
            leaf.name: take(everything.head[key]) for key, leaf in (chosen.head.by_key if chosen.head else {}).items()
        },
    )
    if LOGPROBS not in needs:
        return sample
    both = REFERENCE in needs
    return sample._replace(
        logprobs=take(everything.logprobs),
        mask=take(everything.mask, False),
        answer=take(everything.answer, False),
        segment=take(everything.segment, 0),
        reference_logprobs=take(everything.reference_logprobs) if both else None,
        values={name: take(array) for name, array in everything.values.items()},
        token_score=take(everything.token_score[score_key(chosen)]) if TOKEN_SCORE in needs else None,
    )


def score_key(chosen: Chosen) -> str:
    """Returns the key of the leaf whose products an objective needs."""
    assert chosen.head is not None
    return next(iter(chosen.head.by_key))


def _loss(chosen: Chosen, sample: Sample) -> tuple[Array, dict[str, Array]]:
    assert chosen.objective.loss is not None
    if SCORE in chosen.needs:
        sample = sample._replace(score=_score(chosen, sample))
    loss, measured = chosen.objective.loss(sample, chosen.options)
    metrics: dict[str, Any] = {}
    for name, value in measured.items():
        if name in chosen.ratios:
            metrics[name], metrics[f"{name}{COUNT}"] = value
        else:
            metrics[name] = value
    return jnp.asarray(loss, jnp.float32), {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}


def _score(chosen: Chosen, sample: Sample) -> Array:
    """Returns the product of the states and the first leaf of the head, in float32."""
    assert chosen.head is not None
    weight = sample.head[chosen.head.leaves[0].name]
    score = jnp.matmul(sample.hidden, weight, precision="highest")
    return score[..., 0] if weight.shape[1] == 1 else score


def sample_shapes(chosen: Chosen, numbers: Iterable[str], values: Iterable[str], sizes: Mapping[str, int]) -> Sample:
    """Returns the shapes of what a loss gets.

    Args:
        numbers, values: names of those of the rows and tokens.
        sizes: D and V.
    """

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    needs, tokens = chosen.needs, 8  # any number of tokens
    group = () if chosen.group is None else (chosen.group,)
    segments = array(*group, chosen.objective.num_segments)
    sample = Sample(
        segments,
        segments,
        segments,
        {name: array(*group) for name in numbers},
        segments if REFERENCE in needs else None,
        hidden=None if needs.isdisjoint({HIDDEN, SCORE}) else array(*segments.shape, sizes["D"]),
        divergence=segments if DIVERGENCE in needs else None,
        head={leaf.name: array(*leaf.shape_in(sizes)) for leaf in (chosen.head.leaves if chosen.head else ())},
    )
    if LOGPROBS not in needs:
        return sample
    return sample._replace(
        logprobs=array(tokens),
        mask=array(tokens, dtype=bool),
        answer=array(tokens, dtype=bool),
        segment=array(tokens, dtype=jnp.int32),
        reference_logprobs=array(tokens) if REFERENCE in needs else None,
        values={name: array(tokens) for name in values},
        token_score=array(tokens) if TOKEN_SCORE in needs else None,
    )


def check_head(chosen: Chosen) -> None:
    """Checks the table of an objective's head.

    Raises:
        ValueError: a leaf cannot be used, or PEFT folders cannot hold it.
    """
    head = chosen.head
    if head is None:
        if not chosen.needs.isdisjoint({SCORE, TOKEN_SCORE}):
            raise ValueError("it needs a score and has no head")
        return
    if TOKEN_SCORE in chosen.needs and (LOGPROBS not in chosen.needs or head.leaves[0].axes != ("D", 1)):
        raise ValueError("scores of tokens need logprobs, and a head whose first leaf has the axes D and 1")
    names = [leaf.name for leaf in head.leaves]
    if len(set(names)) < len(names):
        raise ValueError(f"two leaves of its head have one name: {', '.join(names)}")
    if not chosen.of_samples:
        raise ValueError("it has a head and no loss of samples")
    for leaf in head.leaves:
        if any(axis not in ("D", "V") and not isinstance(axis, int) for axis in leaf.axes) or leaf.shared:
            raise ValueError(f"{leaf.name} of its head has the axes {leaf.axes}: D, V and numbers; it cannot be shared")
        if not leaf.name.isidentifier() or (head.is_exported and (leaf.peft_name or "").count(".") != 1):
            raise ValueError(f"{leaf.name} of its head has no peft_name like 'score.weight', so it cannot be exported")
    if SCORE in chosen.needs and (len(head.leaves[0].axes) != 2 or head.leaves[0].axes[0] != "D"):
        raise ValueError(f"the score is a product with {names[0]}, whose axes are not D and a number")


def check_loss(
    chosen: Chosen,
    *,
    numbers: Iterable[str] = (),
    values: Iterable[str] = (),
    sizes: Mapping[str, int] = {"D": 8, "V": 16},
) -> None:
    """Traces an objective's loss on shapes, before anything is loaded or written; arguments are of `sample_shapes`.

    Raises:
        ConfigError: `objective.broken`, the loss fails or does not return what the objective declares.
    """
    if chosen.objective.loss is None:
        return
    try:
        check_head(chosen)
        shapes = sample_shapes(chosen, numbers, values, sizes)
        loss, metrics = jax.eval_shape(partial(_loss, chosen), shapes)
        arrays = {name: value.shape for name, value in {"loss": loss, **metrics}.items() if value.shape != ()}
        wrong = f"these are no scalars: {arrays}" if arrays else ""
        if sorted(metrics) != sorted(metric_names([chosen])):
            wrong = f"it returns the metrics {sorted(metrics)} and declares {sorted(metric_names([chosen]))}"
    except Exception as problem:  # code of another package may raise anything
        wrong = f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"
    if wrong:
        raise ConfigError(
            "objective.broken",
            f"the loss of objective {chosen.name} cannot be used.",
            why=wrong,
            fix="update or repair the package that it comes from",
        )
