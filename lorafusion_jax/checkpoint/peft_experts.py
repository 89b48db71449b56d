"""Tensors of adapters of experts between their form here and in PEFT's files, whose two orders of experts differ.

| tensor | here | in a file | order of its long axis |
|---|---|---|---|
| lora_A | [E, r, K] | [E · r, K] | expert by expert |
| lora_B | [E, N, r] | [N, r · E] | rank by rank, experts fastest |

E experts · K in · N out · r rank
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lorafusion_jax.config.peft_experts import our_key, targets_of, their_key
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.layout.layer import EXPERTS

Tensors = dict[str, np.ndarray]


def to_file(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """Returns the tensors with PEFT's names and shapes."""
    targets = {name for key in tensors if (name := _expert_target(key))}
    return {their_key(key, targets): _flat(key, array) for key, array in tensors.items()}


def from_file(tensors: Mapping[str, np.ndarray], raw: Mapping[str, Any], where: str) -> Tensors:
    """Returns the tensors of a folder with our names and shapes.

    Args:
        raw: adapter_config.json.
        where: file, for messages.

    Raises:
        CheckpointError: `peft.tensors`, a tensor of experts is not a whole number of experts.
    """
    targets, rank = targets_of(raw), raw.get("r")
    rank = rank if type(rank) is int else 0
    named = {our_key(key, targets): array for key, array in tensors.items()}
    problems = [
        f"misshapen: {key} is {list(array.shape)}, which is no whole number of experts of rank {rank}"
        for key, array in named.items()
        if _expert_target(key) and not _is_whole(key, array, rank)
    ]
    if problems:
        raise CheckpointError(
            "peft.tensors", "the file does not hold this adapter.", where=where + "\n    " + "\n    ".join(problems)
        )
    return {key: _stacked(array, rank, key) if _expert_target(key) else array for key, array in named.items()}


def _expert_target(key: str) -> str | None:
    return next((name for name in EXPERTS if f".{name}." in key), None)


def _is_whole(key: str, array: np.ndarray, rank: int) -> bool:
    long = 0 if _is_a(key) else 1
    return array.ndim == 2 and rank > 0 and array.shape[long] % rank == 0


def _is_a(key: str) -> bool:
    return key.endswith("lora_A.weight")


def _flat(key: str, array: np.ndarray) -> np.ndarray:
    if array.ndim != 3:
        return array
    if _is_a(key):
        return array.reshape(-1, array.shape[2])
    return np.ascontiguousarray(array.transpose(1, 2, 0)).reshape(array.shape[1], -1)


def _stacked(array: np.ndarray, rank: int, key: str) -> np.ndarray:
    if _is_a(key):
        return array.reshape(-1, rank, array.shape[1])
    return np.ascontiguousarray(array.reshape(array.shape[0], rank, -1).transpose(2, 0, 1))
