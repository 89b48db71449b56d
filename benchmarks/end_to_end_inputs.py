"""Inputs of `end_to_end.py`: shapes of real models, random weights, and random tokens with realistic lengths."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lorafusion_jax.data.prepare import AdapterData
from lorafusion_jax.data.tokenized import TokenizedSet
from lorafusion_jax.pipeline.mesh import StageMesh
from scheduling import AdapterJob

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


class Draw:
    """Random tensors of a stage: norms 1, biases 0, kernels scaled by their input size."""

    def __init__(self, stage: StageMesh, dtype: Any):
        self._stage, self._dtype, self._key, self._made = stage, dtype, 0, {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        self._key += 1
        kind = (name.rsplit(".", 1)[-1] if len(shape) < 2 else "kernel", shape)
        if kind not in self._made:
            target = self._stage.weight(shape)

            def make(seed: jax.Array) -> jax.Array:
                if kind[0] != "kernel":
                    return jnp.full(shape, 0.0 if kind[0] == "bias" else 1.0, self._dtype)
                key = jax.random.wrap_key_data(jnp.full(4, seed, jnp.uint32), impl="unsafe_rbg")
                return jax.random.normal(key, shape, self._dtype) * jnp.asarray(shape[0] ** -0.5, self._dtype)

            self._made[kind] = jax.jit(make, out_shardings=target)
        return self._made[kind](self._key)


def sample_lengths(
    draw: np.random.Generator, workload: str, adapter: int, count: int, scale: float, longest: int
) -> list[int]:
    """Lengths of one adapter's samples: one kind for all adapters, all kinds mixed, or one kind per adapter."""
    kinds = {"mix": list(LENGTHS), "het": [[*LENGTHS, "mix"][adapter % 4]]}.get(workload, [workload])
    kinds = list(LENGTHS) if kinds == ["mix"] else kinds
    columns = []
    for kind in kinds:
        mean, spread = LENGTHS[kind]
        variance = np.log(1 + (spread / mean) ** 2)
        columns.append(draw.lognormal(np.log(mean * scale) - variance / 2, np.sqrt(variance), count))
    return np.choose(draw.integers(0, len(columns), count), columns).clip(32 * scale + 2, longest).astype(int).tolist()


def random_data(job: AdapterJob, vocab: int, seed: int) -> AdapterData:
    lengths = np.asarray(job.sample_tokens)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(offsets[-1], bool)
    mask[offsets[:-1]] = False
    tokens = np.random.default_rng(seed).integers(0, vocab, offsets[-1]).astype(np.int32)
    held = TokenizedSet(tokens=tokens, loss_mask=mask, offsets=offsets, rows=np.arange(len(lengths)), report=None)  # type: ignore[arg-type]
    return AdapterData(train=held, eval=None, order=np.arange(len(lengths)))
