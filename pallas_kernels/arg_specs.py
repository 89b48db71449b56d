"""Named shapes that tests, tuner and benchmark share, and the arrays for them.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.dropout import Dropout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """One LoRA linear layer."""

    tokens: int
    in_features: int
    out_features: int
    rank: int = 16
    adapters: int = 1
    rate: float = 0.0
    tile: int = 128
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"T{self.tokens}_K{self.in_features}_N{self.out_features}_r{self.rank}_A{self.adapters}_p{self.rate:g}"


BENCHMARK_SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (5120, 5120), (8192, 8192))
TUNED_SHAPES = (*BENCHMARK_SHAPES, (4096, 1024))  # and keys and values of an 8B model
BENCHMARK_TOKENS = (2048, 4096, 8192, 16384)
QUICK_TOKENS = 8192


def tuning_specs(*, quick: bool = False) -> list[LinearSpec]:
    """Every layer whose tile sizes the shipped table may hold; with `quick` at 8192 tokens only.

    Of four adapters: the tile of a single one is its whole microbatch, and not all that fits there fits several.
    """
    return [
        LinearSpec(tokens=t, in_features=k, out_features=n, rank=r, adapters=4, rate=p)
        for t in ((QUICK_TOKENS,) if quick else BENCHMARK_TOKENS)
        for k, n in TUNED_SHAPES
        for r in (16, 64)
        for p in (0.1, 0.0)
    ]


def make_arrays(spec: LinearSpec, seed: int = 0) -> dict[str, jax.Array | Dropout | None]:
    """Draws normal inputs; several adapters have mixed ranks, from the full one down to 8, and contiguous tiles."""
    keys = jax.random.split(jax.random.key(seed), 5)
    dtype = jnp.dtype(spec.dtype)
    mixed = [spec.rank >> shift for shift in range(spec.rank.bit_length()) if spec.rank >> shift >= 8]
    ranks = jnp.resize(jnp.array(mixed or [spec.rank]), spec.adapters)
    rank_mask = (jnp.arange(spec.rank)[None, :] < ranks[:, None]).astype(dtype)

    def normal(key, shape, scale):
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)

    num_tiles = spec.tokens // spec.tile
    dropout = None
    if spec.rate:
        dropout = Dropout(
            rate=jnp.full(spec.adapters, spec.rate, jnp.float32),
            key=jnp.arange(1, spec.adapters + 1, dtype=jnp.uint32),
            row_key=jax.random.bits(keys[4], (spec.tokens,), jnp.uint32),
        )
    a = normal(keys[2], (spec.adapters, spec.in_features, spec.rank), spec.in_features**-0.5)
    b = normal(keys[3], (spec.adapters, spec.rank, spec.out_features), spec.rank**-0.5)
    return {
        "x": normal(keys[0], (spec.tokens, spec.in_features), 1.0),
        "w": normal(keys[1], (spec.in_features, spec.out_features), spec.in_features**-0.5),
        "a": a * rank_mask[:, None, :],
        "b": b * rank_mask[:, :, None],
        "dy": normal(jax.random.fold_in(keys[0], 1), (spec.tokens, spec.out_features), 1.0),
        "tile_adapter": (jnp.arange(num_tiles) * spec.adapters // num_tiles).astype(jnp.int32),
        "scale": jnp.linspace(1.0, 2.0, spec.adapters, dtype=jnp.float32),
        "dropout": dropout,
    }
