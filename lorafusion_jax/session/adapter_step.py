"""What happens to one adapter at the end of its global batch: its gradient is closed, and its weights step.

A adapters · R replicas
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from lorafusion_jax.config.schema import OptimSettings
from lorafusion_jax.optim.step import Hyper, clipped, transformation, zero_hyper
from lorafusion_jax.optim.table import optimizer as find_optimizer
from lorafusion_jax.session import leaves as lv
from lorafusion_jax.session.joined_leaves import JoinedLeaves
from lorafusion_jax.session.leaves import Columns, Leaves, Own, Place

Totals = dict[str, Array]  # "loss" and metrics of each adapter, [R, A]


class BatchSummary(NamedTuple):
    """Summary of an adapter's closed global batch on one stage; float32 scalars."""

    squares: Array  # Σ gradient² over the stage
    finite: Array  # 1 if all gradients are finite and no earlier step of the adapter was refused here
    loss: Array  # on the last stage; 0 elsewhere
    metrics: dict[str, Array]  # metrics of all objectives, on the last stage; empty elsewhere, and for `step`


def close_batch(
    columns: Mapping[str, Columns], own_columns: Own, joined: JoinedLeaves, twins: frozenset[str], adapter: Place,
    sums: Leaves, totals: Totals | None, alive: Array,
):  # fmt: skip
    """See `AdapterPrograms.close_batch`. Squares of `twins` are counted by `join_twins`."""
    index = adapter.index
    vectors = joined.join(lv.windows_of(sums, columns, own_columns, adapter.first, lead=lv.SUMS), lead=1)
    # Sums are cleared after they were read: otherwise XLA copies those of all adapters first.
    vectors, sums = lax.optimization_barrier((vectors, sums))
    # Each device has summed by itself; gradients are exchanged here, once per global batch.
    gradient = {name: vector.sum(0) for name, vector in vectors.items()}
    bad = joined.first_not_finite(gradient)
    square_sums = [jnp.sum(jnp.square(gradient[name])) for name in sorted(gradient) if name not in twins]
    squares = jnp.sum(jnp.stack(square_sums)) if square_sums else jnp.zeros(())
    metrics = jax.tree.map(lambda total: total[:, index].sum(), totals or {})
    loss = metrics.pop("loss", jnp.zeros(()))
    summary = BatchSummary(squares, ((bad > len(own_columns)) & alive[index]).astype(jnp.float32), loss, metrics)
    # Only this adapter's part is cleared: other adapters may be in the middle of their batches.
    zero_totals = jax.tree.map(lambda total: total.at[:, index].set(0.0), totals)
    return gradient, summary, bad, _clear(sums, columns, own_columns, adapter), zero_totals


def _clear(sums: Leaves, columns: Mapping[str, Columns], own_columns: Own, adapter: Place) -> Leaves:
    """Returns the sums with zeros for an adapter."""
    shapes = jax.eval_shape(lambda: lv.windows_of(sums, columns, own_columns, adapter.first, lead=lv.SUMS))
    zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
    return lv.put(sums, columns, adapter.first, zeros, lead=lv.SUMS)


def join_twins(embed: Array, head: Array, summary: BatchSummary) -> tuple[Array, BatchSummary]:
    """See `AdapterPrograms.join_twins`."""
    total = embed + head
    squares = summary.squares + jnp.sum(jnp.square(total))
    return total, summary._replace(squares=squares, finite=summary.finite * jnp.all(jnp.isfinite(total)))


