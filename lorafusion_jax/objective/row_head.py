"""Losses and log-probabilities of rows whose losses clients choose, without materialising all logits.

Like `token_losses`: the forward pass computes the gradient of a row from its logits, because the derivative of a
position's loss is a function of its own log-probabilities. Positions with a gradient come first and take two GEMMs with
the head, the others one, for their log-probabilities. Ratios of sequences need the sum over a sequence before any
derivative; only their rows take one GEMM more.
Dims: `T` packed tokens · `D` model width · `V` vocabulary · `K` targets · `M` places for segments · `c` rows a chunk.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from lorafusion_jax.objective.chunks import DEFAULT_CHUNK, chunk_rows
from lorafusion_jax.objective.loss import LogitRule, num_chunks, over_chunks, scaled_slope, sum_by
from lorafusion_jax.objective.replaced_rows import product
from lorafusion_jax.objective.rows import NO_ROW, SEQUENCE, position_terms


def client_losses(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"],
    rows: Any,
    segment_ids: Int[Array, " T"],
    num_segments: int,
    *,
    chunk: int = DEFAULT_CHUNK,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    axis: str | None = None,
) -> tuple[Float[Array, " T"], Float[Array, "T K"]]:
    """Returns the loss of each position, and the log-probabilities of its targets, which have no gradient.

    Positions without a row have zeros and no effect, even if they hold NaN. Only `hidden` has a gradient.

    Args:
        rows: a `RowTable`.
        segment_ids, num_segments: which positions are one sequence.
        chunk, soft_cap, logit_scale, axis: as in `token_losses`.
    """
    rule = LogitRule(chunk_rows(hidden.shape[0], head.shape[1], chunk), soft_cap, logit_scale, axis)
    sequence_T = _sequence_ratios(rule, lax.stop_gradient(hidden), head.T, rows, segment_ids, num_segments)
    return _losses(rule, hidden, head.T, rows, sequence_T)


def client_logprobs(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"],
    rows: Any,
    *,
    chunk: int = DEFAULT_CHUNK,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    axis: str | None = None,
) -> Float[Array, "T K"]:
    """Returns the log-probabilities of the targets of each position alone; see `client_losses`."""
    rule = LogitRule(chunk_rows(hidden.shape[0], head.shape[1], chunk), soft_cap, logit_scale, axis)
    return _logprobs_of(rule, hidden, head.T, rows.targets, rows.kind != NO_ROW)


def _sequence_ratios(rule: LogitRule, hidden_TD, head_VD, rows: Any, segment_ids, num_segments: int) -> Array:
    """Returns the log of the ratio of each position's sequence, [T]; 0 where the loss has none."""
    is_sequence = rows.kind == SEQUENCE
    logprobs_TK = _logprobs_of(rule, hidden_TD, head_VD, rows.targets[:, :1], is_sequence)
    counts = is_sequence & rows.in_ratio
    difference_T = jnp.where(counts, logprobs_TK[:, 0] - rows.old, 0.0)
    owner_T = jnp.where(is_sequence, segment_ids, -1)
    number_M = sum_by(counts.astype(jnp.float32), owner_T, num_segments)
    mean_M = sum_by(difference_T, owner_T, num_segments) / jnp.maximum(number_M, 1)
    return jnp.where(is_sequence, mean_M[segment_ids], 0.0)


