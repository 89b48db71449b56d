"""Checks of a job before it is planned: its data, its warm starts, the layers of each stage,
and what tensor parallelism can split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lorafusion_jax.adapters.spec import ALL_LINEAR, resolve_targets, spelled
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.checkpoint.base_weights import has_weights, header_problems
from lorafusion_jax.checkpoint.warm_start import read_warm_starts
from lorafusion_jax.checkpoint.warm_start_base import check_start_bases
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.config.stack import stack_of
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.errors import CheckpointError, ConfigError, ErrorList, LoraFusionError, raise_all, unique
from lorafusion_jax.families.attention import Attention
from lorafusion_jax.families.layer import Absent, Layer
from lorafusion_jax.families.mlp import Mlp
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.layer import PATHS
from lorafusion_jax.objective.protocol import DIVERGENCE
from lorafusion_jax.planning.stages import stage_layers
from lorafusion_jax.weights.checkpoint_formats import check_stored_as
from lorafusion_jax.weights.table import NONE, check_kernels


def checked_data(config: JobConfig | None, errors: Sequence[LoraFusionError]) -> tuple[JobConfig, Prepared]:
    """Reads the data and warm starts of a job. Raises their errors together with `errors`.

    Args:
        config, errors: from `examine_config`.
    """
    if config is None:
        raise_all(errors)
    assert config is not None
    problems, prepared = list(errors), None
    for step in (read_warm_starts, prepare):
        try:
            prepared = step(config)
        except LoraFusionError as problem:
            problems += getattr(problem, "errors", [problem])
    raise_all(unique([*problems, *check_start_bases(config)]))  # both read the base
    assert isinstance(prepared, Prepared)
    return config, prepared


def base_problems(config: JobConfig | None) -> list[LoraFusionError]:
    """What is wrong with the base's config.json and with the headers of its weights, where there are some.

    A base of no known kind is planned without predictions.
    """
    try:
        problems = [] if config is None else problems_of_base(base_directory(config))
        return [problem for problem in problems if problem.code != "model.unsupported"]
    except LoraFusionError:  # no base model: whoever reads its tokenizer says so
        return []


def problems_of_base(directory: Path) -> list[LoraFusionError]:
    try:
        return header_problems(directory, ModelConfig.from_hf(directory))
    except LoraFusionError as problem:
        return list(getattr(problem, "errors", [problem]))


def weight_notes(config: JobConfig) -> list[str]:
    """Says that a base has no weights, where only its config.json is there to plan with."""
    try:
        bare = not has_weights(base_directory(config))
    except (LoraFusionError, OSError):  # who needs the base says so
        return []
    return ["base: no weights here: planned from config.json"] if bare else []


def layer_problems(config: JobConfig) -> tuple[list[str], list[LoraFusionError]]:
    """What is wrong with the layers of each stage and how they are stored, or why that cannot be said; a base of no
    known kind is no mistake of the job file."""
    mesh, quantize = config.mesh, config.base.quantize
    try:
        directory = base_directory(config)
        model = ModelConfig.from_hf(directory)
        check_stored_as(quantize, model.checkpoint_format, where=str(directory))
        for layer in model.kinds:
            check_kernels(quantize, layer.kernel_shapes())
        raise_all([*_targets_of_others(config, model), *tensor_problems(config, model)])
        model.check_router_loss(config.train.router_aux)
        _check_specs(config)
        stack_of(config)  # whether adapters that take turns can
        stage_layers(model, mesh.stages, mesh.layers)
        together = config.train.block_layers
        if together is not None and together > model.num_layers:
            message = f"train.block_layers={together}, and the model has {model.num_layers} layers"
            return [f"{message}: a stage is one program"], []
    except CheckpointError as problem:
        if mesh.stages == mesh.tensor == 1 and mesh.layers is None and quantize == NONE:
            return [], []
        return [f"the layers of each stage are not checked: {problem.what}"], []
    except ConfigError as problem:
        return [], [problem]
    except ErrorList as problem:
        return [], list(problem.errors)
    return [], []


def _targets_of_others(config: JobConfig, model: ModelConfig) -> list[LoraFusionError]:
    """Targets that other families have and this base has not; names that no family has are errors of the job file."""
    errors: list[LoraFusionError] = []
    for adapter in config.adapters:
        names = [name for name in spelled(adapter.lora.targets, model.targets) if name in PATHS]
        try:
            resolve_targets(names or ALL_LINEAR, model.targets)
        except LoraFusionError as problem:
            errors += getattr(problem, "errors", [problem])
    return list(unique(errors))


def _check_specs(config: JobConfig) -> None:
    """Raises what a specification refuses, such as dropout of a kind without it; targets are checked elsewhere."""
    try:
        adapter_specs(config)
    except LoraFusionError as problem:
        raise_all([error for error in getattr(problem, "errors", [problem]) if error.code != "lora.unknown-target"])


def tensor_problems(config: JobConfig, model: ModelConfig) -> list[LoraFusionError]:
    """Returns why `mesh.tensor` devices cannot share the layers of a job; empty if they can."""
    tensor = config.mesh.tensor
    if tensor == 1:
        parts = config.train.parts
        message = f"train.parts={parts} has no effect on devices that compute whole layers."
        fix = "train.parts: 1, or mesh.tensor: 2"
        return [] if parts == 1 else [ConfigError("train.parts", message, fix=fix)]
    problems = list(dict.fromkeys(problem for layer in model.kinds for problem in _of_layer(layer, tensor)))
    problems += [] if problems else _odd_sizes(model, tensor)
    errors = [
        _error(problem, "mesh.tensor: 1, and mesh.stages or mesh.fsdp for bases larger than a device")
        for problem in problems
    ]
    if config.base.quantize != NONE:
        errors.append(_error(f"it cannot split base.quantize: {config.base.quantize}", "base.quantize: none"))
    if config.train.samples:
        errors.append(_error("a base that devices share makes no text during training", "train.samples: false"))
    for adapter in config.adapters:
        errors += [_error(f"{adapter.name}: {problem}", fix) for problem, fix in _of_adapter(adapter)]
    return [*errors]


def splits(model: ModelConfig, tensor: int) -> bool:
    """Whether so many devices can share the layers of a model."""
    return tensor == 1 or not (any(any(_of_layer(layer, tensor)) for layer in model.kinds) or _odd_sizes(model, tensor))


def _of_layer(layer: Layer, tensor: int) -> Iterator[str]:
    attention, mlp = layer.attention, layer.mlp
    if layer.own_input is not None:
        yield "it cannot split layers with inputs of their own"
    if not isinstance(attention, Attention):
        yield f"it cannot split {type(attention).__name__} layers"
    elif layer.second is not None:
        yield f"it cannot split {type(layer.second).__name__} layers"
    else:
        if attention.fused:
            yield "it cannot split a fused qkv_proj"
        if attention.qk_norm == "full":
            yield "it cannot split norms over all heads of q and k"
    if isinstance(mlp, Absent):
        yield "it cannot split layers without an MLP"
    elif not isinstance(mlp, Mlp) or layer.beside is not None:
        yield "it cannot split experts"
    elif mlp.fused:
        yield "it cannot split a fused gate_up_proj"


def _odd_sizes(model: ModelConfig, tensor: int) -> list[str]:
    """Sizes that so many devices cannot share equally."""
    sizes: dict[str, int] = {}
    for layer in model.kinds:
        assert isinstance(layer.attention, Attention)
        assert isinstance(layer.mlp, Mlp)
        sizes |= {
            f"{layer.attention.heads} heads of attention": layer.attention.heads,
            f"{layer.attention.kv_heads} key and value heads": layer.attention.kv_heads,
            f"{layer.mlp.inner} columns of the MLP": layer.mlp.inner,
        }
    return [f"{text} are no multiple of mesh.tensor={tensor}" for text, size in sizes.items() if size % tensor]


def _of_adapter(adapter: AdapterConfig) -> Iterator[tuple[str, str]]:
    if adapter.lora.lora_bias:
        yield "it cannot split lora.lora_bias", "lora.lora_bias: false"
    elif not adapter_kind(adapter.lora.kind).splits:
        yield f"it cannot split adapters of lora.kind: {adapter.lora.kind}", "lora.kind: lora"
    if adapter.lora.trainable_tokens:
        yield "it cannot split lora.trainable_tokens", "leave out lora.trainable_tokens"
    if adapter.rollout.is_on:
        yield "a base that devices share writes no answers for rollouts", "mesh.tensor: 1"
    if adapter.eval.score is not None:
        yield "a base that devices share writes no answers for eval.score", "leave out eval.score, or mesh.tensor: 1"
    if DIVERGENCE in adapter.objective.chosen.needs:
        yield f"it cannot split objective.name: {adapter.objective.name}", "another objective, or mesh.tensor: 1"


def _error(problem: str, fix: str) -> ConfigError:
    return ConfigError("mesh.tensor", f"{problem}.", fix=fix)
