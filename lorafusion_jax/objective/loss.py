"""Token losses of a packed microbatch, summed per adapter, without ever holding all logits.

The head is frozen, so the gradient of a row needs nothing but that row's logits: the forward pass makes it while the
logits are there, and the backward pass only scales it. That is two passes of the head's GEMM, where recomputing
logits in the backward takes three. Rows are taken in chunks, those that count first, and chunks without any are
skipped: prompts and padding cost nothing here.
Dims: `T` packed tokens · `D` model width · `V` vocabulary · `A` adapters · `c` rows a chunk.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from lorafusion_jax.objective.chunks import DEFAULT_CHUNK, chunk_rows


def adapter_losses(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    row_adapter: Int[Array, " T"],
    num_adapters: int,
    *,
    chunk: int = DEFAULT_CHUNK,
) -> Float[Array, " A"]:
    """Sums the weighted negative log-likelihoods of each adapter's rows.

    loss[k] = Σ_t weights[t] · (logsumexp(hidden[t] head) - (hidden[t] head)[targets[t]]),  over rows t of adapter k

    Rows of weight 0 or adapter -1 do not count, whatever they hold: NaN there, or in another adapter's rows, reaches
    neither the loss nor the gradient of an adapter. Only `hidden` has a gradient; the head is frozen (and its
    gradient is zero here).

    Args:
        hidden: after the final norm; products run in its dtype and add up in float32.
        head: output projection; the transpose of a checkpoint's table [V, D] is not copied.
        targets: the token to predict at each row.
        weights: float32; 0 for rows that teach nothing.
        row_adapter: adapter of each row, -1 for none.
        num_adapters: A.
        chunk: at most about `chunk` · T logits exist at once.

    Example:
        >>> row_adapter = jnp.array([0, 0, 1, -1])
        >>> losses = adapter_losses(jnp.zeros((4, 2)), jnp.ones((2, 8)), jnp.arange(4), jnp.ones(4), row_adapter, 2)
        >>> [round(float(loss), 4) for loss in losses]  # 2 log 8, log 8
        [4.1589, 2.0794]
    """
    return _losses(
        num_adapters,
        chunk_rows(hidden.shape[0], head.shape[1], chunk),
        hidden,
        head.T,
        _rows(targets, weights, row_adapter),
    )


def adapter_hits(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    row_adapter: Int[Array, " T"],
    num_adapters: int,
    *,
    chunk: int = DEFAULT_CHUNK,
) -> Float[Array, " A"]:
    """Sums the weights of each adapter's rows whose most likely token is the target: accuracy before the division.

    Arguments as `adapter_losses`; no gradient.
    """
    c = chunk_rows(hidden.shape[0], head.shape[1], chunk)
    rows = _rows(targets, weights, row_adapter)

    def hit(logits_cV: jax.Array, piece: _Rows) -> tuple[jax.Array]:
        return (jnp.where(logits_cV.argmax(-1) == piece.targets, piece.weights, 0.0),)

    (hits_T,) = _over_chunks(hit, c, hidden, head.T, rows, (jnp.zeros(hidden.shape[:1], jnp.float32),))
    return _per_adapter(hits_T, rows, num_adapters)


class _Rows(NamedTuple):
    """Per-row inputs; a row counts if its weight is not zero and it has an adapter."""

    targets: jax.Array
    weights: jax.Array
    adapter: jax.Array


def _rows(targets, weights, row_adapter) -> _Rows:
    adapter = jnp.asarray(row_adapter)
    weights = jnp.where(adapter >= 0, jnp.asarray(weights, jnp.float32), 0.0)
    return _Rows(jnp.asarray(targets), weights, adapter)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses(num_adapters, c, hidden_TD, head_VD, rows):
    def loss(logits_cV, piece):
        return (_weighted(piece, _log_sum(logits_cV) - _target(logits_cV, piece)),)

    (losses_T,) = _over_chunks(loss, c, hidden_TD, head_VD, rows, (jnp.zeros(hidden_TD.shape[:1], jnp.float32),))
    return _per_adapter(losses_T, rows, num_adapters)


def _losses_fwd(num_adapters, c, hidden_TD, head_VD, rows):
    def loss_and_slope(logits_cV, piece):
        log_sum = _log_sum(logits_cV)
        losses_c = _weighted(piece, log_sum - _target(logits_cV, piece))
        is_target = jnp.arange(logits_cV.shape[1]) == piece.targets[:, None]
        slope_cV = (jnp.exp(logits_cV - log_sum[:, None]) - is_target) * piece.weights[:, None]
        slope_cD = _product(slope_cV.astype(hidden_TD.dtype), head_VD)
        counts = (piece.weights != 0)[:, None]
        return losses_c, jnp.where(counts, slope_cD, 0.0).astype(hidden_TD.dtype)

    empty = (jnp.zeros(hidden_TD.shape[:1], jnp.float32), jnp.zeros_like(hidden_TD))
    losses_T, slope_TD = _over_chunks(loss_and_slope, c, hidden_TD, head_VD, rows, empty)
    # The head itself is no residual: a pipeline stage would copy it for every microbatch in flight.
    return _per_adapter(losses_T, rows, num_adapters), (slope_TD, rows)


def _losses_bwd(num_adapters, c, residuals, cotangent_A):
    del num_adapters, c  # unused: the slopes are ready
    slope_TD, rows = residuals
    counts = (rows.weights != 0)[:, None]
    factor_T1 = cotangent_A[jnp.maximum(rows.adapter, 0)][:, None]
    hidden_bar = jnp.where(counts, slope_TD.astype(jnp.float32) * factor_T1, 0.0).astype(slope_TD.dtype)
    return hidden_bar, None, None


_losses.defvjp(_losses_fwd, _losses_bwd)


def _over_chunks(
    function, c: int, hidden_TD, head_VD, rows: _Rows, out: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Applies `function(logits, rows)` to chunks of rows that count and scatters its per-row results into `out`."""
    T = hidden_TD.shape[0]
    pad = -T % c
    counts = rows.weights != 0
    # Stable: rows that count come first, in their order, so that sums do not depend on what lies between them.
    order = jnp.pad(jnp.argsort(~counts, stable=True), (0, pad), constant_values=T)

    def step(i, out):
        here = lax.dynamic_slice_in_dim(order, i * c, c)
        take = partial(jnp.take, indices=here, axis=0, mode="clip")
        # Transposed here, where a product takes it as it lies. Before the loop it is a copy of the whole table for
        # every microbatch: 1 GB and 0.56 ms with Llama-3.1-8B's on an H200.
        logits_cV = _product(take(hidden_TD), head_VD.T)
        piece = _Rows(*map(take, rows))
        return tuple(
            old.at[here].set(new, mode="drop") for old, new in zip(out, function(logits_cV, piece), strict=True)
        )

    num_chunks = (counts.sum(dtype=jnp.int32) + c - 1) // c
    return lax.fori_loop(0, num_chunks, step, out)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    # tf32, the default of GPUs for float32, would lose three digits of what float32 promises.
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)


def _log_sum(logits_cV: jax.Array) -> jax.Array:
    top = logits_cV.max(-1)
    return top + jnp.log(jnp.exp(logits_cV - top[:, None]).sum(-1))


def _target(logits_cV: jax.Array, piece: _Rows) -> jax.Array:
    return jnp.take_along_axis(logits_cV, piece.targets[:, None], axis=1)[:, 0]


def _weighted(piece: _Rows, nll_c: jax.Array) -> jax.Array:
    return jnp.where(piece.weights != 0, piece.weights * nll_c, 0.0)


def _per_adapter(values_T: jax.Array, rows: _Rows, num_adapters: int) -> jax.Array:
    mine_AT = rows.adapter == jnp.arange(num_adapters)[:, None]
    return jnp.where(mine_AT, values_T, 0.0).sum(axis=1)
