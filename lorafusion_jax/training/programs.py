"""The compiled programs of a run: sum gradients over a microbatch, step one adapter, evaluate.

T packed tokens · A adapters
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lorafusion_jax.config.schema import AdapterConfig, TrainSettings
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.models import Segments
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.modules.spec import AdapterSpec
from lorafusion_jax.objective import adapter_losses
from lorafusion_jax.training import leaves as lv
from lorafusion_jax.training.leaves import Leaves, Parts
from lorafusion_jax.training.optim import Hyper, transformation


class Sums(NamedTuple):
    """What an adapter's running global batch has gathered so far.

    Attributes:
        grads: gradient sums, float32, shaped like the trainable leaves.
        loss: float32 [A], Σ weight · token loss.
    """

    grads: Leaves
    loss: Array


class StepReport(NamedTuple):
    """What one optimizer step of one adapter tells; scalars on the device."""

    loss: Array
    grad_norm: Array
    finite: Array  # bool per leaf of the adapter, in order of names


class Programs:
    """Jitted functions of one run; shapes are the same in every slot, so each compiles once.

    Args:
        parts: the model, taken apart.
        adapters: configuration of each adapter, in stacking order.
        specs: the same adapters as the modules see them.
        settings: implementations and loss chunk.
    """

    def __init__(
        self, parts: Parts, adapters: Sequence[AdapterConfig], specs: Sequence[AdapterSpec], settings: TrainSettings
    ):
        self._join, self._adapters, self._specs, self._settings = parts.join, tuple(adapters), tuple(specs), settings
        self.accumulate = jax.jit(self._accumulate, donate_argnums=(1,))
        self.evaluate = jax.jit(self._evaluate)
        self._updates: dict[tuple, Any] = {}

    def start(self, lora: Leaves) -> Sums:
        """Empty sums."""
        return Sums(
            {name: jnp.zeros_like(leaf) for name, leaf in lora.items()}, jnp.zeros(len(self._specs), jnp.float32)
        )

    def init_optimizer(self, index: int, lora: Leaves) -> Any:
        """State of one adapter's optimizer at its first step."""
        return transformation(self._adapters[index].optim, Hyper(*[0.0] * 7)).init(
            lv.take(lora, self._specs[index], index)
        )

    def update(self, index: int, lora: Leaves, sums: Sums, optimizer: Any, numbers: Hyper):
        """Steps adapter `index` with its finished sums; nobody else is touched.

        A gradient that is not finite changes neither weights nor optimizer.

        Returns:
            (lora, sums with the adapter's part cleared, optimizer, StepReport)
        """
        spec, optim = self._specs[index], self._adapters[index].optim
        kind = (spec.rank, spec.targets, optim.name, optim.clip > 0)
        if kind not in self._updates:
            self._updates[kind] = jax.jit(partial(_update, spec, optim), donate_argnums=(1, 2, 3))
        return self._updates[kind](index, lora, sums, optimizer, numbers)

    def leaf_names(self, index: int, lora: Leaves) -> list[str]:
        """Leaves of one adapter in the order of `StepReport.finite`."""
        return sorted(name for name in lora if lv.projection(name) in self._specs[index].targets)

    def _accumulate(self, lora: Leaves, sums: Sums, frozen: Any, batch: Microbatch) -> tuple[Sums, Array]:
        def total(leaves: Leaves):
            losses = self._losses(leaves, frozen, batch, dropout=True)
            return jnp.sum(losses), losses

        grads, losses = jax.grad(total, has_aux=True)(lora)
        return Sums({name: sums.grads[name] + grads[name] for name in lora}, sums.loss + losses), losses

    def _evaluate(self, lora: Leaves, frozen: Any, batch: Microbatch) -> Array:
        return self._losses(lora, frozen, batch, dropout=False)

    def _losses(self, lora: Leaves, frozen: Any, batch: Any, *, dropout: bool) -> Array:  # a Microbatch of tracers
        model = self._join(lora, frozen)
        segments = Segments(ids=batch.segment_ids, offsets=batch.segment_offsets, lengths=batch.segment_lengths)
        row_key = batch.row_key if dropout and any(spec.dropout for spec in self._specs) else None
        context = LoRAContext.of(
            self._specs, batch.tile_adapter, row_key=row_key, implementation=self._settings.implementation
        )
        hidden_TD = model.hidden(batch.tokens, batch.positions, segments, context, attention=self._settings.attention)
        return adapter_losses(
            hidden_TD,
            model.head(),
            batch.targets,
            batch.weights,
            batch.row_adapter,
            len(self._specs),
            chunk=self._settings.loss_chunk,
        )


def _update(spec: AdapterSpec, optim, index, lora: Leaves, sums: Sums, optimizer: Any, numbers: Hyper):
    own, grads = lv.take(lora, spec, index), lv.take(sums.grads, spec, index)
    finite = jnp.stack([jnp.all(jnp.isfinite(grads[name])) for name in sorted(grads)])
    healthy = jnp.all(finite) & jnp.isfinite(sums.loss[index])
    changes, stepped = transformation(optim, numbers).update(grads, optimizer, own)
    moved = optax.apply_updates(own, changes)
    moved, stepped = jax.tree.map(partial(jnp.where, healthy), (moved, stepped), (own, optimizer))
    report = StepReport(sums.loss[index], optax.tree.norm(grads), finite)
    return lv.put(lora, index, moved), Sums(lv.clear(sums.grads, index), sums.loss.at[index].set(0.0)), stepped, report
