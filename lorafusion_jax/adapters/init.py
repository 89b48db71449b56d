"""Initial weights of adapters: pure functions of (seed, path, shape), independent of other adapters.

A adapters · K in · N out · R padded rank · r an adapter's rank · L stacked layers
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from lorafusion_jax.adapters.kind import Leaf
from lorafusion_jax.adapters.spec import AdapterSpec, bank_rank
from lorafusion_jax.adapters.table import adapter_kind

LAYERS = "layers"
SHARED = "shared"  # stands for the projection where leaves are shared by all of them


def init_adapter(
    spec: AdapterSpec, path: str, in_features: int, out_features: int, experts: int = 0
) -> dict[str, np.ndarray]:
    """Draws the weights of an adapter in one projection; for LoRA, with PEFT's distribution.

    A ~ U(-1/sqrt(K), 1/sqrt(K)) (Kaiming uniform with a = sqrt 5), B = 0

    Args:
        spec: its kind, rank and seed are used.
        path: the projection, e.g. "layers.3.self_attn.q_proj".
        in_features: K.
        out_features: N.
        experts: E, if it is a projection of experts.

    Returns:
        Leaf → float32 array; for LoRA "lora_a" [K, r] and "lora_b" [r, N]. Shared leaves are not among them. Beyond its
        rank in this projection they are zero, and zero if it does not adapt it.

    >>> tensors = init_adapter(AdapterSpec(name="law", rank=2, alpha=4), "layers.0.self_attn.q_proj", 64, 32)
    >>> a, b = tensors["lora_a"], tensors["lora_b"]
    >>> a.shape, b.shape, bool(abs(a).max() <= 1 / 8), b.any().item()
    ((64, 2), (2, 32), True, False)
    """
    sizes, leaves = (in_features, out_features), adapter_kind(spec.kind).leaves_at(path)
    if spec.patterns is None:
        return {leaf.name: draw_leaf(leaf, spec.seed, path, leaf.shape(*sizes, spec.rank, experts)) for leaf in leaves}
    zeros = {leaf.name: np.zeros(leaf.shape(*sizes, spec.rank, experts), np.float32) for leaf in leaves}
    if spec.has(path):
        rank = spec.rank_at(path)
        for leaf in leaves:
            values = draw_leaf(leaf, spec.seed, path, leaf.shape(*sizes, rank, experts))
            leaf.at_rank(zeros[leaf.name], rank)[...] = values
    return zeros


def init_shared(spec: AdapterSpec, in_features: int, out_features: int) -> dict[str, np.ndarray]:
    """Draws the tensors that all projections of an adapter share.

    Args:
        in_features, out_features: the largest of the model.
    """
    return {
        leaf.name: draw_leaf(leaf, spec.seed, SHARED, leaf.shape(in_features, out_features, spec.rank))
        for leaf in adapter_kind(spec.kind).shared
    }


def draw_leaf(leaf: Leaf, seed: int, path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draws a tensor, which depends only on the adapter's seed, the path, the leaf and the shape."""
    if leaf.axes[0] == "E":
        streams = [_stream(f"{path}.{expert}", leaf.name) for expert in range(shape[0])]
        return np.stack([leaf.init(partial(_uniform, seed, stream), shape[1:]) for stream in streams])
    return leaf.init(partial(_uniform, seed, _stream(path, leaf.name)), shape)


def init_layers(
    spec: AdapterSpec, path: str, in_features: int, out_features: int, numbers: Sequence[int], experts: int = 0
) -> dict[str, np.ndarray]:
    """Draws the weights of an adapter in one projection of several layers.

    Args:
        path: path of the projection without the layer's number, "layers.self_attn.q_proj".
        numbers: of the layers.

    Returns:
        Leaf → float32 array; for LoRA "lora_a" [L, K, r] and "lora_b" [L, r, N].
    """
    sizes = in_features, out_features, experts
    layer_leaves: dict[str, np.ndarray] = {}
    for row, number in enumerate(numbers):  # layer by layer: memory of one is used again for the next
        for leaf, array in init_adapter(spec, _layer_path(path, number), *sizes).items():
            if leaf not in layer_leaves:
                layer_leaves[leaf] = np.empty((len(numbers), *array.shape), array.dtype)
            layer_leaves[leaf][row] = array
    return layer_leaves


