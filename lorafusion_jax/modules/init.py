"""Initial weights of adapters: pure functions of (seed, path, shape), so company cannot change them.

A adapters · K in · N out · R padded rank · r an adapter's rank · L stacked layers
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

from lorafusion_jax.modules.spec import AdapterSpec, bank_rank

LAYERS = "layers"


def init_adapter(spec: AdapterSpec, path: str, in_features: int, out_features: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws A and B of one projection as PEFT does.

    A ~ U(-1/sqrt(K), 1/sqrt(K)) (Kaiming uniform with a = sqrt 5), B = 0

    Args:
        spec: rank and seed count.
        path: the projection, e.g. "layers.3.self_attn.q_proj".
        in_features: K.
        out_features: N.

    Returns:
        a [K, r], b [r, N], float32.

    >>> a, b = init_adapter(AdapterSpec(name="law", rank=2, alpha=4), "layers.0.self_attn.q_proj", 64, 32)
    >>> a.shape, b.shape, bool(abs(a).max() <= 1 / 8), b.any().item()
    ((64, 2), (2, 32), True, False)
    """
    bound = 1 / math.sqrt(in_features)
    a_Kr = (2 * _uniform(spec.seed, path, in_features * spec.rank) - 1) * np.float32(bound)
    return a_Kr.reshape(in_features, spec.rank), np.zeros((spec.rank, out_features), np.float32)


def init_bank(
    adapters: Sequence[AdapterSpec],
    path: str,
    in_features: int,
    out_features: int,
    rank: int | None = None,
    members: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Stacks the initial weights of all adapters in one projection.

    Adapters of lower rank, and those that do not target the projection, have zeros there; zero columns of A beside
    zero rows of B get zero gradients, so they stay zero.

    Args:
        adapters: in stacking order.
        path: the projection.
        in_features: K.
        out_features: N.
        rank: R, if not the largest rank among the adapters that target the projection.
        members: indices of those adapters, if not the ones whose `targets` name the last part of the path.

    Returns:
        a [A, K, R], b [A, R, N], float32.
    """
    name = path.rsplit(".", 1)[-1]
    rank = bank_rank(adapters, name) if rank is None else rank
    a_AKR = np.zeros((len(adapters), in_features, rank), np.float32)
    b_ARN = np.zeros((len(adapters), rank, out_features), np.float32)
    for index in [index for index, spec in enumerate(adapters) if name in spec.targets] if members is None else members:
        rank = adapters[index].rank
        a_AKR[index, :, :rank], b_ARN[index, :rank] = init_adapter(adapters[index], path, in_features, out_features)
    return a_AKR, b_ARN


def init_leaves(adapters: Sequence[AdapterSpec], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Draws all LoRA leaves of a decoder, unrolled or stacked, to the same numbers.

    Args:
        adapters: in stacking order.
        shapes: "layers.0.self_attn.q_proj.lora_a" → (A, K, R), "….lora_b" → (A, R, N), or without the layer's number
            → (L, A, K, R).

    Returns:
        float32 arrays under the same names.
    """
    leaves: dict[str, np.ndarray] = {}
    for path in dict.fromkeys(name.rsplit(".", 1)[0] for name in shapes):
        a_shape, b_shape = shapes[f"{path}.lora_a"], shapes[f"{path}.lora_b"]
        numbers = [None] if len(a_shape) == 3 else range(a_shape[0])
        banks = [init_bank(adapters, _at(path, number), a_shape[-2], b_shape[-1], a_shape[-1]) for number in numbers]
        a, b = banks[0] if len(a_shape) == 3 else (np.stack(parts) for parts in zip(*banks, strict=True))
        leaves[f"{path}.lora_a"], leaves[f"{path}.lora_b"] = a, b
    return leaves


def _at(path: str, number: int | None) -> str:
    return path if number is None else path.replace(f"{LAYERS}.", f"{LAYERS}.{number}.", 1)


def _uniform(seed: int, path: str, count: int) -> np.ndarray:
    """float32 in [0, 1), made of raw Philox output: numpy may change its distributions, not its bit generators."""
    key = int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:16], "little")
    raw = np.random.Philox(key=key).random_raw(-(-count // 2)).view(np.uint32)[:count]
    return (raw >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