def _logprobs_of(rule: LogitRule, hidden_TD, head_VD, targets_TK, counts) -> Array:
    def logprobs(logits_cV, piece):
        (targets_cK,) = piece
        return (_at_targets(rule, logits_cV, targets_cK) - rule.log_sum(logits_cV)[:, None],)

    order = jnp.argsort(~counts, stable=True)
    chunks = 0, num_chunks(rule, counts)
    out = (jnp.zeros(targets_TK.shape, jnp.float32),)
    (logprobs_TK,) = over_chunks(logprobs, rule, hidden_TD, head_VD, (targets_TK,), order, chunks, out)
    return jnp.where(counts[:, None], logprobs_TK, 0.0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(rule: LogitRule, hidden_TD, head_VD, rows, sequence_T):
    return _losses_fwd(rule, hidden_TD, head_VD, rows, sequence_T)[0]


def _losses_fwd(rule: LogitRule, hidden_TD, head_VD, rows, sequence_T):
    def terms(logits_cV, piece):
        rows, sequence_c = piece
        log_sum = rule.log_sum(logits_cV)
        logprobs_cK = _at_targets(rule, logits_cV, rows.targets) - log_sum[:, None]
        losses_cK, slope_cK = position_terms(
            jnp, rows.kind, rows.factors, rows.old, rows.low, rows.high, rows.beta, logprobs_cK, sequence_c
        )
        return log_sum, logprobs_cK, losses_cK, slope_cK

    def learn(logits_cV, piece):
        rows, _ = piece
        log_sum, logprobs_cK, losses_cK, slope_cK = terms(logits_cV, piece)
        # slope = mantissa · 2^exponent, as in `token_losses`: in float16 the stored gradient does not underflow.
        exponent = jnp.frexp(jnp.abs(slope_cK).max(-1))[1]
        slope_cK = jnp.ldexp(slope_cK, -exponent[:, None])
        p_cV = jnp.exp(logits_cV - log_sum[:, None])
        slope_cV = _add_at_targets(rule, -slope_cK.sum(-1)[:, None] * p_cV, rows.targets, slope_cK)
        slope_cD = product(rule.slope(slope_cV, logits_cV).astype(hidden_TD.dtype), head_VD)
        slope_cD = jnp.where(rows.learned[:, None], slope_cD, 0.0).astype(hidden_TD.dtype)
        losses_c = jnp.where(rows.learned, losses_cK.sum(-1), 0.0)
        return losses_c, logprobs_cK, exponent, slope_cD

    def look(logits_cV, piece):
        return (terms(logits_cV, piece)[1],)

    T, K = hidden_TD.shape[0], rows.targets.shape[1]
    has_row = rows.kind != NO_ROW
    learned = rows.learned & has_row
    # Stable, by classes: positions with a gradient, those without, those without a row.
    order = jnp.argsort(jnp.where(learned, 0, jnp.where(has_row, 1, 2)), stable=True)
    ends = num_chunks(rule, learned), num_chunks(rule, has_row)
    out = jnp.zeros(T, jnp.float32), jnp.zeros((T, K), jnp.float32), jnp.zeros(T, jnp.int32), jnp.zeros_like(hidden_TD)
    run = partial(over_chunks, rule=rule, hidden_TD=hidden_TD, head_VD=head_VD, by_row=(rows, sequence_T), order=order)
    losses_T, logprobs_TK, exponent, slope_TD = run(learn, chunks=(0, ends[0]), out=out)
    (logprobs_TK,) = run(look, chunks=ends, out=(logprobs_TK,))
    logprobs_TK = jnp.where(has_row[:, None], logprobs_TK, 0.0)
    return (losses_T, logprobs_TK), (rule.whole(slope_TD), learned, exponent)


def _losses_bwd(rule, residuals, cotangents):
    del rule  # unused: the gradient is ready
    cotangent_T, _ = cotangents
    slope_TD, counts, exponent = residuals
    return scaled_slope(slope_TD, counts, exponent, cotangent_T), None, None, None


_losses.defvjp(_losses_fwd, _losses_bwd)


def _local_targets(rule: LogitRule, logits_cV: Array, targets_cK: Array) -> tuple[Array, Array]:
    """Returns the columns of the targets among this device's logits, and which are there."""
    if rule.axis is None:
        return targets_cK, jnp.ones(targets_cK.shape, bool)
    width = logits_cV.shape[1]
    local = targets_cK - lax.axis_index(rule.axis) * width
    mine = (local >= 0) & (local < width)
    return jnp.where(mine, local, 0), mine


def _at_targets(rule: LogitRule, logits_cV: Array, targets_cK: Array) -> Array:
    """Returns the logits of the targets, [c, K]."""
    columns, mine = _local_targets(rule, logits_cV, targets_cK)
    logits_cK = jnp.take_along_axis(logits_cV, columns, axis=1)
    return logits_cK if rule.axis is None else lax.psum(jnp.where(mine, logits_cK, 0.0), rule.axis)


def _add_at_targets(rule: LogitRule, slope_cV: Array, targets_cK: Array, values_cK: Array) -> Array:
    """Adds a value at each target."""
    if targets_cK.shape[1] == 1:  # fused with what makes the slope
        return slope_cV + jnp.where(rule.is_target(slope_cV, targets_cK[:, 0]), values_cK, 0.0)
    columns, mine = _local_targets(rule, slope_cV, targets_cK)
    row = jnp.arange(len(slope_cV))[:, None]
    return slope_cV.at[row, columns].add(jnp.where(mine, values_cK, 0.0))
