"""More adapters on stages that train: the others keep what they have, bit for bit.

Stages for all adapters take the place of the stages there are, on the same frozen weights. What was gathered of the
others is written over what the new stages begin with. New adapters come last, and ranks and targets only grow, so all
of it lies at the beginning of every axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lorafusion_jax.checkpoint.peft import Arrays
from lorafusion_jax.checkpoint.warm_start import start_from
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.modules.spec import AdapterSpec
from lorafusion_jax.pipeline.base import stages_for
from lorafusion_jax.pipeline.stage import Stage
from lorafusion_jax.pipeline.state import gather, scatter


def grown(
    stages: Sequence[Stage], config: JobConfig, specs: Sequence[AdapterSpec], weights: Mapping[int, Arrays]
) -> list[Stage]:
    """Stages with more adapters, the new ones at their first step; every process must call it.

    Args:
        stages: with nothing under way; they lose their changing arrays, so that the devices never hold both.
        config, specs: of all adapters, in stacking order.
        weights: with which new adapters begin, by place.
    """
    held = gather(stages)
    for stage in stages:
        stage.lora, stage.sums, stage.optimizers, stage.totals = {}, {}, {}, None
    more = stages_for(stages, config, specs)
    lora = start_from(more[0].first_lora(), weights)
    for stage in more:
        stage.start(lora)
    fresh = gather(more)
    optimizers = fresh.pop("optimizers") | held.pop("optimizers")
    scatter(more, _with(held, fresh) | {"optimizers": optimizers})
    return more


def _with(held: Any, fresh: Any) -> Any:
    """Arrays of all adapters with those of the first ones written over their beginning."""
    if isinstance(fresh, dict):
        return {name: _with(held[name], leaf) if name in held else leaf for name, leaf in fresh.items()}
    array = np.array(fresh)
    array[tuple(slice(size) for size in np.shape(held))] = held
    return array
