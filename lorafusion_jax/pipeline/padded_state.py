"""Reads checkpoints of earlier versions, which padded all adapters to one rank. Later saves use the form of `state`.

Their leaves are [L, A, K, R] with the largest rank R of a projection, their sums [replicas, L, A, K, R].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lorafusion_jax.adapters.kind import leaves_of
from lorafusion_jax.adapters.spec import bank_rank
from lorafusion_jax.layout.layer import LAYER
from lorafusion_jax.pipeline.leaves import LAYERS, own_names
from lorafusion_jax.pipeline.stage import Stage
from lorafusion_jax.pipeline.state import abstract_state


def abstract_padded_state(stages: Sequence[Stage], replicas: int) -> dict[str, Any]:
    """Returns shapes and dtypes of such a checkpoint, written with this number of replicas."""
    parts = stages[0].parts
    lora = {
        f"{LAYERS}{linear.path}.{leaf.name}": (
            parts.model.num_layers,
            len(parts.specs),
            *leaf.shape(*linear.shape(parts.model), rank),
        )
        for linear in LAYER.linears
        if (rank := bank_rank(parts.specs, linear.name))
        for leaf in leaves_of(tuple(spec.kind for spec in parts.specs))
    }
    return abstract_state(stages, replicas) | {
        "lora": {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in lora.items()},
        "sums": {name: jax.ShapeDtypeStruct((replicas, *shape), jnp.float32) for name, shape in lora.items()},
    }


def remove_padding(stages: Sequence[Stage], arrays: dict[str, Any]) -> dict[str, Any]:
    """Converts to the form of `state.scatter`: every adapter at its own rank and targets."""
    parts = stages[0].parts

    def own(leaves: dict[str, Any], axis: int) -> dict[str, dict[str, np.ndarray]]:
        return {
            spec.name: {
                name: parts.columns[name].leaf.at_rank(np.take(np.asarray(leaves[name]), index, axis), spec.rank)
                for name in own_names(parts.columns, spec)
            }
            for index, spec in enumerate(parts.specs)
        }

    return arrays | {"lora": own(arrays["lora"], 1), "sums": own(arrays["sums"], 2)}
