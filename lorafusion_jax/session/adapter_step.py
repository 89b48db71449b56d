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
from jax import Array

from lorafusion_jax.config.schema import OptimSettings
from lorafusion_jax.optim.step import Group, Hyper, clipped, transformation
from lorafusion_jax.session import leaves as lv
from lorafusion_jax.session.leaves import Columns, Leaves, Own, Place

Totals = dict[str, Array]  # "loss" and metrics of each adapter, [R, A]


class BatchSummary(NamedTuple):
    """Summary of an adapter's closed global batch on one stage; float32 scalars."""

    squares: Array  # Σ gradient² over the stage
    finite: Array  # 1 if all gradients are finite and no earlier step of the adapter was refused here
    loss: Array  # on the last stage; 0 elsewhere
    metrics: dict[str, Array]  # metrics of all objectives, on the last stage; empty elsewhere

    @property
    def without_metrics(self) -> BatchSummary:
        """The part that a step needs; it has the same structure on every stage."""
        return self._replace(metrics={})


def close_batch(
    columns: Mapping[str, Columns], own_columns: Own, twins: frozenset[str], adapter: Place, sums: Leaves,
    totals: Totals | None, alive: Array,
):  # fmt: skip
    """See `AdapterPrograms.close_batch`. Squares of `twins` are counted by `join_twins`."""
    index = adapter.index
    adapter_sums = lv.take(sums, columns, own_columns, adapter.first, lead=lv.SUMS)
    # Each device has summed by itself; gradients are exchanged here, once per global batch.
    gradient = {name: leaf.sum(0) for name, leaf in adapter_sums.items()}
    finite = _finite_leaves(gradient)
    square_sums = [jnp.sum(jnp.square(gradient[name])) for name in sorted(gradient) if name not in twins]
    squares = jnp.sum(jnp.stack(square_sums)) if square_sums else jnp.zeros(())
    mine = jax.tree.map(lambda total: total[:, index].sum(), totals or {})
    loss = mine.pop("loss", jnp.zeros(()))
    summary = BatchSummary(squares, (jnp.all(finite) & alive[index]).astype(jnp.float32), loss, mine)
    zero_totals = jax.tree.map(lambda total: total.at[:, index].set(0.0), totals)
    # Only this adapter's part is cleared: other adapters may be in the middle of their batches.
    zeros = jax.tree.map(jnp.zeros_like, adapter_sums)
    return gradient, summary, finite, lv.put(sums, columns, adapter.first, zeros, lead=lv.SUMS), zero_totals


def join_twins(embed: Array, head: Array, summary: BatchSummary) -> tuple[Array, BatchSummary]:
    """See `AdapterPrograms.join_twins`."""
    total = embed + head
    squares = summary.squares + jnp.sum(jnp.square(total))
    return total, summary._replace(squares=squares, finite=summary.finite * jnp.all(jnp.isfinite(total)))


def step(
    columns: Mapping[str, Columns], own_columns: Own, optim: OptimSettings, adapter: Place, lora: Leaves,
    gradient: Leaves, optimizer: Any, alive: Array, summaries: tuple[BatchSummary, ...], numbers: Hyper,
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
    weights = lv.take(lora, columns, own_columns, adapter.first)
    changes, stepped = transformation(optim, numbers, groups(columns, own_columns)).update(gradient, optimizer, weights)
    moved = optax.apply_updates(weights, changes)
    finite = jnp.append(_finite_leaves(moved), _all_finite(stepped))
    healthy &= jnp.all(finite)
    # Selected, so that a refused step leaves every bit as it was, also where the new value is NaN.
    moved, stepped = jax.tree.map(partial(jnp.where, healthy), (moved, stepped), (weights, optimizer))
    # With one stage no other can refuse the step, so nothing is ever put back.
    before = weights if len(summaries) > 1 else None
    return lv.put(lora, columns, adapter.first, moved), stepped, alive.at[adapter.index].set(healthy), finite, before


def write(
    columns: Mapping[str, Columns], owned: Own, adapter: Place, lora: Leaves, sums: Leaves,
    totals: Totals | None, alive: Array, new_weights: Leaves,
):  # fmt: skip
    """See `AdapterPrograms.write`."""
    zeros = jax.tree.map(jnp.zeros_like, lv.take(sums, columns, owned, adapter.first, lead=lv.SUMS))
    return (
        lv.put(lora, columns, adapter.first, new_weights),
        lv.put(sums, columns, adapter.first, zeros, lead=lv.SUMS),
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


def groups(columns: Mapping[str, Columns], own_columns: Own) -> dict[str, Group]:
    """Returns how the optimizer treats each leaf of an adapter."""
    leaves = {name: columns[name].leaf for name, _ in own_columns}
    return {name: Group(leaf.lr_group, leaf.decay) for name, leaf in leaves.items()}


def put_back(columns: Mapping[str, Columns], adapter: Place, lora: Leaves, earlier: Leaves, alive: Array):
    """See `AdapterPrograms.put_back`."""
    return lv.put(lora, columns, adapter.first, earlier), alive.at[adapter.index].set(False)


def _finite_leaves(leaves: Any) -> Array:
    """Whether all of a leaf is finite, for each leaf in order of names."""
    finite = [jnp.all(jnp.isfinite(leaves[name])) for name in sorted(leaves)]
    return jnp.stack(finite) if finite else jnp.ones(0, bool)


def _all_finite(tree: Any) -> Array:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in floats])) if floats else jnp.bool_(True)
