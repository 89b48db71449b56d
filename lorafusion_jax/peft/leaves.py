"""Extracts one adapter from the stacked tensors of a decoder, or inserts it, on the host.

A adapters · K in · N out · R padded rank · r an adapter's rank · L stacked layers
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lorafusion_jax.adapters.init import SHARED
from lorafusion_jax.adapters.kind import AdapterKind, Head, Leaf, Sizes
from lorafusion_jax.adapters.patterns import Patterns
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import PLAIN, adapter_kind
from lorafusion_jax.adapters.tokens import TABLES, TokenRows
from lorafusion_jax.errors import CheckpointError, first_few
from lorafusion_jax.layout.layer import saved_path

LAYERS, HEAD, TOKENS = "layers", "head", "tokens"
NOT_PROJECTIONS = (SHARED, HEAD, TOKENS)
SHOWN = 8  # tensors that a message names
# "layers.0.self_attn.q_proj" → the kind's tensors in order, for LoRA (a [K, r], b [r, N]); "shared" → shared tensors;
# "head" → tensors of an objective's head; "tokens" → trained rows of the embedding, and of a head with its own
type Arrays = dict[str, tuple[np.ndarray, ...]]
type Leaves = Mapping[str, Any]  # numpy or jax arrays, see `take_adapter`
type SomeLayers = Mapping[str, Sequence[int]]  # see `take_adapter`


def take_adapter(lora_leaves: Leaves, spec: AdapterSpec, index: int, layers: SomeLayers | None = None) -> Arrays:
    """Extracts one adapter, layer by layer, at its own rank and targets.

    Args:
        lora_leaves: "layers.0.self_attn.q_proj.lora_a" → [A, K, R] and "….lora_b" → [A, R, N], or stacked
            "layers.self_attn.q_proj.lora_a" → [L, A, K, R]; numpy or jax arrays. Other kinds have other leaves, and
            shared ones are called "shared.NAME", [1, A, K, R], those of a head "head.KEY", [1, A, ...], and trained
            rows of tokens "tokens.embed" and "tokens.head", [1, A, D, C].
        spec: the adapter.
        index: its place among the A adapters.
        layers: numbers of the L layers, of stacked projections that not all layers have: "self_attn.q_proj" → (3, 7).

    Returns:
        "layers.0.self_attn.q_proj" → the tensors of its kind in order, float32; for LoRA (a [K, r], b [r, N]).

    Raises:
        CheckpointError: `peft.no-weights`, no weights belong to a target.
    """
    kind = adapter_kind(spec.kind)
    arrays: Arrays = {}
    projections = _projections(lora_leaves, kind, layers)
    for path, places in projections.items():
        if path.rsplit(".", 1)[-1] not in spec.targets:
            continue
        stacked = [_host(lora_leaves[f"{path}.{leaf.name}"]) for leaf in kind.of_projections]
        for layer_path, layer_index in places.items():
            if spec.patterns is not None and not spec.has(layer_path):
                continue
            pairs, rank = zip(kind.of_projections, stacked, strict=True), spec.rank_at(layer_path)
            arrays[layer_path] = tuple(leaf.at_rank(array[(*layer_index, index)], rank).copy() for leaf, array in pairs)
    if not arrays:
        names = sorted({path.rsplit(".", 1)[-1] for path in projections})
        raise CheckpointError(
            "peft.no-weights",
            f"adapter {spec.name} targets {', '.join(spec.targets)}, but no weights belong to a layer of that name.",
            why=f"the weights belong to {', '.join(names) or 'no layer'}",
            fix="name its targets by the last part of a layer's path, e.g. q_proj",
        )
    arrays = dict(sorted(arrays.items(), key=lambda item: _order(item[0])))
    if kind.shared:
        shared = [(leaf, _host(lora_leaves[f"{SHARED}.{leaf.name}"])[0, index]) for leaf in kind.shared]
        arrays[SHARED] = tuple(leaf.at_rank(array, spec.rank).copy() for leaf, array in shared)
    if spec.head is not None:
        arrays[HEAD] = tuple(_host(lora_leaves[f"{HEAD}.{key}"])[0, index].copy() for key in spec.head.by_key)
    if spec.tokens is not None:
        arrays[TOKENS] = tuple(_host(lora_leaves[f"{TOKENS}.{table}"])[0, index].copy() for table in spec.tokens.stored)
    return arrays


def put_adapter(
    lora_leaves: Leaves,
    index: int,
    arrays: Arrays,
    kind: str = PLAIN,
    head: Head | None = None,
    patterns: Patterns | None = None,
    layers: SomeLayers | None = None,
    tokens: TokenRows | None = None,
) -> dict[str, np.ndarray]:
    """Inserts the tensors of one adapter into the stacked ones. Those that it lacks become zero.

    Other adapters stay bitwise equal.

    Args:
        lora_leaves: as in `take_adapter`; not changed.
        index: the adapter's place.
        arrays: from `read_adapter` or `take_adapter`.
        kind: the adapter's kind.
        head: of its objective; it stays as it is if `arrays` have none.
        patterns: which projections have the adapter (None: all that its targets name).
        layers: as in `take_adapter`.
        tokens: its trainable tokens.

    Returns:
        All leaves. Those of the kind are new numpy arrays.

    Raises:
        CheckpointError: `peft.other-base` when layers or shapes do not fit this model.
    """
    table = adapter_kind(kind)
    projections = _projections(lora_leaves, table, layers)
    places = {
        layer_path: (path, layer_index)
        for path, layer_indices in projections.items()
        for layer_path, layer_index in layer_indices.items()
    }
    present = {path: at for path, at in places.items() if patterns is None or patterns.has(path)}
    _check_fit(lora_leaves, table, present, arrays)
    leaves = dict(lora_leaves)
    for name in _names(table, projections):
        changed = np.array(lora_leaves[name])
        leaf = _leaf_of(table, name)
        np.moveaxis(changed, changed.ndim - 1 - len(leaf.axes), 0)[index] = 0
        leaves[name] = changed
    for layer_path, tensors in arrays.items():
        if layer_path == HEAD:
            leaves |= _put_head(lora_leaves, index, tensors, head)
            continue
        if layer_path == TOKENS:
            leaves |= _put_rows(lora_leaves, index, tensors, tokens)
            continue
        path, layer_index = (SHARED, (0,)) if layer_path == SHARED else places[layer_path]
        group = table.shared if layer_path == SHARED else table.leaves_at(path)
        for leaf, tensor in zip(group, tensors, strict=True):
            into = leaves[f"{path}.{leaf.name}"][(*layer_index, index)]
            into[tuple(slice(size) for size in tensor.shape)] = tensor
    return leaves


def _put_head(
    lora_leaves: Leaves, index: int, tensors: Sequence[np.ndarray], head: Head | None
) -> dict[str, np.ndarray]:
    assert head is not None, "the tensors of a head were read for it"
    changed = {}
    for key, tensor in zip(head.by_key, tensors, strict=True):
        name = f"{HEAD}.{key}"
        changed[name] = _put_beside(lora_leaves[name], index, tensor, "head")
    return changed


def _put_rows(
    lora_leaves: Leaves, index: int, tensors: Sequence[np.ndarray], tokens: TokenRows | None
) -> dict[str, np.ndarray]:
    """Inserts trained rows of tokens. A tied head has those of the embedding."""
    assert tokens is not None, "the rows were read for these tokens"
    by_table = dict(zip(tokens.stored, tensors, strict=True))
    changed = {}
    for table in TABLES:
        name = f"{TOKENS}.{table}"
        if name not in lora_leaves:
            continue
        changed[name] = _put_beside(lora_leaves[name], index, by_table.get(table, tensors[0]), "rows of tokens")
    return changed


def _put_beside(leaf: Any, index: int, tensor: np.ndarray, part: str) -> np.ndarray:
    """A copy of a leaf beside the layers with an adapter's tensor in it."""
    changed = np.array(leaf)
    if tensor.shape != (shape := changed.shape[2:]):
        raise CheckpointError(
            "peft.other-base",
            f"the adapter's {part} has the shape {tensor.shape}, the model's {shape}.",
            fix="use the base model that the adapter was trained on",
        )
    changed[0, index] = tensor
    return changed


