"""Adds adapters to stages that train. The state of the other adapters stays bitwise equal.

For adapters that fit into no free place, new stages for all adapters replace the old ones, on the same frozen weights.
The states of the old adapters are gathered first and loaded onto the new stages, where new ones start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.peft.folder import Arrays
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.session.base import stages_for
from lorafusion_jax.session.distant_stage import AnyStage, local_stages
from lorafusion_jax.session.first_weights import starting_weights
from lorafusion_jax.session.links import Links
from lorafusion_jax.session.state import gather, load_states, states_of


def grow_stages(
    stages: Sequence[AnyStage], links: Links, config: JobConfig, weights: Mapping[int, Arrays]
) -> list[AnyStage]:
    """Returns stages with more adapters, the new ones at their first step. Collective over processes.

    Args:
        stages: with no work in flight. Their trainable arrays are deleted, so that the devices never hold both.
        config: of all adapters of the run.
        weights: initial weights of new adapters from a warm start, by position.
    """
    states = _states(stages, links)
    for stage in local_stages(stages).values():
        stage.lora, stage.constants, stage.sums, stage.optimizers, stage.totals = {}, {}, {}, {}, None
    more = stages_for(stages, config)
    specs = dict(more[0].occupied)
    starts = {number: weights[index] for number, index in enumerate(specs) if index in weights}
    lora = starting_weights(more[0].parts.leaves, list(specs.values()), starts)
    for stage in local_stages(more).values():
        stage.start(lora)
    # The states of new adapters are those that `start` gave them; old ones get theirs back.
    load_states(more, _states(more, links) | states)
    return more


def _states(stages: Sequence[AnyStage], links: Links) -> dict[str, AdapterState]:
    """Returns the states of all adapters, with copies of what a host array may view of a device array.

    Views would live on with the device arrays, one more at every addition.
    """
    states = states_of(gather(stages, links), {spec.name: place for place, spec in stages[0].occupied})
    return {name: replace(state, optimizer=jax.tree.map(np.array, state.optimizer)) for name, state in states.items()}
