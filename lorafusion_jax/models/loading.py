"""Hugging Face directory → Decoder, tensor by tensor, straight to its place on the devices.

Dims: `K` in · `N` out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
from .checkpoint import READABLE, Stored, list_tensors, read_slice
from .decoder import Decoder
from .naming import Tensor, frozen_tensors, is_ignored

ShardingRule = Callable[[str, tuple[int, ...]], Sharding]


def load_decoder(
    model_dir: str | os.PathLike[str],
    adapters: Sequence[AdapterSpec] = (),
    *,
    dtype: Any = jnp.bfloat16,
    sharding: Sharding | ShardingRule | None = None,
) -> Decoder:
    """Reads a model directory into a decoder with fresh LoRA weights.

    Each device reads only the bytes of its own part; the host holds about one tensor at a time.

    Args:
        model_dir: config.json and safetensors, single or sharded with an index.
        adapters: see `Decoder`.
        dtype: of the base weights; the checkpoint's are converted on the device.
        sharding: of every leaf, or a function (leaf name such as "layers.0.mlp.up_proj.kernel", shape) → sharding;
            default: everything on the first device.
    Raises:
        CheckpointError: an architecture that is not implemented; files that are absent or broken; all missing, extra
            and misshapen tensors in one message.
    """
    config = ModelConfig.from_hf(model_dir)
    model = nnx.eval_shape(lambda: Decoder(config, adapters, dtype=dtype, rngs=nnx.Rngs(0)))
    stored = list_tensors(model_dir)
    tensors = frozen_tensors(model)
    _check(tensors, stored, config, Path(model_dir))
    place = _rule(sharding)
    graph, state = nnx.split(model)
    leaves = dict(nnx.to_flat_state(state))
    last = None
    for tensor in tensors:
        leaf = leaves[tensor.path]
        target = place(tensor.leaf_name, leaf.shape)
        array = _read_tensor(tensor, stored[tensor.name], dtype, target)
        leaves[tensor.path] = leaf.replace(array)
        # The disk may run one leaf ahead of the devices, not more: host memory stays small.
        jax.block_until_ready(last)
        last = array
    _draw_adapters(leaves, adapters, place)
    return nnx.merge(graph, nnx.from_flat_state(leaves.items()))


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
            fix="use the config.json and the weights of one and the same model",
        )


def _rule(sharding: Sharding | ShardingRule | None) -> ShardingRule:
    if callable(sharding):
        return sharding
    everywhere = SingleDeviceSharding(jax.devices()[0]) if sharding is None else sharding
    return lambda name, shape: everywhere


def _read_tensor(tensor: Tensor, stored: Stored, dtype: Any, target: Sharding) -> jax.Array:
    on_disk = _transposed(target) if tensor.transposed else target
    x = jax.make_array_from_callback(
        tensor.shape, on_disk, lambda index: _contiguous(read_slice(stored, tensor.name, _plain(index, tensor.shape)))
    )
    return _convert(jnp.dtype(dtype), tensor.transposed, target)(x)


def _contiguous(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(x.shape)


def _plain(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index or (), shape, strict=True))


@lru_cache(maxsize=256)
def _convert(dtype: np.dtype, transposed: bool, target: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: (x.T if transposed else x).astype(dtype), out_shardings=target)


def _transposed(sharding: Sharding) -> Sharding:
    """The sharding of a [N, K] matrix whose transpose lies as `sharding` says."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, None, None)[:2]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec[::-1]))


def _draw_adapters(leaves: dict, adapters: Sequence[AdapterSpec], place: ShardingRule) -> None:
    names = {".".join(map(str, path)): path for path, leaf in leaves.items() if isinstance(leaf, nnx.LoRAParam)}
    drawn = init_leaves(adapters, {name: leaves[path].shape for name, path in names.items()})
    for name, path in names.items():
        leaves[path] = leaves[path].replace(jax.device_put(drawn[name], place(name, drawn[name].shape)))