def with_adapter_axis(leaves: Leaves) -> dict[str, Any]:
    """Converts one adapter's leaves, "layers.self_attn.q_proj.lora_a" → [L, K, r], to the form of `take_adapter`."""
    return {name: array[:, None] for name, array in leaves.items()}


def as_exported(
    spec: AdapterSpec, arrays: Arrays, shapes: Mapping[str, tuple[int, int]] | None = None
) -> tuple[AdapterSpec, Arrays]:
    """Returns an adapter in the form of its PEFT folder. One of a kind that PEFT lacks becomes LoRA.

    Args:
        shapes: (K, N) by target or by path; needed if a kind shares tensors.

    Raises:
        CheckpointError: `peft.kind`, its kind is not a low-rank product.
    """
    exported, kind = exported_spec(spec), adapter_kind(spec.kind)
    sizes = {path: _shape_of(path, shapes) for path in arrays if path not in NOT_PROJECTIONS}
    if exported.kind == spec.kind:
        return spec, arrays if shapes is None else arrays | _shared_of_targets(kind, arrays, list(sizes.values()))
    folded: Arrays = {path: arrays[path] for path in (HEAD, TOKENS) if path in arrays}
    for path, shape in sizes.items():
        a_KC, b_CN = kind.low_rank(*tensors_at(spec, arrays, path, shape))
        factor = spec.scale_at(path) / exported.scale_at(path)
        b_CN = b_CN if math.isclose(factor, 1, rel_tol=1e-12) else b_CN * np.float32(factor)
        folded[path] = np.asarray(a_KC, np.float32), np.asarray(b_CN, np.float32)
    return exported, folded


