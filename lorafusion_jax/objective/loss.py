"""Token losses of a packed microbatch, one per row, without materialising all logits.

The head is frozen, so the gradient of a row depends only on the row's logits. The forward pass computes it from the
logits, and the backward pass only scales it. This takes two GEMMs with the head, while recomputing logits in backward
would take three. Rows are processed in chunks, weighted rows first, and chunks without weighted rows are skipped, so
prompts and padding cost nothing.
Dims: `T` packed tokens · `D` model width · `V` vocabulary · `A` adapters · `c` rows a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from lorafusion_jax.objective.chunks import DEFAULT_CHUNK, chunk_rows
from lorafusion_jax.objective.replaced_rows import (
    ReplacedRows,
    RowsOf,
    hidden_gradient,
    product,
    replaced_tokens,
    value_gradients,
)


def token_losses(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    *,
    chunk: int = DEFAULT_CHUNK,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    replaced: ReplacedRows | None = None,
    axis: str | None = None,
) -> Float[Array, " T"]:
    """Weighted negative log-likelihood of each row; any sum of rows may be differentiated.

    loss[t] = weights[t] · (logsumexp(z[t]) - z[t, targets[t]]),  0 where weights[t] = 0
    z[t] = soft_cap · tanh(logit_scale · hidden[t] head / soft_cap)

    Rows of weight 0 have no effect, even if they hold NaN, and rows do not affect each other. Only `hidden` has a
    gradient; the head is frozen, and its gradient is zero.

    Args:
        hidden: output of the final norm. Products run in its dtype and accumulate in float32.
        head: output projection. The transpose of a checkpoint's table [V, D] is not copied.
        targets: token to predict at each row.
        weights: float32. In float16, gradients end at its smallest numbers: those of a weight below 2e-5 are rounded
            by more than 1 %.
        chunk: at most about `chunk` · T logits exist at once.
        soft_cap: bound of the logits (None: none).
        replaced: rows of the head that adapters train; they have a gradient (None: there are none).
        axis: axis of the surrounding `shard_map` that splits the vocabulary: `head` is this device's part, and all
            devices get the same losses and gradients (None: `head` is whole). Not with `replaced`.

    Example:
        >>> losses = token_losses(jnp.zeros((3, 2)), jnp.ones((2, 8)), jnp.arange(3), jnp.array([1.0, 0.5, 0.0]))
        >>> [round(float(loss), 4) for loss in losses]  # log 8, log 8 / 2, nothing
        [2.0794, 1.0397, 0.0]
    """
    weights = jnp.asarray(weights, jnp.float32)
    rule = LogitRule(chunk_rows(hidden.shape[0], head.shape[1], chunk), soft_cap, logit_scale, axis)
    if replaced is None:
        return _losses(rule, hidden, head.T, jnp.asarray(targets), weights)
    assert axis is None, "trained rows of a split head"
    rows = (replaced.values_DC, jnp.asarray(replaced.row_adapter_T))
    return _replaced_losses(rule, replaced.owners, hidden, head.T, jnp.asarray(targets), weights, *rows)


def token_divergences(
    hidden: Float[Array, "T D"],
    teacher: Float[Array, "T D"],
    head: Float[Array, "D V"],
    weights: Float[Array, " T"],
    betas: Float[Array, " T"],
    temperatures: Float[Array, " T"],
    *,
    chunk: int = DEFAULT_CHUNK,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
) -> Float[Array, " T"]:
    """Divergence of the distributions over the vocabulary of `hidden` and `teacher`, times the weight of each row.

    See `protocol.Divergence` for the formula. Like `token_losses`: chunk by chunk, with a gradient for `hidden` only.

    Example:
        >>> ones = jnp.ones(2)
        >>> hidden, teacher = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([[1.0, 0.0], [0.0, 0.0]])
        >>> found = token_divergences(hidden, teacher, jnp.eye(2), ones, 0 * ones, ones)
        >>> [round(float(value), 4) for value in found]
        [0.0, 0.1201]
    """
    weights = jnp.asarray(weights, jnp.float32)
    rule = LogitRule(chunk_rows(hidden.shape[0], head.shape[1], chunk), soft_cap, logit_scale)
    return _divergences(rule, hidden, teacher.astype(hidden.dtype), head.T, weights, betas, temperatures)


def sum_by(values: Float[Array, " T"], owner: Int[Array, " T"], num_owners: int) -> Float[Array, " N"]:
    """Sums the values of each owner 0 … N - 1. NaN affects only its own owner, in values and gradients.

    >>> sum_by(jnp.array([1.0, jnp.nan, 2.0, 4.0]), jnp.array([0, 1, 0, -1]), 2).tolist()
    [3.0, nan]
    """
    mine = owner == jnp.arange(num_owners)[:, None]
    return jnp.where(mine, values, 0.0).sum(axis=1)


class LogitRule(NamedTuple):
    """How logits are computed: rows at a time, bound, factor, mesh axis that splits the vocabulary."""

    rows: int
    soft_cap: float | None
    scale: float
    axis: str | None = None

    def logits(self, products_cV: jax.Array) -> jax.Array:
        """Logits of products with the head."""
        scaled = products_cV if self.scale == 1 else products_cV * self.scale
        return scaled if self.soft_cap is None else self.soft_cap * jnp.tanh(scaled / self.soft_cap)

    def slope(self, slope_cV: jax.Array, logits_cV: jax.Array) -> jax.Array:
        """Gradient with respect to the products, of that with respect to the logits."""
        if self.soft_cap is not None:
            slope_cV = slope_cV * (1 - jnp.square(logits_cV / self.soft_cap))
        return slope_cV if self.scale == 1 else slope_cV * self.scale

    def log_sum(self, logits_cV: jax.Array) -> jax.Array:
        """logsumexp over the whole vocabulary."""
        top = logits_cV.max(-1)
        if self.axis is None:
            return top + jnp.log(jnp.exp(logits_cV - top[:, None]).sum(-1))
        top = lax.pmax(top, self.axis)
        return top + jnp.log(lax.psum(jnp.exp(logits_cV - top[:, None]).sum(-1), self.axis))

    def target(self, logits_cV: jax.Array, targets_c: jax.Array) -> jax.Array:
        """Logits of the targets."""
        if self.axis is None:
            return jnp.take_along_axis(logits_cV, targets_c[:, None], axis=1)[:, 0]
        mine = self.is_target(logits_cV, targets_c)
        return lax.psum(jnp.where(mine, logits_cV, 0.0).sum(-1), self.axis)

    def is_target(self, logits_cV: jax.Array, targets_c: jax.Array) -> jax.Array:
        """Which logits are those of the targets."""
        width = logits_cV.shape[1]
        if self.axis is not None:
            targets_c = targets_c - lax.axis_index(self.axis) * width
        return jnp.arange(width) == targets_c[:, None]

    def whole(self, slope: jax.Array) -> jax.Array:
        """Adds up the parts that devices' vocabularies have in a gradient."""
        return slope if self.axis is None else lax.psum(slope, self.axis)


