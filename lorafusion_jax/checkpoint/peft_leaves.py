"""Extracts one adapter from the stacked LoRA weights of a decoder, or inserts it, on the host.

A adapters · K in · N out · R padded rank · r an adapter's rank · L stacked layers
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from lorafusion_jax.adapters.kind import adapter_kind
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.errors import CheckpointError, first_few

LAYERS = "layers"
SHOWN = 8  # tensors that a message names
type Arrays = dict[str, tuple[Float[np.ndarray, "K r"], Float[np.ndarray, "r N"]]]
type Leaves = Mapping[str, Any]  # numpy or jax arrays, see `take_adapter`


def take_adapter(lora_leaves: Leaves, spec: AdapterSpec, index: int) -> Arrays:
    """Extracts one adapter, layer by layer, at its own rank and targets. Its kind converts its tensors to A and B.

    Args:
        lora_leaves: "layers.0.self_attn.q_proj.lora_a" → [A, K, R] and "….lora_b" → [A, R, N], or stacked
            "layers.self_attn.q_proj.lora_a" → [L, A, K, R]; numpy or jax arrays. Other kinds have more leaves.
        spec: the adapter.
        index: its place among the A adapters.

    Returns:
        "layers.0.self_attn.q_proj" → (a [K, r], b [r, N]), float32.

    Raises:
        CheckpointError: `peft.no-weights`, no weights belong to a target.
    """
    kind = adapter_kind(spec.kind)
    arrays: Arrays = {}
    for path, places in _projections(lora_leaves).items():
        if path.rsplit(".", 1)[-1] not in spec.targets:
            continue
        whole = {leaf.name: _host(lora_leaves[f"{path}.{leaf.name}"]) for leaf in kind.leaves}
        for unrolled, place in places.items():
            own = {leaf.name: leaf.at_rank(whole[leaf.name][(*place, index)], spec.rank)[None] for leaf in kind.leaves}
            a_1Kr, b_1rN = kind.low_rank(own)
            arrays[unrolled] = (a_1Kr[0].copy(), b_1rN[0].copy())
    if not arrays:
        known = sorted({path.rsplit(".", 1)[-1] for path in _projections(lora_leaves)})
        raise CheckpointError(
            "peft.no-weights",
            f"adapter {spec.name} targets {', '.join(spec.targets)}, but no weights belong to a layer of that name.",
            why=f"the weights belong to {', '.join(known) or 'no layer'}",
            fix="name its targets by the last part of a layer's path, e.g. q_proj",
        )
    return dict(sorted(arrays.items(), key=lambda item: _order(item[0])))


def put_adapter(lora_leaves: Leaves, index: int, arrays: Arrays) -> dict[str, np.ndarray]:
    """Inserts A and B of one LoRA adapter into the stacked weights. Weights that it lacks become zero.

    Other adapters stay bitwise equal.

    Args:
        lora_leaves: as in `take_adapter`; not changed.
        index: the adapter's place.
        arrays: from `read_adapter` or `take_adapter`.

    Returns:
        All leaves. Those of A and B are new numpy arrays.

    Raises:
        CheckpointError: `peft.other-base` when layers or shapes do not fit this model.
    """
    projections = _projections(lora_leaves)
    places = {unrolled: (path, place) for path, found in projections.items() for unrolled, place in found.items()}
    _check_fit(lora_leaves, places, arrays)
    leaves = dict(lora_leaves)
    for path in projections:
        for leaf in ("lora_a", "lora_b"):
            changed = np.array(lora_leaves[f"{path}.{leaf}"])
            changed[..., index, :, :] = 0
            leaves[f"{path}.{leaf}"] = changed
    for unrolled, (a_Kr, b_rN) in arrays.items():
        path, place = places[unrolled]
        leaves[f"{path}.lora_a"][(*place, index)][:, : a_Kr.shape[1]] = a_Kr
        leaves[f"{path}.lora_b"][(*place, index)][: b_rN.shape[0]] = b_rN
    return leaves


def _check_fit(lora_leaves: Leaves, places: Mapping[str, tuple[str, tuple[int, ...]]], arrays: Arrays) -> None:
    problems = [f"{path} is not in the model" for path in arrays if path not in places]
    for path, (a_Kr, b_rN) in arrays.items():
        if path not in places:
            continue
        (in_features, rank), out_features = (
            lora_leaves[f"{places[path][0]}.lora_a"].shape[-2:],
            lora_leaves[f"{places[path][0]}.lora_b"].shape[-1],
        )
        if (a_Kr.shape[0], b_rN.shape[1]) != (in_features, out_features):
            problems.append(
                f"{path} is {a_Kr.shape[0]} → {b_rN.shape[1]}, the model has {in_features} → {out_features}"
            )
        elif a_Kr.shape[1] > rank:
            problems.append(f"{path} has rank {a_Kr.shape[1]}, the model has room for {rank}")
    names = {path.rsplit(".", 1)[-1] for path in arrays}
    problems += [
        f"the adapter has no {path}" for path in places if path.rsplit(".", 1)[-1] in names and path not in arrays
    ]
    if problems:
        raise CheckpointError(
            "peft.other-base",
            "the adapter was made for another base model.",
            where=first_few(problems, SHOWN, "; "),
            fix="use the base model that the adapter was trained on, or train a new adapter",
        )


def _projections(lora_leaves: Leaves) -> dict[str, dict[str, tuple[int, ...]]]:
    """Lists the projections: path of the leaf → {path with the layer's number: index before the adapter axis}."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in lora_leaves:
        path, leaf = name.rsplit(".", 1)
        if leaf != "lora_a":
            continue
        shape = lora_leaves[name].shape
        found[path] = (
            {path: ()}
            if len(shape) == 3
            else {path.replace(f"{LAYERS}.", f"{LAYERS}.{layer}.", 1): (layer,) for layer in range(shape[0])}
        )
    return found


def _host(leaf) -> np.ndarray:
    return np.asarray(leaf, np.float32)


def _order(path: str) -> tuple:
    return tuple((part.isdigit(), int(part) if part.isdigit() else part) for part in path.split("."))
