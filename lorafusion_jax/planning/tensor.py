"""What tensor parallelism can split, and what it cannot."""

from __future__ import annotations

from collections.abc import Iterator

from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.errors import ConfigError, LoraFusionError
from lorafusion_jax.families.attention import Attention
from lorafusion_jax.families.layer import Absent, Layer
from lorafusion_jax.families.mlp import Mlp
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.objective.protocol import DIVERGENCE
from lorafusion_jax.weights.table import NONE


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
    if DIVERGENCE in adapter.objective.chosen.needs:
        yield f"it cannot split objective.name: {adapter.objective.name}", "another objective, or mesh.tensor: 1"


def _error(problem: str, fix: str) -> ConfigError:
    return ConfigError("mesh.tensor", f"{problem}.", fix=fix)
