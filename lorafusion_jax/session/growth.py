"""Adds adapters to stages that train. The state of the other adapters stays bitwise equal.

For adapters that fit into no free place, new stages for all adapters replace the old ones, on the same frozen weights.
The state of the old adapters is gathered first, and then written over the initial state of the new stages. New adapters
come last, and ranks and targets only grow, so the old state is at the beginning of every axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lorafusion_jax.checkpoint.peft import Arrays
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.session.base import stages_for
from lorafusion_jax.session.distant_stage import AnyStage, local_stages
from lorafusion_jax.session.first_weights import starting_weights
from lorafusion_jax.session.links import Links
from lorafusion_jax.session.state import gather, scatter


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
    starts = {number: weights[index] for number, index in enumerate(specs) if index in weights}
    lora = starting_weights(more[0].parts.leaves, list(specs.values()), starts)
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
