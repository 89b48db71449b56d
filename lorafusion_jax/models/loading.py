"""Loads frozen weights from a Hugging Face directory, tensor by tensor, directly to their shards on the devices.

Dims: `K` in · `N` out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..config.families import family_named
from ..config.model import ModelConfig
from ..errors import CheckpointError
from ..modules.init import init_leaves
from ..modules.spec import AdapterSpec
from ..weights.table import NONE, StoredKind, stored_kind
from .checkpoint import READABLE, Stored, list_tensors, read_slice
from .decoder import Decoder
from .naming import Tensor, frozen_tensors, is_ignored

ShardingRule = Callable[[str, tuple[int, ...]], Sharding]
Weight = jax.Array | dict[str, jax.Array]  # or the arrays of a stored kernel, see `weights.table`


def load_decoder(
    model_dir: str | os.PathLike[str],
    adapters: Sequence[AdapterSpec] = (),
    *,
    dtype: Any = jnp.bfloat16,
    sharding: Sharding | ShardingRule | None = None,
) -> Decoder:
    """Loads a model directory into a decoder with newly initialised LoRA weights.

    Each device reads only the bytes of its own shard. The host holds about one tensor at a time.

    Args:
        model_dir: config.json and safetensors, single or sharded with an index.
        adapters: see `Decoder`.
        dtype: dtype of the base weights; conversion runs on the device.
        sharding: sharding of every leaf, or a function (leaf name such as "layers.0.mlp.up_proj.kernel", shape) →
            sharding. Default: everything on the first device.
    Raises:
        CheckpointError: the architecture is not implemented; files are missing or corrupt; tensors are missing, extra
            or of the wrong shape (all of them in one message).
    """
    config = ModelConfig.from_hf(model_dir)
    model = nnx.eval_shape(lambda: Decoder(config, adapters, dtype=dtype, rngs=nnx.Rngs(0)))
    place = _rule(sharding)
    graph, state = nnx.split(model)
    leaves = dict(nnx.to_flat_state(state))
    for tensor, array in _read_all(model_dir, model, dtype, NONE, place):
        leaves[tensor.path] = leaves[tensor.path].replace(array)
    _draw_adapters(leaves, adapters, place)
    return nnx.merge(graph, nnx.from_flat_state(leaves.items()))


def load_frozen(
    model_dir: str | os.PathLike[str],
    *,
    dtype: Any = jnp.bfloat16,
    quantize: str = NONE,
    sharding: Sharding | ShardingRule | None = None,
) -> dict[str, Weight]:
    """Loads a model directory as named weights, "layers.0.mlp.up_proj.kernel" → [K, N].

    The layers' kernels are stored as `quantize` says. Each is quantised on its devices as soon as it is read, so the
    whole model never exists in `dtype`. Embedding, head, norms and biases are in `dtype`.

    Args:
        model_dir, dtype, sharding: see `load_decoder`. A sharding function is called for each array of a stored kernel,
            with the kernel's name and the array's shape.
        quantize: a name of `weights.table`. Kernels are quantised from the checkpoint's values, not from values rounded
            to `dtype`.
    Raises:
        CheckpointError: see `load_decoder`.
        ConfigError: the kind does not exist, or its package is broken.
    """
    config = ModelConfig.from_hf(model_dir)
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    return {
        tensor.leaf_name: weight for tensor, weight in _read_all(model_dir, model, dtype, quantize, _rule(sharding))
    }


def _read_all(
    model_dir: str | os.PathLike[str], model: Decoder, dtype: Any, quantize: str, place: ShardingRule
) -> Iterator[tuple[Tensor, Any]]:
    """Reads the frozen tensors of an abstract decoder one by one."""
    stored, tensors, kind = list_tensors(model_dir), frozen_tensors(model), stored_kind(quantize)
    _check(tensors, stored, model.config, Path(model_dir))
    last = None
    for tensor in tensors:
        own = kind if tensor.transposed else None  # kernels of linears, which only the layers have
        weight = _read_tensor(tensor, stored[tensor.name], jnp.dtype(dtype), own, place)
        yield tensor, weight
        # The disk runs at most one leaf ahead of the devices, which limits host memory.
        jax.block_until_ready(last)
        last = weight


def _check(tensors: Sequence[Tensor], stored: Mapping[str, Stored], config: ModelConfig, directory: Path) -> None:
    wanted = {tensor.name: tensor for tensor in tensors}
    missing = sorted(wanted.keys() - stored.keys())
    extra = sorted(name for name in stored.keys() - wanted.keys() if not is_ignored(name, config))
    both = sorted(wanted.keys() & stored.keys())
    problems = [f"missing: {name} {list(wanted[name].shape)}" for name in missing]
    problems += [f"not of this model: {name} {list(stored[name].shape)}" for name in extra]
    problems += [
        f"wrong shape: {name} is {list(stored[name].shape)}, config.json says {list(wanted[name].shape)}"
        for name in both
        if stored[name].shape != wanted[name].shape
    ]
    problems += [
        f"unreadable type: {name} is {stored[name].dtype}" for name in both if stored[name].dtype not in READABLE
    ]
    head = family_named(config.family).tensor_name("lm_head.weight")
    if problems:
        raise CheckpointError(
            "model.tensors-differ",
            f"{len(problems)} tensors do not fit the model that config.json describes:\n    " + "\n    ".join(problems),
            where=str(directory),
            why="the tie_word_embeddings of config.json is false" if missing == [head] else "",
            fix="use the config.json and the weights of the same model",
        )


def _rule(sharding: Sharding | ShardingRule | None) -> ShardingRule:
    if callable(sharding):
        return sharding
    everywhere = SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
    return lambda name, shape: everywhere


def _read_tensor(
    tensor: Tensor, stored: Stored, dtype: np.dtype, kind: StoredKind | None, place: ShardingRule
) -> Weight:
    shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
    target = place(tensor.leaf_name, shape)
    on_disk = _transposed(target) if tensor.transposed else target
    x = jax.make_array_from_callback(
        tensor.shape, on_disk, lambda index: _contiguous(read_slice(stored, tensor.name, _plain(index, tensor.shape)))
    )
    if kind is None:
        return _convert(dtype, tensor.transposed, target)(x)
    targets = {name: place(tensor.leaf_name, array.shape) for name, array in kind.arrays(*shape).items()}
    return _quantise(kind, tuple(targets.items()))(x)


def _contiguous(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(x.shape)


def _plain(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index or (), shape, strict=True))


@lru_cache(maxsize=256)
def _convert(dtype: np.dtype, transposed: bool, target: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: (x.T if transposed else x).astype(dtype), out_shardings=target)


@lru_cache(maxsize=256)
def _quantise(kind: StoredKind, targets: tuple[tuple[str, Sharding], ...]) -> Callable[[jax.Array], Any]:
    return jax.jit(lambda x: dict(kind.quantise(x.T.astype(jnp.float32))), out_shardings=dict(targets))


def _transposed(sharding: Sharding) -> Sharding:
    """The sharding of an [N, K] matrix whose transpose has the given sharding."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, None, None)[:2]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec[::-1]))


def _draw_adapters(leaves: dict, adapters: Sequence[AdapterSpec], place: ShardingRule) -> None:
    names = {".".join(map(str, path)): path for path, leaf in leaves.items() if isinstance(leaf, nnx.LoRAParam)}
    drawn = init_leaves(adapters, {name: leaves[path].shape for name, path in names.items()})
    for name, path in names.items():
        leaves[path] = leaves[path].replace(jax.device_put(drawn[name], place(name, drawn[name].shape)))