def step(
    columns: Mapping[str, Columns], own_columns: Own, joined: JoinedLeaves, optim: OptimSettings, adapter: Place,
    lora: Leaves, gradient: Leaves, optimizer: Any, alive: Array, summaries: tuple[BatchSummary, ...], numbers: Hyper,
):  # fmt: skip
    """See `AdapterPrograms.step`."""
    healthy = alive[adapter.index]
    # Every stage has the summaries of all, so all decide alike here without asking one another.
    for summary in summaries:
        healthy &= (summary.finite == 1) & jnp.isfinite(summary.loss)
    if optim.clip > 0:  # by the norm over all stages; an infinite norm would make every gradient zero
        norm = jnp.sqrt(sum(summary.squares for summary in summaries))
        healthy &= jnp.isfinite(norm)
        gradient = clipped(gradient, norm, numbers.clip)
    weights = joined.join(lv.windows_of(lora, columns, own_columns, adapter.first))
    # Rounding would depend on the adapter's position, see `leaves.take`.
    weights = lax.optimization_barrier(weights)
    changes, stepped = _transform(joined, optim, numbers).update(gradient, optimizer, weights)
    moved: Any = optax.apply_updates(weights, changes)
    bad = joined.first_not_finite(moved, stepped)
    healthy &= bad > len(own_columns)
    # Selected, so that a refused step leaves every bit as it was, also where the new value is NaN.
    moved, stepped = jax.tree.map(partial(jnp.where, healthy), (moved, stepped), (weights, optimizer))
    # Or XLA repeats the selection in the write of every leaf.
    moved = lax.optimization_barrier(moved)
    # With one stage no other can refuse the step, so nothing is ever put back.
    before = weights if len(summaries) > 1 else None
    changed = lv.put(lora, columns, adapter.first, joined.split(moved))
    return changed, stepped, alive.at[adapter.index].set(healthy), bad, before


def first_optimizer(
    columns: Mapping[str, Columns], own_columns: Own, joined: JoinedLeaves, optim: OptimSettings, adapter: Place,
    lora: Leaves,
) -> Any:  # fmt: skip
    """See `AdapterPrograms.first_optimizer`."""
    weights = joined.join(lv.take(lora, columns, own_columns, adapter.first))
    return _transform(joined, optim, zero_hyper(optim)).init(weights)


def _transform(joined: JoinedLeaves, optim: OptimSettings, numbers: Hyper) -> optax.GradientTransformation:
    """Returns an adapter's optimizer of vectors. If shapes matter to it, it gets the leaves, which have one each."""
    built = transformation(optim, numbers, joined.groups)
    if find_optimizer(optim.name).elementwise:
        return built

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        changes: Any
        changes, stepped = built.update(joined.split(updates), state, joined.split(params))
        return joined.join(changes), stepped

    return optax.GradientTransformation(lambda params: built.init(joined.split(params)), update)


def write(
    columns: Mapping[str, Columns], own_columns: Own, adapter: Place, lora: Leaves, sums: Leaves,
    totals: Totals | None, alive: Array, new_weights: Leaves,
):  # fmt: skip
    """See `AdapterPrograms.write`."""
    return (
        lv.put(lora, columns, adapter.first, new_weights),
        _clear(sums, columns, own_columns, adapter),
        jax.tree.map(lambda total: total.at[:, adapter.index].set(0.0), totals),
        alive.at[adapter.index].set(True),
    )


def take_sums(
    columns: Mapping[str, Columns], own_columns: Own, adapter: Place, sums: Leaves, totals: Totals | None
) -> tuple[Leaves, Totals]:
    """See `AdapterPrograms.take_sums`."""
    adapter_sums = lv.take(sums, columns, own_columns, adapter.first, lead=lv.SUMS)
    return adapter_sums, {name: total[:, adapter.index] for name, total in (totals or {}).items()}


def put_sums(
    columns: Mapping[str, Columns], adapter: Place, sums: Leaves, totals: Totals | None, new_sums: Leaves,
    new_totals: Totals,
):  # fmt: skip
    """See `AdapterPrograms.put_sums`."""
    all_totals = {name: total.at[:, adapter.index].set(new_totals[name]) for name, total in (totals or {}).items()}
    return lv.put(sums, columns, adapter.first, new_sums, lead=lv.SUMS), None if totals is None else all_totals


def put_back(
    columns: Mapping[str, Columns], joined: JoinedLeaves, adapter: Place, lora: Leaves, earlier: Leaves, alive: Array
):
    """See `AdapterPrograms.put_back`."""
    return lv.put(lora, columns, adapter.first, joined.split(earlier)), alive.at[adapter.index].set(False)