class _Rows(NamedTuple):
    """Inputs per row. Rows of weight zero are ignored."""

    targets: jax.Array
    weights: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(rule: LogitRule, hidden_TD, head_VD, targets, weights):
    def loss(logits_cV, piece):
        return (_weight_by_token(piece, rule.log_sum(logits_cV) - rule.target(logits_cV, piece.targets)),)

    (losses_T,) = _over_chunks(loss, rule, hidden_TD, head_VD, _Rows(targets, weights), (_no_losses(hidden_TD),))
    return losses_T


def _losses_fwd(rule: LogitRule, hidden_TD, head_VD, targets, weights):
    # weight = mantissa · 2^exponent. The stored gradient is scaled by the mantissa, from 1/2 to 1, so it does not
    # underflow in float16 for any batch size. Backward multiplies by the power of two, which is exact.
    mantissa, exponent = jnp.frexp(weights)

    def loss_and_slope(logits_cV, piece):
        rows, mantissa = piece
        losses_c, slope_cV = _loss_and_slope(rule, logits_cV, rows, mantissa)
        slope_cD = product(slope_cV.astype(hidden_TD.dtype), head_VD)
        counts = (rows.weights != 0)[:, None]
        return losses_c, jnp.where(counts, slope_cD, 0.0).astype(hidden_TD.dtype)

    empty = (_no_losses(hidden_TD), jnp.zeros_like(hidden_TD))
    rows = _Rows(targets, weights)
    losses_T, slope_TD = _over_chunks(loss_and_slope, rule, hidden_TD, head_VD, rows, empty, extra=mantissa)
    # The head is not a residual: a pipeline stage would copy it for every microbatch in flight.
    return losses_T, (rule.whole(slope_TD), weights != 0, exponent)


