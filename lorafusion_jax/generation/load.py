"""Loads a base model and adapters onto one device, to generate with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.checkpoint.base_weights import tie_problems
from lorafusion_jax.checkpoint.warm_start import with_all_layers
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.errors import CheckpointError, LoraFusionError, raise_all
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.generation.sources import AdapterSource, Source
from lorafusion_jax.models import open_frozen
from lorafusion_jax.peft.folder import read_described
from lorafusion_jax.peft.leaves import HEAD, Arrays, put_adapter, with_adapter_axis
from lorafusion_jax.planning.stages import stage_layers
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stage_weights import cut


def load_stage(source: Source) -> Stage:
    """Loads a base and its adapters.

    Raises:
        LoraFusionError: a folder is incomplete or of another base model; all of them together.
    """
    model = ModelConfig.from_hf(source.base)
    (mesh,), dtype = stage_meshes(), jnp.dtype(source.dtype)
    reader = open_frozen(
        source.base, dtype=dtype, quantize=source.quantize, sharding=lambda name, shape: mesh.weight(shape)
    )
    raise_all(list(tie_problems(source.base)))
    adapters = _read_all(source.adapters, model)
    parts = Parts(
        model=model,
        specs=tuple(spec for spec, _ in adapters),
        settings=TrainSettings(),
        dtype=dtype,
        quantize=source.quantize,
    )
    (weights,) = cut(reader.read(), model, stage_layers(model, 1))
    stage = Stage(parts, weights, mesh, [], remat="everything", block=1)
    if adapters:
        stage.take_weights(_leaves(parts, adapters))
    return stage


def read_leaves(folder: Path, parts: Parts) -> tuple[AdapterSpec, dict[str, np.ndarray]]:
    """Reads a PEFT folder. Returns what it is, and its leaves in all layers of a model.

    Raises:
        LoraFusionError: the folder is incomplete or of another base model.
    """
    spec, arrays = _read(AdapterSource(name=folder.name, folder=folder), parts.model)
    return spec, _leaves(replace(parts, specs=(spec,), objectives=()), [(spec, arrays)])[spec.name]


def _read_all(sources: Sequence[AdapterSource], model: ModelConfig) -> list[tuple[AdapterSpec, Arrays]]:
    adapters, errors = [], []
    for source in sources:
        try:
            adapters.append(_read(source, model))
        except LoraFusionError as problem:
            errors += getattr(problem, "errors", [problem])
    raise_all(errors)
    return adapters


def _read(source: AdapterSource, model: ModelConfig) -> tuple[AdapterSpec, Arrays]:
    described, arrays = read_described(source.folder, source.kind, source.head)
    spec = replace(described.spec, name=source.name, head=None, dropout=0.0)
    lacking = [name for name in spec.targets if name not in model.targets]
    if lacking:
        message = f"{source.name}: the adapter was made for another base model."
        why = f"this one has no projection {', '.join(lacking)}"
        raise CheckpointError("peft.other-base", message, where=str(source.folder), why=why)
    arrays = {path: tensors for path, tensors in arrays.items() if path != HEAD}
    return spec, with_all_layers(arrays, model, spec) if described.some_layers else arrays


def _leaves(parts: Parts, adapters: Sequence[tuple[AdapterSpec, Arrays]]) -> dict[str, dict[str, np.ndarray]]:
    """Returns the leaves of each adapter in all layers of the model."""
    shapes, leaves = parts.leaves.own_shapes(), {}
    for spec, arrays in adapters:
        zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes[spec.name].items()}
        some_layers = parts.model.some_layers
        described = spec.kind, None, spec.patterns, some_layers, spec.tokens
        adapter_leaves = put_adapter(with_adapter_axis(zeros), 0, arrays, *described)
        leaves[spec.name] = {name: array[:, 0] for name, array in adapter_leaves.items()}
    return leaves
