"""Warm starts: adapters that start from the weights of a PEFT folder (`lora.init_from`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.config.specs import adapter_spec, model_targets, tokenizer_file
from lorafusion_jax.digests import digests_of
from lorafusion_jax.errors import CheckpointError, LoraFusionError, first_few, raise_all
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.layer import Linear, saved_path
from lorafusion_jax.peft.folder import put_adapter, read_described
from lorafusion_jax.peft.leaves import NOT_PROJECTIONS, SHOWN, Arrays, SomeLayers, with_adapter_axis
from lorafusion_jax.peft.read_config import CONFIG_FILE
from lorafusion_jax.peft.settings import TENSOR_FILE
from lorafusion_jax.readable import has_folder

FIX = (
    "lora.init_from: a folder with adapter_config.json and adapter_model.safetensors, such as RUN/adapters/NAME/latest"
)


def read_warm_starts(config: JobConfig) -> dict[int, Arrays]:
    """Reads the PEFT folders of `lora.init_from`. Returns index of the adapter → arrays.

    Raises:
        CheckpointError, ErrorList: a folder is incomplete, or the job file contradicts it. Each names its adapter.
    """
    starts: dict[int, Arrays] = {}
    errors: list[LoraFusionError] = []
    for index, adapter in enumerate(config.adapters):
        if adapter.lora.init_from is None:
            continue
        folder = Path(config.directory) / adapter.lora.init_from
        try:
            starts[index] = _read_start(folder, adapter, config)
        except LoraFusionError as problem:
            errors += [_of_adapter(problem_error, adapter) for problem_error in getattr(problem, "errors", [problem])]
    raise_all(errors)
    return starts


def warm_start_digests(config: JobConfig) -> dict[str, dict[str, str]]:
    """Returns adapter → digests of the files of its warm start."""
    return {
        adapter.name: digests_of(Path(config.directory) / adapter.lora.init_from, (CONFIG_FILE, TENSOR_FILE))
        for adapter in config.adapters
        if adapter.lora.init_from is not None
    }


def reread_warm_starts(before: dict[str, dict[str, str]], config: JobConfig) -> dict[int, Arrays]:
    """Reads warm starts of an existing run, which must be those that it recorded; see `read_warm_starts`.

    Args:
        before: adapter → digests, as run.json has them.
        config: with the adapters that no checkpoint holds yet.

    Raises:
        CheckpointError: `run.init-changed`, or those of `read_warm_starts`.
    """
    changed = [
        adapter.name
        for adapter in config.adapters
        if adapter.name in before and _digests_now(adapter, config) not in (before[adapter.name], None)
    ]
    if changed:
        raise CheckpointError(
            "run.init-changed",
            f"the folder that {', '.join(changed)} started from has changed since then.",
            where=", ".join(
                f"adapters.{name}.lora.init_from={config.adapter(name).lora.init_from}" for name in changed
            ),
            fix="restore it, or start a new run with lorafusion train",
        )
    return read_warm_starts(config)


def _digests_now(adapter: AdapterConfig, config: JobConfig) -> dict[str, str] | None:
    """Returns the digests of a warm start; None if there is none, or none that can be read."""
    try:
        return warm_start_digests(select_adapters(config, [adapter.name])).get(adapter.name)
    except OSError:
        return None


def start_from(
    lora: Mapping[str, Mapping[str, np.ndarray]],
    starts: Mapping[int, Arrays],
    specs: Sequence[AdapterSpec],
    layers: SomeLayers | None = None,
) -> dict[str, Mapping[str, np.ndarray]]:
    """Replaces the initial weights of the adapters in `starts`.

    Args:
        lora: leaves of each adapter, "layers.self_attn.q_proj.lora_a" → [L, K, r], in order of the adapters.
        specs: of each adapter.
        layers: as in `take_adapter`.

    Raises:
        CheckpointError: `peft.other-base`, the shapes are those of another model.
    """
    started = dict(lora)
    for index, arrays in starts.items():
        name = list(lora)[index]
        spec = specs[index]
        leaves = put_adapter(
            with_adapter_axis(lora[name]), 0, arrays, spec.kind, spec.head, spec.patterns, layers, spec.tokens
        )
        started[name] = {leaf: array[:, 0] for leaf, array in leaves.items()}
    return started


def _read_start(folder: Path, adapter: AdapterConfig, config: JobConfig) -> Arrays:
    if not has_folder(folder):
        raise CheckpointError("peft.missing-file", f"there is no folder {folder}.")
    kind = adapter_kind(adapter.lora.adapter_kind)
    if not kind.in_peft:
        raise CheckpointError(
            "peft.kind",
            f"an adapter of kind {adapter.lora.kind} cannot start from a PEFT folder.",
            why="the folder holds the product of its tensors, not the tensors themselves",
            fix="lora.kind: lora   or leave lora.init_from out",
        )
    described, arrays = read_described(folder, adapter.lora.adapter_kind, adapter.objective.chosen.head)
    spec = adapter_spec(adapter, model_targets(config), tokenizer_file(config))
    if described.same_settings(spec):
        if described.some_layers:
            _check_projections(arrays, spec, adapter, ModelConfig.from_hf(base_directory(config)))
        return arrays
    raise CheckpointError(
        "peft.other-settings",
        f"{adapter.lora.init_from} has other LoRA settings than the job file.",
        why=f"the folder has {_settings(described.spec)}; the job file has {_settings(spec)}",
        fix="leave lora.rank, alpha, rslora, targets, patterns and trainable_tokens out: they come from the folder",
    )


def _settings(spec: AdapterSpec) -> str:
    text = f"rank {spec.rank}, alpha {spec.alpha:g}, rslora {spec.rslora}, targets {', '.join(spec.targets)}"
    return text if spec.tokens is None else f"{text}, trainable tokens {spec.tokens.peft}"


def _check_projections(arrays: Arrays, spec: AdapterSpec, adapter: AdapterConfig, model: ModelConfig) -> None:
    """Checks that a folder of some projections has tensors for all that the job trains."""
    every = (
        f"layers.{layer}.{saved_path(linear.path)}"
        for linear in model.linears
        for layer in model.layers_with(linear.path)
    )
    if absent := [path for path in every if spec.has(path) and path not in arrays]:
        raise CheckpointError(
            "peft.other-settings",
            f"{adapter.lora.init_from} has no tensors for {len(absent)} projections that the job trains.",
            where=first_few(absent, SHOWN),
            fix="leave them out by lora.layers_to_transform and lora.exclude",
        )


def with_all_layers(arrays: Arrays, model: ModelConfig, spec: AdapterSpec) -> Arrays:
    """Extends an adapter of some layers to all layers with zeros, for who computes with it and does not train it."""
    kind = adapter_kind(spec.kind)
    projections = {path.split(".", 2)[2] for path in arrays if path not in NOT_PROJECTIONS}

    def zeros(linear: Linear) -> tuple[np.ndarray, ...]:
        sizes = dict(zip("KNER", (*linear.shape, linear.experts, spec.rank), strict=True))
        return tuple(np.zeros(leaf.shape_in(sizes), np.float32) for leaf in kind.leaves_at(linear.path))

    absent = {
        f"layers.{layer}.{saved_path(linear.path)}": zeros(linear)
        for linear in model.linears
        if saved_path(linear.path) in projections
        for layer in model.layers_with(linear.path)
        if spec.has(f"layers.{layer}.{linear.path}")
    }
    return absent | arrays


def _of_adapter(problem: LoraFusionError, adapter: AdapterConfig) -> CheckpointError:
    """Adds the adapter and its setting to an error."""
    key = f"adapters.{adapter.name}.lora.init_from={adapter.lora.init_from}"
    return CheckpointError(
        problem.code,
        f"{adapter.name}: {problem.what}",
        where=f"{key}, {problem.where}" if problem.where else key,
        why=problem.why,
        fix=problem.fix or FIX,
    )