def _shape_of(path: str, shapes: Mapping[str, tuple[int, int]] | None) -> tuple[int, int] | None:
    return None if shapes is None else shapes[path if path in shapes else path.rsplit(".", 1)[-1]]


def _shared_of_targets(kind: AdapterKind, arrays: Arrays, shapes: Sequence[tuple[int, int] | None]) -> Arrays:
    """Cuts shared tensors to the largest sizes of the adapter's targets, as PEFT has them."""
    if not kind.shared:
        return {}
    projection_shapes = [shape for shape in shapes if shape is not None]
    largest = {"K": max(shape[0] for shape in projection_shapes), "N": max(shape[1] for shape in projection_shapes)}
    return {SHARED: tuple(leaf.cut(array, largest) for leaf, array in zip(kind.shared, arrays[SHARED], strict=True))}


def exported_spec(spec: AdapterSpec) -> AdapterSpec:
    """The specification of an adapter's PEFT folder, see `as_exported`."""
    kind = adapter_kind(spec.kind)
    if kind.in_peft:
        return spec
    if not kind.exportable:
        raise CheckpointError("peft.kind", f"{spec.name}: an adapter of kind {spec.kind} has no form in PEFT.")
    times = kind.columns
    if kind.scale is None:
        factor = math.sqrt(times) if spec.rslora else times
        return _with_numbers(spec, times, spec.alpha * factor, lambda alpha: alpha * factor)
    rank = times * (spec.rank if spec.patterns is None else spec.patterns.rank)
    return _with_numbers(spec, times, spec.scale * (math.sqrt(rank) if spec.rslora else rank))


def _with_numbers(
    spec: AdapterSpec, times: int, alpha: float, alpha_of: Callable[[float], float] | None = None
) -> AdapterSpec:
    """The adapter as LoRA of `times` its ranks. Without `alpha_of`, projections have no alphas of their own."""
    patterns = spec.patterns and dataclasses.replace(
        spec.patterns,
        rank=times * spec.patterns.rank,
        alpha=alpha,
        ranks=tuple((name, times * rank) for name, rank in spec.patterns.ranks),
        alphas=tuple((name, alpha_of(number)) for name, number in spec.patterns.alphas) if alpha_of else (),
    )
    return dataclasses.replace(spec, kind=PLAIN, rank=times * spec.rank, alpha=alpha, patterns=patterns)


def tensors_at(
    spec: AdapterSpec, arrays: Arrays, path: str, shape: tuple[int, int] | None = None
) -> tuple[dict[str, np.ndarray], Sizes]:
    """Returns the tensors of a projection by name, shared ones cut to its sizes and rank, and the sizes.

    Args:
        shape: K and N (None: those of its own tensors).
    """
    kind = adapter_kind(spec.kind)
    tensors = dict(zip(kind.leaves_at(path), arrays[path], strict=True))
    size_by_axis = {
        axis: size for leaf, array in tensors.items() for axis, size in zip(leaf.axes, array.shape, strict=True)
    }
    num_in, num_out = (size_by_axis.get("K", 0), size_by_axis.get("N", 0)) if shape is None else shape
    shared_sizes = {axis: size for axis, size in (("K", num_in), ("N", num_out)) if size} | {"R": spec.rank_at(path)}
    shared = {
        leaf: leaf.cut(array, shared_sizes) for leaf, array in zip(kind.shared, arrays.get(SHARED, ()), strict=True)
    }
    sizes = Sizes(K=num_in, N=num_out, R=spec.rank_at(path), scale=np.float32(spec.scale_at(path)))
    return {leaf.name: array for leaf, array in (tensors | shared).items()}, sizes


