"""The values that an adapter's leaves start from, on the host.

L layers · K in features · r rank · D model width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from lorafusion_jax.adapters.init import draw_leaf, init_layers, init_shared
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.adapters.tokens import TABLES
from lorafusion_jax.checkpoint.warm_start import start_from
from lorafusion_jax.layout.layer import Linear
from lorafusion_jax.peft.folder import Arrays
from lorafusion_jax.session.leaf_layout import LeafLayout
from lorafusion_jax.session.leaves import HEAD, LAYERS, SHARED, TOKENS


def starting_weights(
    layout: LeafLayout, specs: Sequence[AdapterSpec], warm_starts: Mapping[int, Arrays] | None = None
) -> Mapping[str, Mapping[str, np.ndarray]]:
    """Returns what adapters start from by name: their initial values, or those of a warm start by position."""
    return start_from(first_weights_of(layout, specs), warm_starts or {}, specs, layout.model.some_layers)


def first_weights_of(layout: LeafLayout, specs: Sequence[AdapterSpec]) -> dict[str, dict[str, Any]]:
    """Returns `first_weights` of adapters by name, drawn side by side: numpy draws without Python's lock."""
    with ThreadPoolExecutor() as threads:
        weights = threads.map(partial(first_weights, layout), specs)
        return dict(zip((spec.name for spec in specs), weights, strict=True))


def first_weights(layout: LeafLayout, spec: AdapterSpec) -> dict[str, Any]:
    """Returns the initial values of one adapter's leaves, numpy float32: leaf → [L, K, r] and so on.

    Those that depend on the frozen kernels are not final, see `StageState.start_from_base`.
    """
    linears = [linear for linear in layout.model.linears if linear.name in spec.targets]
    with ThreadPoolExecutor() as threads:
        by_linear = threads.map(partial(_first_layers, layout, spec), linears)
        projection_leaves = {name: array for leaves in by_linear for name, array in leaves.items()}
    shared = {f"{SHARED}{leaf}": array[None] for leaf, array in init_shared(spec, *layout.largest).items()}
    return projection_leaves | shared | _first_head(layout, spec) | _first_rows(layout, spec)


def _first_layers(layout: LeafLayout, spec: AdapterSpec, linear: Linear) -> dict[str, Any]:
    path, numbers = f"{LAYERS}{linear.path}", layout.model.layers_with(linear.path)
    leaves = init_layers(spec, path, *linear.shape, numbers, experts=linear.experts)
    return {f"{path}.{leaf}": array for leaf, array in leaves.items()}


def _first_head(layout: LeafLayout, spec: AdapterSpec) -> dict[str, Any]:
    leaves = {} if spec.head is None else spec.head.by_key
    shapes = {key: leaf.shape_in(layout.sizes(HEAD)) for key, leaf in leaves.items()}
    return {
        f"{HEAD}{key}": draw_leaf(leaf, spec.seed, f"{HEAD}{key}", shapes[key])[None] for key, leaf in leaves.items()
    }


def _first_rows(layout: LeafLayout, spec: AdapterSpec) -> dict[str, Any]:
    """Returns zeros for the rows of trainable tokens, which start as those of the base."""
    return {
        f"{TOKENS}{table}": np.zeros((1, layout.model.hidden_size, len(ids)), np.float32)
        for table in (TABLES if spec.tokens is not None else ())
        if (ids := layout.token_ids(spec, table))
    }


def starts_from_base(spec: AdapterSpec) -> bool:
    """Whether an adapter's initial values depend on the base."""
    return adapter_kind(spec.kind).start is not None or spec.tokens is not None
