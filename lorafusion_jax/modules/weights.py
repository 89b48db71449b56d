"""Adapters of any NNX model: converts them to arrays and files and back, and merges them into frozen weights,
in float64 and rounded once.

K in · N out · R padded rank · r an adapter's rank
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array
from safetensors import safe_open
from safetensors.numpy import load_file, save

from lorafusion_jax.adapters.kind import Sizes
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.errors import CheckpointError, ConfigError, first_few
from lorafusion_jax.files import replace_bytes
from lorafusion_jax.modules.adapted import adapted_class
from lorafusion_jax.modules.linen_held import LinenAdapters
from lorafusion_jax.modules.match import check_owners
from lorafusion_jax.modules.plan import Calls, LoRAPlan
from lorafusion_jax.modules.tree import dotted, own_class, placed_like, walk
from lorafusion_jax.modules.use import SHOWN

BASE = "lora_base"  # attribute of the original weight while an adapter is merged
SCALE = "scale"  # of an adapter, beside its tensors in a file


class LoRABase(nnx.Variable):
    """The original weight of a layer while an adapter is merged into it."""


def adapter_names(model: nnx.Module) -> list[str]:
    """Returns the names of a model's adapters, in stacking order."""
    plans = [getattr(layer, "lora_plan", None) for _, layer in walk(model)]
    return list(dict.fromkeys(spec.name for plan in plans if plan is not None for spec in plan.adapters))


def adapter_spec(model: nnx.Module, name: str) -> AdapterSpec:
    """Returns the specification of an adapter of a model.

    Raises:
        ConfigError: `lora.unknown-adapter`.
    """
    _, plan, index = next(_layers_of(model, name))
    return plan.adapters[index]


def adapter_arrays(model: nnx.Module, name: str) -> dict[str, np.ndarray]:
    """Returns one adapter's tensors at its own rank, "blocks.0.up.lora_a" → float32 [K, r], for saving in any format.

    Raises:
        ConfigError: `lora.unknown-adapter`.
    """
    check_owners(model)
    arrays: dict[str, np.ndarray] = {}
    for layer, plan, index in _layers_of(model, name):
        spec, axis = plan.adapters[index], len(plan.linear.stack)
        for leaf in adapter_kind(spec.kind).leaves:
            tensor = np.take(np.asarray(getattr(layer, leaf.name)[...]), index, axis)
            arrays[f"{plan.path}.{leaf.name}".lstrip(".")] = np.ascontiguousarray(leaf.at_rank(tensor, spec.rank))
    return arrays


