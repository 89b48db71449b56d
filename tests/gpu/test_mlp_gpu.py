"""The gated MLP as one op on a real Hopper GPU: make gpu-test.

Llama-3.1-8B's shape, 8192 tokens, four adapters of rank 16, bfloat16.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, HIDDEN, ADAPTERS, RANK, TILE = 8192, 4096, 14336, 4, 16, 128
BF16 = 1e-2


def normal(seed: int, *shape: int, scale: float = 1.0, dtype=jnp.bfloat16) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


def draw() -> dict:
    """Draws inputs of the op; the last two tiles are padding."""
    sizes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    tiles = TOKENS // TILE
    table = jnp.arange(tiles) * ADAPTERS // tiles
    return {
        "x": normal(0, TOKENS, WIDTH),
        "ws": [normal(1 + i, *size, scale=size[0] ** -0.5) for i, size in enumerate(sizes)],
        "as_": [normal(4 + i, ADAPTERS, k, RANK, scale=0.02, dtype=jnp.float32) for i, (k, _) in enumerate(sizes)],
        "bs": [normal(7 + i, ADAPTERS, RANK, n, scale=0.05, dtype=jnp.float32) for i, (_, n) in enumerate(sizes)],
        "tile_adapter": jnp.where(jnp.arange(tiles) < tiles - 2, table, -1).astype(jnp.int32),
        "scale": jnp.full(ADAPTERS, 2.0),
        "dropout": pk.Dropout(
            rate=jnp.full(ADAPTERS, 0.1),
            key=jnp.arange(ADAPTERS, dtype=jnp.uint32),
            row_key=jax.random.bits(jax.random.key(10), (TOKENS,)),
        ),
        "dy": normal(11, TOKENS, WIDTH),
    }


def step(problem: dict, implementation: str) -> tuple:
    """Computes y and all gradients."""

    def run(x, as_, bs):
        rest = {name: problem[name] for name in ("tile_adapter", "scale", "dropout")}
        return pk.multi_lora_mlp(
            x, problem["ws"], as_, bs, down_dropout=problem["dropout"], implementation=implementation, **rest
        )

    y, vjp = jax.vjp(run, problem["x"], problem["as_"], problem["bs"])
    return y, vjp(problem["dy"])


def errors(problem: dict) -> list[float]:
    """Relative errors of y and every gradient against XLA in float32."""
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, problem)
    want = jax.jit(lambda p: step(p, "xla"))(wide)
    got = jax.jit(lambda p: step(p, "pallas_mosaic_gpu"))(problem)

    def error(got: jax.Array, want: jax.Array) -> float:
        return float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want))

    return jax.tree.leaves(jax.tree.map(error, got, want))


@pytest.fixture(scope="module")
def problem():
    return draw()


def test_right_against_float32(problem):
    assert max(errors(problem)) < BF16


def test_two_runs_are_bitwise_equal(problem):
    run = jax.jit(lambda problem: step(problem, "pallas_mosaic_gpu"))
    first, second = run(problem), run(problem)
    assert all(
        np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )
