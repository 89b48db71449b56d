"""Adds adapters to stages that train. The state of the other adapters stays bitwise equal.

An adapter that fits into a free place is written there, by programs that exist. For others, new stages for all adapters
replace the old ones, on the same frozen weights. The state of the old adapters is gathered first, and then written over
the initial state of the new stages. New adapters come last, and ranks and targets only grow, so the old state is at the
beginning of every axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.checkpoint.peft import Arrays
from lorafusion_jax.checkpoint.warm_start import start_from
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.session.base import stages_for
from lorafusion_jax.session.distant_stage import AnyStage, local_stages
from lorafusion_jax.session.first_weights import first_weights
from lorafusion_jax.session.links import Links
from lorafusion_jax.session.state import gather, scatter


def fill_place(
    stages: Sequence[AnyStage], index: int, adapter: AdapterConfig, spec: AdapterSpec, warm_start: Arrays | None
) -> None:
    """Starts an adapter in a free place. Compiles nothing if an adapter of its rank, targets and optimizer is known.

    Args:
        index: position of the place.
        warm_start: its weights (None: the initial ones).
    """
    parts = stages[0].parts
    starts = {} if warm_start is None else {0: warm_start}
    first = {spec.name: first_weights(parts.leaves, spec)}
    leaves = start_from(first, starts, [spec], parts.model.some_layers)[spec.name]
    for stage in stages:
        stage.assign(index, adapter, spec)
    for stage in local_stages(stages).values():
        stage.write(index, leaves)


def grow_stages(
    stages: Sequence[AnyStage], links: Links, config: JobConfig, weights: Mapping[int, Arrays]
) -> list[AnyStage]:
    """Returns stages with more adapters, the new ones at their first step. Collective over processes.

    Args:
        stages: with no work in flight. Their trainable arrays are deleted, so that the devices never hold both.
        config: of all adapters of the run.
        weights: initial weights of new adapters from a warm start, by position.
    """
    held = gather(stages, links)
    for stage in local_stages(stages).values():
        stage.lora, stage.constants, stage.sums, stage.optimizers, stage.totals = {}, {}, {}, {}, None
    more = stages_for(stages, config)
    specs = dict(more[0].occupied)
    first = {spec.name: first_weights(more[0].parts.leaves, spec) for spec in specs.values()}
    starts = {number: weights[index] for number, index in enumerate(specs) if index in weights}
    lora = start_from(first, starts, list(specs.values()), more[0].parts.model.some_layers)
    for stage in local_stages(more).values():
        stage.start(lora)
    fresh = gather(more, links)
    # Copies: a host array may be a view of a device array, which would live on with it, one more at every addition.
    optimizers = fresh.pop("optimizers") | jax.tree.map(np.array, held.pop("optimizers"))
    scatter(more, _overlay(held, fresh) | {"optimizers": optimizers})
    return more


def _overlay(held: Any, fresh: Any) -> Any:
    """Writes the arrays of the old adapters over the beginning of those of all adapters."""
    if isinstance(fresh, dict):
        return {name: _overlay(held[name], leaf) if name in held else leaf for name, leaf in fresh.items()}
    array = np.array(fresh)
    array[tuple(slice(size) for size in np.shape(held))] = held
    return array