def init_bank(
    adapters: Sequence[AdapterSpec],
    path: str,
    in_features: int,
    out_features: int,
    rank: int | None = None,
    members: Sequence[int] | None = None,
    largest: tuple[int, int] | None = None,
    experts: int = 0,
) -> dict[str, np.ndarray]:
    """Stacks the initial weights of all adapters in one projection.

    Adapters of lower rank or of another kind, and those that do not target the projection, have zeros there. Zero
    columns of A with zero rows of B get zero gradients, so they stay zero.

    Args:
        adapters: in stacking order.
        path: the projection.
        in_features: K.
        out_features: N.
        rank: R (None: the largest rank of the adapters that target the projection).
        members: indices of these adapters (None: those whose `targets` name the last part of the path).
        largest: K and N of shared leaves (None: those of the projection).
        experts: E, if it is a projection of experts.

    Returns:
        Leaf → float32 array; "lora_a" [A, K, R], "lora_b" [A, R, N], and those of other kinds.
    """
    name = path.rsplit(".", 1)[-1]
    rank = bank_rank(adapters, name) if rank is None else rank
    leaves = _leaves_at(path, adapters)
    sizes = (in_features, out_features)
    largest = sizes if largest is None else largest
    bank = {
        key: np.zeros((len(adapters), *leaf.shape(*(largest if leaf.shared else sizes), rank, experts)), np.float32)
        for key, leaf in leaves.items()
    }
    for index in [index for index, spec in enumerate(adapters) if name in spec.targets] if members is None else members:
        spec = adapters[index]
        tensors = init_adapter(spec, path, *sizes, experts) | init_shared(spec, *largest)
        for key, tensor in tensors.items():
            leaves[key].at_rank(bank[key][index], spec.rank)[...] = tensor
    return bank


def init_leaves(adapters: Sequence[AdapterSpec], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Draws all leaves of a decoder. Unrolled and stacked layers get the same values.

    Args:
        adapters: in stacking order.
        shapes: for LoRA "layers.0.self_attn.q_proj.lora_a" → (A, K, R), "….lora_b" → (A, R, N), or without the layer's
            number → (L, A, K, R).

    Returns:
        float32 arrays under the same names.
    """
    leaves: dict[str, np.ndarray] = {}
    for path in dict.fromkeys(name.rsplit(".", 1)[0] for name in shapes):
        leaf_of = _leaves_at(path, adapters)
        leaf_shapes = {name: shapes[f"{path}.{name}"] for name in leaf_of if f"{path}.{name}" in shapes}
        sizes = {}
        for name, shape in leaf_shapes.items():
            axes = leaf_of[name].axes
            sizes |= dict(zip(axes, shape[len(shape) - len(axes) :], strict=True))
        name, shape = next(iter(leaf_shapes.items()))
        stack = shape[: len(shape) - len(leaf_of[name].axes) - 1]
        numbers = range(stack[0]) if stack else [None]
        banks = [
            init_bank(
                adapters, _layer_path(path, number), sizes["K"], sizes["N"], sizes["R"], experts=sizes.get("E", 0)
            )
            for number in numbers
        ]
        for name in banks[0]:
            bank = [bank[name] for bank in banks]
            leaves[f"{path}.{name}"] = np.stack(bank) if stack else bank[0]
    return leaves


def _leaves_at(path: str, adapters: Sequence[AdapterSpec]) -> dict[str, Leaf]:
    """The leaves of these adapters in a projection, by name."""
    names = list(dict.fromkeys(spec.kind for spec in adapters))
    shared = {leaf.name: leaf for name in names for leaf in adapter_kind(name).shared}
    return {leaf.name: leaf for name in names for leaf in adapter_kind(name).leaves_at(path)} | shared


def _stream(path: str, leaf: str) -> str:
    """Returns the random stream of a leaf. That of A is the path alone, as in the first versions."""
    return path if leaf == "lora_a" else f"{path} {leaf}"


def _layer_path(path: str, number: int | None) -> str:
    return path if number is None else path.replace(f"{LAYERS}.", f"{LAYERS}.{number}.", 1)


def _uniform(seed: int, path: str, count: int) -> np.ndarray:
    """Draws float32 in [0, 1) from raw Philox output: numpy may change its distributions, not its bit generators."""
    key = int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:16], "little")
    raw = np.random.Philox(key=key).random_raw(-(-count // 2)).view(np.uint32)[:count]
    raw >>= np.uint32(8)  # in place, as below: an 8B model draws a hundred million numbers
    uniforms = raw.astype(np.float32)
    uniforms *= np.float32(2**-24)
    return uniforms
