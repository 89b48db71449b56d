"""Saves and loads adapters of any NNX model, as PEFT folders and orbax checkpoints.

K in · N out · r an adapter's rank
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from lorafusion_jax.adapters.init import SHARED
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.errors import CheckpointError, ConfigError
from lorafusion_jax.layout.layer import FUSED, PATHS, TARGETS
from lorafusion_jax.modules.weights import (
    SCALE,
    adapter_arrays,
    adapter_names,
    adapter_spec,
    check_arrays,
    layer_shapes,
    put_adapter_arrays,
)
from lorafusion_jax.new_folder import new_folder
from lorafusion_jax.peft.folder import TENSOR_FILE, check_digests, check_finite, read_tensors
from lorafusion_jax.peft.leaves import Arrays, as_exported
from lorafusion_jax.peft.read_config import CONFIG_FILE, describe, read_config
from lorafusion_jax.peft.settings import text_name
from lorafusion_jax.peft.write_config import config_of
from lorafusion_jax.readable import has_folder
from lorafusion_jax.tensor_file import MANIFEST, TENSORS, merged, plain_name, write_tensors

type Keys = Mapping[str, str] | Callable[[str], str] | None
ROOT = "base_model."
PREFIX = f"{ROOT}model."  # of PEFT's names
LAYER = "/"  # before paths of layers, one of which may be called as what is no layer is: shared, head, tokens


def hf_key(path: str) -> str:
    """Returns the name that a Hugging Face decoder gives a layer, if its path is of such a decoder, else the path.

    These are `layers`, a number, at most one name of a block, and a usual projection name; the number of a layer in a
    stack comes last. Layers of an encoder, a tower or another container keep their paths.

    >>> hf_key("layers.3.attn.q_proj"), hf_key("layers.mlp.up_proj.2"), hf_key("vision.layers.0.attn.q_proj")
    ('model.layers.3.self_attn.q_proj', 'model.layers.2.mlp.up_proj', 'vision.layers.0.attn.q_proj')
    """
    parts = path.removeprefix("model.").split(".")
    numbers = [part for part in parts if part.isdigit()]
    names = [part for part in parts if part not in numbers]
    is_decoder = (
        names[:1] == ["layers"] and len(numbers) == 1 and len(names) in (2, 3) and names[-1] in (*TARGETS, *FUSED)
    )
    return f"model.layers.{numbers[0]}.{PATHS[names[-1]]}" if is_decoder else path


def save_peft(
    model: nnx.Module,
    name: str,
    folder: str | Path,
    *,
    keys: Keys = None,
    base_name: str = "",
    task_type: str | None = None,
) -> Path:
    """Writes one adapter of a model from `apply_lora` as a PEFT folder.

    Args:
        model: any NNX model, or the adapters of a Linen model from `LinenLoRA.hold`.
        name: name of the adapter.
        folder: new or empty.
        keys: path of a layer in the model → its name in the PyTorch model, as a dictionary or a function (None: its
            path, and for a decoder's own `layers` the name that Hugging Face gives them, see `hf_key`). The path of a
            layer of a stack ends with its number.
        base_name: name or path of the PyTorch base model, for adapter_config.json.
        task_type: PEFT's, such as "CAUSAL_LM", which asks for a model that generates; None serves any PyTorch model.

    Returns:
        The folder.

    Raises:
        ConfigError: `lora.unknown-adapter`; `peft.keys`, two layers have the same name, or a layer has none.
        CheckpointError: `export.exists`, `export.not-finite`, `peft.kind`.
    """
    spec, arrays = as_exported(adapter_spec(model, name), *_arrays(model, name))
    if adapter_kind(spec.kind).merge_only:
        raise CheckpointError("peft.kind", f"{name}: an adapter of kind {spec.kind} has no form in PEFT.")
    check_finite(arrays, spec)
    names = _names(_layer_paths(arrays), keys)
    tensors = _tensors(arrays, spec.kind, names)
    targets = tuple(dict.fromkeys(key.rsplit(".", 1)[-1] for key in names.values()))
    described = config_of(dataclasses.replace(spec, targets=targets), base_name) | {"task_type": task_type}
    with new_folder(folder) as draft:
        (draft / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        write_tensors(draft / TENSOR_FILE, tensors)
    return Path(folder)


def load_peft(model: nnx.Module, name: str, folder: str | Path, *, keys: Keys = None) -> None:
    """Loads a PEFT folder into one adapter of a model. Other adapters do not change.

    Args:
        model: from `apply_lora`. Its adapter must have the rank, the scale and the layers of the folder.
        name: name of the adapter.
        folder: with adapter_config.json and adapter_model.safetensors.
        keys: as in `save_peft`.

    Raises:
        ConfigError: `lora.unknown-adapter`, `peft.keys`.
        CheckpointError: errors of reading, or `lora.misfit`, rank, scale, layers or shapes differ. The model is not
            changed then.
    """
    folder, spec = Path(folder), adapter_spec(model, name)
    kind = adapter_kind(spec.kind)
    if not kind.in_peft:
        raise ConfigError("peft.kind", f"{name} is of kind {spec.kind}, whose tensors a PEFT folder does not hold.")
    check_digests(folder)
    arrays, _ = _arrays(model, name)
    names = _names(_layer_paths(arrays), keys)
    model_tensors = _tensors(arrays, spec.kind, names)
    tensors = {key if key in model_tensors else text_name(key)[0]: array for key, array in read_tensors(folder).items()}
    endings = [f".{leaf.peft_name}" for leaf in kind.of_projections]
    paths = list(
        dict.fromkeys(
            key.removeprefix(PREFIX).removesuffix(end) for key in tensors for end in endings if key.endswith(end)
        )
    )
    present = tuple(dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths))
    described = describe(read_config(folder), paths, name, str(folder / CONFIG_FILE), known=present, kind=spec.kind)
    problems = [
        f"{label} is {saved:g} there and {current:g} here"
        for label, saved, current in (
            ("rank", described.spec.rank, spec.rank),
            ("scale", described.spec.scale, spec.scale),
        )
        if saved != current
    ]
    problems += ["it has ranks, alphas or layers by pattern"] if described.spec.patterns is not None else []
    problems += [f"missing: {key}" for key in model_tensors if key not in tensors]
    problems += [f"extra: {key}" for key in tensors if key not in model_tensors]
    if problems:
        raise CheckpointError(
            "lora.misfit",
            f"this folder does not hold adapter '{name}' of this model: {'; '.join(problems[:4])}.",
            where=str(folder),
            fix="keys= says the names of the layers there; rank, alpha and targets as in adapter_config.json",
        )
    put_adapter_arrays(model, name, _stack_layers(model, name, tensors, names))


def save_checkpoint(model: nnx.Module, folder: str | Path, adapters: str | Sequence[str] | None = None) -> Path:
    """Writes adapters with orbax, each at its own rank: those named, or all.

    Raises:
        ConfigError: `lora.unknown-adapter`.
        CheckpointError: `export.exists`.
    """
    import orbax.checkpoint as ocp

    names = _chosen(model, adapters)
    folder = Path(folder).absolute()
    if folder.exists():
        raise CheckpointError("export.exists", f"{folder} exists already.", fix="choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with plain_name(folder.parent) as parent, ocp.StandardCheckpointer() as checkpointer:
        scales = {SCALE: {name: adapter_spec(model, name).scale for name in names}}
        arrays = {name: adapter_arrays(model, name) for name in names}
        checkpointer.save(parent / folder.name, arrays, custom_metadata=scales)
    return folder


def load_checkpoint(model: nnx.Module, folder: str | Path, adapters: str | Sequence[str] | None = None) -> None:
    """Loads adapters that `save_checkpoint` wrote into a model: those named, or all of the model.

    Raises:
        ConfigError: `lora.unknown-adapter`.
        CheckpointError: `lora.no-file`, `lora.misfit`: names, shapes or scales differ. The model is not changed then.
    """
    folder = Path(folder).absolute()
    if not has_folder(folder):
        raise CheckpointError("lora.no-file", "there is no checkpoint of adapters.", where=str(folder))
    saved, scales = _restored(folder)
    names = _chosen(model, adapters)
    if missing := [name for name in names if name not in saved]:
        raise CheckpointError(
            "lora.misfit",
            f"the checkpoint has no adapter {', '.join(missing)}.",
            where=str(folder),
            fix=f"adapters=[…] of {', '.join(saved)}",
        )
    for name in names:
        check_arrays(model, name, saved[name], scales.get(name))
    for name in names:
        put_adapter_arrays(model, name, saved[name])


def _restored(folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Reads the tensors and the scale of each adapter, as far as it is written down."""
    import orbax.checkpoint as ocp

    try:
        with plain_name(folder) as parent, merged(parent) as stored, ocp.StandardCheckpointer() as checkpointer:
            if (stored / MANIFEST).is_file() and not has_folder(stored / TENSORS):
                # tensorstore would go on to read after the first error, and print a traceback for each later one
                raise FileNotFoundError(f"its folder {TENSORS}, which has the tensors, is missing")
            arrays = checkpointer.restore(stored)
            return arrays, (checkpointer.metadata(stored).custom_metadata or {}).get(SCALE, {})
    except (FileNotFoundError, FileExistsError, ValueError) as problem:  # orbax says in several ways what it lacks
        raise CheckpointError(
            "lora.no-file",
            "this folder holds no checkpoint of adapters, or a part of one.",
            where=str(folder),
            why=str(problem).partition("\n")[0],
            fix="a folder of lf.save_checkpoint; lf.load_peft reads a PEFT folder",
        ) from None


def _chosen(model: nnx.Module, adapters: str | Sequence[str] | None) -> list[str]:
    names = adapter_names(model) if adapters is None else [adapters] if isinstance(adapters, str) else list(adapters)
    if not names:  # those that were merged are gone
        raise ConfigError("lora.unknown-adapter", "there is no adapter.", fix="apply_lora(model, specs) before")
    return names


def _arrays(model: nnx.Module, name: str) -> tuple[Arrays, dict[str, tuple[int, int]]]:
    """Returns path of each single layer, with `LAYER` before it → tensors of the adapter's kind, and (K, N) of each."""
    kind = adapter_kind(adapter_spec(model, name).kind)
    arrays: Arrays = {}
    for path, number, leaves in _single_layers(model, name):
        arrays[LAYER + _numbered(path, number)] = tuple(leaves[leaf.name][number] for leaf in kind.of_projections)
        if kind.shared:
            arrays.setdefault(SHARED, tuple(leaves[leaf.name][number] for leaf in kind.shared))
    return arrays, {LAYER + path: shape for path, shape in layer_shapes(model, name).items()}


def _layer_paths(arrays: Arrays) -> list[str]:
    return [path.removeprefix(LAYER) for path in arrays if path != SHARED]


def _tensors(arrays: Arrays, kind: str, names: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Converts to PEFT's names and shapes."""
    table, tensors_by_key = adapter_kind(kind), {}
    for path, tensors in arrays.items():
        prefix = ROOT if path == SHARED else f"{PREFIX}{names[path.removeprefix(LAYER)]}."
        leaves = table.shared if path == SHARED else table.of_projections
        for leaf, array in zip(leaves, tensors, strict=True):
            tensors_by_key[f"{prefix}{leaf.peft_name}"] = np.ascontiguousarray(array.T)
    return tensors_by_key


def _stack_layers(
    model: nnx.Module, name: str, tensors: Mapping[str, np.ndarray], names: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Stacks the tensors of single layers in the form of `adapter_arrays`."""
    kind = adapter_kind(adapter_spec(model, name).kind)
    parts: dict[str, dict[tuple[int, ...], np.ndarray]] = {}
    for path, number, _ in _single_layers(model, name):
        for leaf in kind.leaves:
            prefix = ROOT if leaf.shared else f"{PREFIX}{names[_numbered(path, number)]}."
            array = np.asarray(tensors[f"{prefix}{leaf.peft_name}"], np.float32).T
            parts.setdefault(f"{path}.{leaf.name}".lstrip("."), {})[number] = array
    return {key: _stack(layers) for key, layers in parts.items()}


def _stack(parts: Mapping[tuple[int, ...], np.ndarray]) -> np.ndarray:
    """Stacks arrays by their numbers; an array of no shape where theirs differ, which fits nothing."""
    stack, arrays_in_order = tuple(1 + last for last in max(parts)), list(parts.values())
    same = all(array.shape == arrays_in_order[0].shape for array in arrays_in_order)
    return np.stack(arrays_in_order).reshape(*stack, *arrays_in_order[0].shape) if same else np.zeros(())


def _single_layers(model: nnx.Module, name: str) -> Iterator[tuple[str, tuple[int, ...], dict[str, np.ndarray]]]:
    """Yields path, number in its stack and tensors of every layer."""
    kind = adapter_kind(adapter_spec(model, name).kind)
    for path, leaves in _by_layer(adapter_arrays(model, name)).items():
        first = kind.leaves[0]
        array = leaves[first.name]
        for number in np.ndindex(array.shape[: array.ndim - len(first.axes)]):
            yield path, number, leaves


def _numbered(path: str, number: tuple[int, ...]) -> str:
    return ".".join(map(str, (path, *number)))


def _by_layer(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    by_path: dict[str, dict[str, np.ndarray]] = {}
    for key, value in arrays.items():
        path, _, leaf = key.rpartition(".")
        by_path.setdefault(path, {})[leaf] = value
    return by_path


def _names(paths: Sequence[str], keys: Keys) -> dict[str, str]:
    """Returns path of each layer → its name in the PyTorch model."""
    if keys is None:
        keys = hf_key
    if isinstance(keys, Mapping):
        without = [path for path in paths if path not in keys]
        names = {path: keys[path] for path in paths if path in keys}
    else:
        names, without = {path: keys(path) for path in paths}, []
    twice = sorted({name for name in names.values() if list(names.values()).count(name) > 1})
    if without or twice:
        message = (
            f"no name for {', '.join(without[:4])}"
            if without
            else f"one name to several layers: {', '.join(twice[:4])}"
        )
        raise ConfigError(
            "peft.keys", f"keys= gives {message}.", fix="one name for every adapted layer: see lora_report"
        )
    return names