def _check_fit(
    lora_leaves: Leaves, kind: AdapterKind, places: Mapping[str, tuple[str, tuple[int, ...]]], arrays: Arrays
) -> None:
    problems = [f"{path} is not in the model" for path in arrays if path not in places and path not in NOT_PROJECTIONS]
    for path, tensors in arrays.items():
        if path in places:
            problems += _misfits(lora_leaves, places[path][0], path, kind.leaves_at(path), tensors)
        elif path == SHARED:
            problems += _misfits(lora_leaves, SHARED, path, kind.shared, tensors)
    names = {path.rsplit(".", 1)[-1] for path in arrays if path not in NOT_PROJECTIONS}
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


def _misfits(
    lora_leaves: Leaves, leaf_path: str, path: str, leaves: Sequence[Leaf], tensors: Sequence[np.ndarray]
) -> list[str]:
    """Compares the tensors of a projection with the model's."""
    folder_sizes, model_sizes = {}, {}
    for leaf, tensor in zip(leaves, tensors, strict=True):
        folder_sizes |= dict(zip(leaf.axes, tensor.shape, strict=True))
        shape = lora_leaves[f"{leaf_path}.{leaf.name}"].shape
        model_sizes |= dict(zip(leaf.axes, shape[len(shape) - len(leaf.axes) :], strict=True))
    if path == SHARED:
        larger = [axis for axis in folder_sizes if folder_sizes[axis] > model_sizes[axis]]
        return [
            f"its shared tensors have {axis} = {folder_sizes[axis]}, the model has {model_sizes[axis]}"
            for axis in larger
        ]
    if folder_sizes.get("E") != model_sizes.get("E"):
        return [f"{path} has {folder_sizes.get('E')} experts, the model has {model_sizes.get('E')}"]
    if any(folder_sizes.get(axis) != model_sizes.get(axis) for axis in "KN"):
        shapes = (
            " → ".join(str(sizes[axis]) for axis in "KN" if axis in sizes) for sizes in (folder_sizes, model_sizes)
        )
        return ["{} is {}, the model has {}".format(path, *shapes)]
    if folder_sizes.get("R", 0) > model_sizes.get("R", 0):
        return [f"{path} has rank {folder_sizes['R']}, the model has room for {model_sizes['R']}"]
    return []


def _projections(
    lora_leaves: Leaves, kind: AdapterKind, layers: SomeLayers | None
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Lists the projections: path of the leaf → {path with the layer's number: index before the adapter axis}."""
    projections: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in lora_leaves:
        path, leaf = name.rsplit(".", 1)
        first = kind.leaves_at(path)[0]
        if leaf != first.name:
            continue
        shape = lora_leaves[name].shape
        numbers = (layers or {}).get(path.removeprefix(f"{LAYERS}."), range(shape[0]))
        saved = saved_path(path)
        projections[path] = (
            {saved: ()}
            if len(shape) == 1 + len(first.axes)
            else {saved.replace(f"{LAYERS}.", f"{LAYERS}.{layer}.", 1): (row,) for row, layer in enumerate(numbers)}
        )
    return projections


def _leaf_of(kind: AdapterKind, name: str) -> Leaf:
    """The leaf of a name, "layers.0.self_attn.q_proj.lora_a"."""
    path, _, leaf = name.rpartition(".")
    return next(item for item in (*kind.leaves_at(path), *kind.shared) if item.name == leaf)


def _names(kind: AdapterKind, projections: Mapping[str, Any]) -> list[str]:
    names = [f"{path}.{leaf.name}" for path in projections for leaf in kind.of_projections]
    return names + [f"{SHARED}.{leaf.name}" for leaf in kind.shared]


def _host(leaf) -> np.ndarray:
    return np.asarray(leaf, np.float32)


def _order(path: str) -> tuple:
    return tuple((part.isdigit(), int(part) if part.isdigit() else part) for part in path.split("."))
