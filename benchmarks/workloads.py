"""Shapes of real models and sample lengths of five workloads; no jax, so that programs in torch draw the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LENGTHS = {"xsum": (540, 380), "cnn": (950, 430), "wiki": (1900, 900)}  # mean and spread in tokens, log-normal
WORKLOADS = ("xsum", "cnn", "wiki", "mix", "het")
LONGEST = 4096
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "family": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32,
        "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 500000.0,
    },
    "32b": {
        "family": "qwen2", "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648, "num_layers": 64,
        "num_heads": 40, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 1e6, "qkv_bias": True,
    },
    "70b": {
        "family": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_layers": 80,
        "num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "rope_theta": 500000.0,
    },
    "tiny": {
        "family": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_layers": 4,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    },
}  # fmt: skip


def sample_lengths(
    draw: np.random.Generator, workload: str, adapter: int, count: int, scale: float, longest: int
) -> list[int]:
    """Lengths of one adapter's samples: all of one kind, of all kinds mixed, or of a kind of its own."""
    kinds = {"mix": list(LENGTHS), "het": [[*LENGTHS, "mix"][adapter % 4]]}.get(workload, [workload])
    kinds = list(LENGTHS) if kinds == ["mix"] else kinds
    columns = []
    for kind in kinds:
        mean, spread = LENGTHS[kind]
        variance = np.log(1 + (spread / mean) ** 2)
        columns.append(draw.lognormal(np.log(mean * scale) - variance / 2, np.sqrt(variance), count))
    return np.choose(draw.integers(0, len(columns), count), columns).clip(32 * scale + 2, longest).astype(int).tolist()


def pair_lengths(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(prompt, chosen, rejected) tokens of pairs: two samples each, a third of the shorter one is their prompt."""
    pairs = []
    for first, second in zip(lengths[::2], lengths[1::2], strict=True):
        prompt = max(1, min(first, second) // 3)
        pairs.append((prompt, max(1, first - prompt), max(1, second - prompt)))
    return pairs