def layer_shapes(model: nnx.Module, name: str) -> dict[str, tuple[int, int]]:
    """Returns (in, out) features of each single layer that an adapter targets.

    Raises:
        ConfigError: `lora.unknown-adapter`.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for _, plan, _ in _layers_of(model, name):
        shapes |= dict.fromkeys(plan.paths, (plan.linear.in_features, plan.linear.out_features))
    return shapes


def put_adapter_arrays(model: nnx.Module, name: str, arrays: Mapping[str, Any]) -> None:
    """Replaces an adapter of a model by tensors from `adapter_arrays`. Other adapters do not change.

    Raises:
        CheckpointError: `lora.misfit`, names or shapes differ from those of the adapter. The model is not changed then.
    """
    check_arrays(model, name, arrays)
    for layer, plan, index in _layers_of(model, name):
        spec, stack = plan.adapters[index], len(plan.linear.stack)
        for leaf in adapter_kind(spec.kind).leaves:
            variable = getattr(layer, leaf.name)
            bank = np.array(variable[...])
            view = np.moveaxis(bank, stack, 0)[index]  # a view of the adapter's part
            leaf.at_rank(view, spec.rank)[...] = np.asarray(arrays[f"{plan.path}.{leaf.name}".lstrip(".")])
            variable[...] = placed_like(variable[...], bank)


def check_arrays(model: nnx.Module, name: str, arrays: Mapping[str, Any], scale: float | None = None) -> None:
    """Checks that tensors are of the names and shapes of an adapter of a model.

    Args:
        scale: that with which they were trained; None: nobody has written it down.

    Raises:
        CheckpointError: `lora.misfit`.
    """
    before, spec = adapter_arrays(model, name), adapter_spec(model, name)
    wrong = [f"{key} is missing" for key in before if key not in arrays]
    wrong += [f"{key} is not in the model" for key in arrays if key not in before]
    both = [key for key in before if key in arrays and before[key].shape != np.shape(arrays[key])]
    wrong += [f"{key} has shape {np.shape(arrays[key])}, not {before[key].shape}" for key in both]
    if scale is not None and not math.isclose(scale, spec.scale, rel_tol=1e-6):
        wrong.append(f"their scale is {scale:g}, not {spec.scale:g}")
    if wrong:
        raise CheckpointError(
            "lora.misfit",
            f"these are not the tensors of adapter '{name}': {'; '.join(wrong[:4])}.",
            fix="the same targets, rank and alpha as when they were saved",
        )


def save_adapter(model: nnx.Module, name: str, folder: str | Path) -> Path:
    """Writes one adapter to `folder/adapter.safetensors`, atomically.

    Raises:
        CheckpointError: `export.exists`, the file already exists.
    """
    file = Path(folder) / "adapter.safetensors"
    if file.exists():
        raise CheckpointError("export.exists", f"{file} exists already.", fix="choose another folder")
    arrays = adapter_arrays(model, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(file, save(arrays, metadata={SCALE: repr(adapter_spec(model, name).scale)}))
    return file


def load_adapter(model: nnx.Module, name: str, folder: str | Path) -> None:
    """Loads a file from `save_adapter` into an adapter of a model.

    Raises:
        CheckpointError: there is no such file, or it does not fit.
    """
    file = Path(folder) / "adapter.safetensors"
    if not file.is_file():
        raise CheckpointError("lora.no-file", "there is no saved adapter.", where=str(file))
    arrays = load_file(file)
    with safe_open(file, "numpy") as opened:
        scale = (opened.metadata() or {}).get(SCALE)
    check_arrays(model, name, arrays, None if scale is None else float(scale))
    put_adapter_arrays(model, name, arrays)


def only_adapter(model: nnx.Module, name: str) -> nnx.Module:
    """Removes all adapters but one, in place. The remaining adapter has its own rank.

    Raises:
        ConfigError: `lora.unknown-adapter`.
    """
    plan_by_layer = {id(layer): (plan, index) for layer, plan, index in _layers_of(model, name)}
    _check_unquantised(model)
    layers: dict[int, Any] = {id(layer): layer for _, layer in walk(model) if hasattr(layer, "lora_plan")}
    plans = [plan for plan, _ in plan_by_layer.values()]
    calls = Calls(
        (plan.path for plan in plans),
        (plan.path for plan in plans if plan.calls and plan.path in plan.calls.ran),
        (plan.path for plan in plans if plan.calls and plan.path in plan.calls.read),
    )
    for number, layer in layers.items():
        if number not in plan_by_layer:
            _strip(layer)
            continue
        plan, index = plan_by_layer[number]
        spec, stack = plan.adapters[index], len(plan.linear.stack)
        leaves = {leaf.name: leaf for leaf in adapter_kind(spec.kind).leaves}
        for key in plan.leaf_names:
            if key not in leaves:
                delattr(layer, key)
                continue
            tensor = np.take(np.asarray(getattr(layer, key)[...]), [index], stack)
            variable = getattr(layer, key)
            tensor = leaves[key].at_rank(tensor, spec.rank)
            setattr(layer, key, type(variable)(placed_like(variable[...], tensor)))
        layer.lora_plan = replace(plan, adapters=(spec,), members=(0,), rank=spec.rank, calls=calls)
    return model


def merge_adapter(model: nnx.Module, name: str, *, keep: bool = False, allow_uncalled: bool = False) -> nnx.Module:
    """Merges one adapter into the frozen weights, in place, and restores the plain layers.

    W + scale · A B, rounded once to the dtype of W.

    Args:
        model: from `apply_lora`.
        name: name of the adapter.
        keep: keep all adapters and the original weights for `unmerge_adapter`. Otherwise both are removed; merge a
            copy, `nnx.clone(model)`, if you need them.
        allow_uncalled: merge layers, too, that never ran where others of the model did, or whose weights something
            else read. Whoever reads them then computes with the adapter, unlike before.

    Raises:
        ConfigError: `lora.unknown-adapter`; `lora.merged`, an adapter is already merged; `lora.merge-quantized`, the
            frozen weights are stored in fewer bytes; `lora.shared-weight`, a weight has several layers;
            `lora.uncalled`, see `allow_uncalled`.
    """
    if isinstance(model, LinenAdapters):
        fix = "LinenLoRA.merge(model, variables, adapters, name, …)"
        raise ConfigError("lora.no-weights", "the adapters of a Linen model hold no weights to merge into.", fix=fix)
    if any(hasattr(layer, BASE) for _, layer in walk(model)):
        raise ConfigError("lora.merged", "an adapter is merged into this model already.", fix="unmerge_adapter(model)")
    plan_by_layer = {id(layer): (plan, index) for layer, plan, index in _layers_of(model, name)}
    check_owners(model)
    _check_unquantised(model)
    if not allow_uncalled:
        _check_called([plan for plan, _ in plan_by_layer.values()])
    layers: dict[int, Any] = {id(layer): layer for _, layer in walk(model) if hasattr(layer, "lora_plan")}
    for number, layer in layers.items():
        weight = getattr(layer, layer.lora_plan.linear.weight)
        if keep:
            setattr(layer, BASE, LoRABase(weight[...]))
        if number in plan_by_layer:
            plan, index = plan_by_layer[number]
            spec, stack = plan.adapters[index], len(plan.linear.stack)
            tensors = {name: np.take(np.asarray(getattr(layer, name)[...]), index, stack) for name in plan.leaf_names}
            tensors = {leaf.name: tensors[leaf.name] for leaf in adapter_kind(spec.kind).leaves}
            weight[...] = merged_weight(weight[...], spec, tensors, plan.linear.inside, stack)
        if keep:
            layer.__class__ = own_class(layer)
        else:
            _strip(layer)
    return model


def unmerge_adapter(model: nnx.Module) -> nnx.Module:
    """Undoes `merge_adapter(model, name, keep=True)` in place. Weights and adapters are bitwise as before.

    Raises:
        ConfigError: `lora.not-merged`, no adapter is merged, or it was merged without `keep=True`.
    """
    layers: dict[int, Any] = {id(layer): layer for _, layer in walk(model) if hasattr(layer, BASE)}
    if not layers:
        raise ConfigError(
            "lora.not-merged",
            "no adapter is merged with keep=True.",
            fix="call merge_adapter(model, name, keep=True) before",
        )
    for layer in layers.values():
        getattr(layer, layer.lora_plan.linear.weight)[...] = getattr(layer, BASE)[...]
        delattr(layer, BASE)
        layer.__class__ = adapted_class(type(layer))
    return model


def _check_called(plans: Sequence[LoRAPlan]) -> None:
    calls, paths = next(iter(plans)).calls, {plan.path for plan in plans}
    bypassed = [path for path in calls.bypassed(calls.ran, calls.read) if path in paths] if calls is not None else []
    refuse_bypassed(bypassed, "merge_adapter")


def refuse_bypassed(paths: Sequence[str], merge: str) -> None:
    """Refuses to merge into layers that never ran where others did, or whose weights something else reads.

    Args:
        merge: the function that merges, for the message.

    Raises:
        ConfigError: `lora.uncalled`.
    """
    if paths:
        message = "adapted layers never ran, while others of the model did, or something else read their weights: "
        apply = "apply_lora" if merge == "merge_adapter" else "LinenLoRA"
        raise ConfigError(
            "lora.uncalled",
            f"{message}{first_few(paths, SHOWN)}.",
            why="who reads a weight computes without the adapter, and would compute with it: the merged model is "
            "another function than the model with its adapter",
            fix=f"{apply}(…, exclude=…) leaves them out; {merge}(…, allow_uncalled=True) merges them anyway",
        )


def _check_unquantised(model: nnx.Module) -> None:
    if isinstance(model, LinenAdapters):
        return  # it has no weights
    for path, layer in walk(model):
        plan = getattr(layer, "lora_plan", None)
        if plan is not None and not isinstance(getattr(layer, plan.linear.weight), nnx.Param):
            raise ConfigError(
                "lora.merge-quantized",
                "the weight is stored in fewer bytes, and an adapter cannot be merged into it without rounding.",
                where=dotted(path),
                fix="merge into the original weights: apply_lora(Model(…), specs), load_adapter, merge_adapter",
            )


def _strip(layer: Any) -> None:
    for name in (*layer.lora_plan.leaf_names, "lora_site", "lora_plan"):
        if hasattr(layer, name):
            delattr(layer, name)
    layer.__class__ = own_class(layer)


def _layers_of(model: nnx.Module, name: str) -> Iterator[tuple[Any, LoRAPlan, int]]:
    """Yields the layers that an adapter targets, each once."""
    ids: set[int] = set()
    names: dict[str, None] = {}
    for _, layer in walk(model):
        plan = getattr(layer, "lora_plan", None)
        if plan is None or id(layer) in ids:
            continue
        ids.add(id(layer))
        names |= dict.fromkeys(spec.name for spec in plan.adapters)
        index = next((number for number in plan.members if plan.adapters[number].name == name), None)
        if index is not None:
            yield layer, plan, index
    if name not in names:
        raise ConfigError(
            "lora.unknown-adapter", f"the model has no adapter '{name}'.", fix=f"one of [{', '.join(names)}]"
        )


def merged_weight(
    weight: Any, spec: AdapterSpec, leaves: Mapping[str, Any], inside: Sequence[int], stack: int = 0
) -> Array:
    """Returns the weight with one adapter merged, where it was.

    Args:
        weight: [stacked layers, axes of one layer's weight].
        spec: the adapter.
        leaves: its tensors, [stacked layers, ...].
        inside: axes of one layer's weight that the product sums over.
        stack: number of leading layer axes.
    """
    kind, shape = adapter_kind(spec.kind), weight.shape[stack:]
    order = [*inside, *(axis for axis in range(len(shape)) if axis not in inside)]
    back = np.argsort(order)
    num_in = math.prod(shape[axis] for axis in inside)
    sizes = Sizes(K=num_in, N=math.prod(shape) // num_in, R=spec.rank, scale=spec.scale)
    leaf_of = {leaf.name: leaf for leaf in kind.leaves}
    merged = np.empty(weight.shape, weight.dtype)
    for number in np.ndindex(weight.shape[:stack]):
        tensors = {
            name: leaf_of[name].cut(np.asarray(leaf[number], np.float64), {"K": sizes.K, "N": sizes.N, "R": spec.rank})
            for name, leaf in leaves.items()
        }
        kernel = np.asarray(weight[number], np.float64).transpose(order)
        changed = kind.merge(kernel.reshape(sizes.K, sizes.N), tensors, sizes)
        merged[number] = changed.reshape(kernel.shape).transpose(back).astype(weight.dtype)
    return placed_like(weight, merged)