def _loss_and_slope(rule: LogitRule, logits_cV, rows: _Rows, mantissa) -> tuple[jax.Array, jax.Array]:
    """The weighted losses, and the gradients of the products with the head, times the mantissa of the weight."""
    log_sum = rule.log_sum(logits_cV)
    losses_c = _weight_by_token(rows, log_sum - rule.target(logits_cV, rows.targets))
    is_target = rule.is_target(logits_cV, rows.targets)
    slope_cV = (jnp.exp(logits_cV - log_sum[:, None]) - is_target) * mantissa[:, None]
    return losses_c, rule.slope(slope_cV, logits_cV)


def _losses_bwd(rule, residuals, cotangent_T):
    del rule  # unused: the gradient is ready
    slope_TD, counts, exponent = residuals
    return scaled_slope(slope_TD, counts, exponent, cotangent_T), None, None, None


def scaled_slope(slope_TD: jax.Array, counts: jax.Array, exponent: jax.Array, cotangent_T: jax.Array) -> jax.Array:
    """The gradient of the rows that count, in which forward left out a power of two of each."""
    factor_T1 = jnp.ldexp(cotangent_T, exponent)[:, None]
    return jnp.where(counts[:, None], slope_TD.astype(jnp.float32) * factor_T1, 0.0).astype(slope_TD.dtype)


_losses.defvjp(_losses_fwd, _losses_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replaced_losses(
    rule: LogitRule, owners: tuple[RowsOf, ...], hidden_TD, head_VD, targets, weights, values_DC, row_adapter
):
    def loss(logits_cV, piece):
        rows, (hidden_c, adapter_c) = piece
        logits_cV, _ = _with_rows(rule, owners, logits_cV, hidden_c, adapter_c, values_DC)
        return (_weight_by_token(rows, rule.log_sum(logits_cV) - rule.target(logits_cV, rows.targets)),)

    rows, extra = _Rows(targets, weights), (hidden_TD, row_adapter)
    (losses_T,) = _over_chunks(loss, rule, hidden_TD, head_VD, rows, (_no_losses(hidden_TD),), extra=extra)
    return losses_T


def _replaced_fwd(rule: LogitRule, owners, hidden_TD, head_VD, targets, weights, values_DC, row_adapter):
    mantissa, exponent = jnp.frexp(weights)  # as in `_losses_fwd`

    def loss_and_slopes(logits_cV, piece):
        rows, (mantissa, hidden_c, adapter_c) = piece
        logits_cV, tokens_cC = _with_rows(rule, owners, logits_cV, hidden_c, adapter_c, values_DC)
        losses_c, slope_cV = _loss_and_slope(rule, logits_cV, rows, mantissa)
        mine = tokens_cC < logits_cV.shape[1]
        slope_cC = jnp.where(mine, jnp.take_along_axis(slope_cV, jnp.where(mine, tokens_cC, 0), 1), 0.0)
        slope_cV = slope_cV.at[jnp.arange(len(slope_cV))[:, None], tokens_cC].set(0.0, mode="drop")
        slope_cD = product(slope_cV.astype(hidden_TD.dtype), head_VD)
        slope_cD += hidden_gradient(slope_cC, values_DC.astype(hidden_c.dtype), owners, adapter_c)
        counts = (rows.weights != 0)[:, None]
        slopes = jnp.where(counts, slope_cD, 0.0).astype(hidden_TD.dtype), jnp.where(counts, slope_cC, 0.0)
        return losses_c, *slopes

    columns = jnp.zeros((hidden_TD.shape[0], values_DC.shape[1]), jnp.float32)
    empty = (_no_losses(hidden_TD), jnp.zeros_like(hidden_TD), columns)
    rows, extra = _Rows(targets, weights), (mantissa, hidden_TD, row_adapter)
    losses_T, slope_TD, slope_TC = _over_chunks(loss_and_slopes, rule, hidden_TD, head_VD, rows, empty, extra=extra)
    return losses_T, (slope_TD, weights != 0, exponent, slope_TC, hidden_TD, row_adapter, values_DC)


def _replaced_bwd(rule, owners, residuals, cotangent_T):
    del rule  # unused
    slope_TD, counts, exponent, slope_TC, hidden_TD, row_adapter, values_DC = residuals
    hidden_bar = scaled_slope(slope_TD, counts, exponent, cotangent_T)
    slope_TC = jnp.where(counts[:, None], slope_TC * jnp.ldexp(cotangent_T, exponent)[:, None], 0.0)
    values_bar = value_gradients(hidden_TD, slope_TC, owners, row_adapter, counts).astype(values_DC.dtype)
    return hidden_bar, None, None, None, values_bar, None


_replaced_losses.defvjp(_replaced_fwd, _replaced_bwd)


def _with_rows(rule: LogitRule, owners, logits_cV, hidden_c, adapter_c, values_DC):
    """Returns the logits with those of trained rows, and the token of each, [c, C]; V in rows of other adapters."""
    tokens_cC = replaced_tokens(owners, adapter_c, missing=logits_cV.shape[1])
    logits_cC = rule.logits(product(hidden_c, values_DC.astype(hidden_c.dtype)))
    row = jnp.arange(len(logits_cV))[:, None]
    return logits_cV.at[row, tokens_cC].set(logits_cC, mode="drop"), tokens_cC


class _Pairs(NamedTuple):
    """Inputs of divergences per row."""

    weights: jax.Array
    teacher: jax.Array
    betas: jax.Array
    temperatures: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergences(rule: LogitRule, hidden_TD, teacher_TD, head_VD, weights, betas, temperatures):
    return _divergences_fwd(rule, hidden_TD, teacher_TD, head_VD, weights, betas, temperatures)[0]


def _divergences_fwd(rule: LogitRule, hidden_TD, teacher_TD, head_VD, weights, betas, temperatures):
    mantissa, exponent = jnp.frexp(weights)

    def loss_and_slope(logits_cV, piece):
        rows, (mantissa, pairs) = piece
        teacher_cV = rule.logits(product(pairs.teacher, head_VD.T))
        apart = partial(_generalised_jsd, teacher_cV=teacher_cV, betas=pairs.betas, temperatures=pairs.temperatures)
        values_c, pull = jax.vjp(apart, logits_cV)
        (slope_cV,) = pull(mantissa)
        slope_cV = rule.slope(slope_cV, logits_cV)
        slope_cD = product(slope_cV.astype(hidden_TD.dtype), head_VD)
        counts = (rows.weights != 0)[:, None]
        return _weight_by_token(rows, values_c), jnp.where(counts, slope_cD, 0.0).astype(hidden_TD.dtype)

    empty = (_no_losses(hidden_TD), jnp.zeros_like(hidden_TD))
    rows = _Rows(jnp.zeros_like(weights, jnp.int32), weights)
    extra = mantissa, _Pairs(weights, teacher_TD, betas, temperatures)
    values_T, slope_TD = _over_chunks(loss_and_slope, rule, hidden_TD, head_VD, rows, empty, extra=extra)
    return values_T, (slope_TD, weights != 0, exponent)


def _divergences_bwd(rule, residuals, cotangent_T):
    del rule  # unused
    slope_TD, counts, exponent = residuals
    return scaled_slope(slope_TD, counts, exponent, cotangent_T), None, None, None, None, None


_divergences.defvjp(_divergences_fwd, _divergences_bwd)


def _generalised_jsd(logits_cV, *, teacher_cV, betas, temperatures):
    log_p = jax.nn.log_softmax(logits_cV / temperatures[:, None])
    log_q = jax.nn.log_softmax(teacher_cV / temperatures[:, None])
    inside = jnp.clip(betas, 1e-6, 1 - 1e-6)[:, None]  # of log β and log (1 - β); the ends are chosen below
    log_m = jnp.logaddexp(log_p + jnp.log1p(-inside), log_q + jnp.log(inside))
    forward, reverse = _divergence(log_q, log_p), _divergence(log_p, log_q)
    between = betas * _divergence(log_q, log_m) + (1 - betas) * _divergence(log_p, log_m)
    return jnp.where(betas == 0, forward, jnp.where(betas == 1, reverse, between))


def _divergence(log_p_cV, log_q_cV):
    """KL(p ‖ q)."""
    return (jnp.exp(log_p_cV) * (log_p_cV - log_q_cV)).sum(-1)


def _no_losses(hidden_TD: jax.Array) -> jax.Array:
    return jnp.zeros(hidden_TD.shape[:1], jnp.float32)


def _over_chunks(
    function, rule: LogitRule, hidden_TD, head_VD, rows: _Rows, out: tuple[jax.Array, ...], extra: Any = None
) -> tuple[jax.Array, ...]:
    """`over_chunks` of weighted rows. With `extra`, more arrays with an entry per row, it gets (rows, extra)."""
    counts = rows.weights != 0
    # Stable sort: weighted rows come first in their order, so sums do not depend on the rows between them.
    order, by_row = jnp.argsort(~counts, stable=True), rows if extra is None else (rows, extra)
    return over_chunks(function, rule, hidden_TD, head_VD, by_row, order, (0, num_chunks(rule, counts)), out)


def num_chunks(rule: LogitRule, counts: jax.Array) -> jax.Array:
    """Chunks that the rows that count fill."""
    return (counts.sum(dtype=jnp.int32) + rule.rows - 1) // rule.rows


def over_chunks(
    function: Callable, rule: LogitRule, hidden_TD, head_VD, by_row: Any, order: jax.Array, chunks: tuple[Any, Any],
    out: Any,
) -> Any:  # fmt: skip
    """Applies `function(logits, rows)` to chunks of rows in an order and scatters its results into `out`.

    Args:
        by_row: arrays with one entry per row.
        order: of all rows.
        chunks: first chunk and end.
    """
    T, c = hidden_TD.shape[0], rule.rows
    order = jnp.pad(order, (0, -T % c), constant_values=T)

    def step(i, out):
        numbers = lax.dynamic_slice_in_dim(order, i * c, c)
        take = partial(jnp.take, indices=numbers, axis=0, mode="clip")
        # The transpose is fused into the product here. Before the loop, XLA would copy the whole table for every
        # microbatch.
        logits_cV = rule.logits(product(take(hidden_TD), head_VD.T))
        results = function(logits_cV, jax.tree.map(take, by_row))
        return tuple(buffer.at[numbers].set(result, mode="drop") for buffer, result in zip(out, results, strict=True))

    return lax.fori_loop(*chunks, step, out)


def _weight_by_token(piece: _Rows, nll_c: jax.Array) -> jax.Array:
    return jnp.where(piece.weights != 0, piece.weights * nll_c, 0.0)
