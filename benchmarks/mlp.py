"""Benchmarks the gated MLP as one op: gate kernels by configuration, and the op against three ops and no LoRA.

    python -m benchmarks.mlp --out benchmarks/results/mlp_h200_2026-11-24      # one Hopper GPU, two minutes

Llama-3.1-8B's shape, 8192 tokens, four adapters of rank 16, bfloat16. The op is first compared with XLA in float32, and
nothing is timed if it is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from pallas_kernels.linear.chunks import make_chunks
from pallas_kernels.mlp import api as mlp
from pallas_kernels.mlp.hopper.gate import (
    BackwardInputs,
    GateConfig,
    WideGateConfig,
    gate_backward,
    gate_forward,
    wide_gate_backward,
)
from pallas_kernels.mlp.hopper.gate.config import gate_blocks
from pallas_kernels.mlp.xla import silu_gate
from pallas_kernels.tuning.timing import time_calls

TOKENS, WIDTH, HIDDEN, ADAPTERS, RANK, TILE = 8192, 4096, 14336, 4, 16, 128
PLACES = ((0, RANK), (RANK, RANK))
CONFIGS = (
    GateConfig(forward_stages=4, backward_stages=3),
    GateConfig(forward_stages=3, backward_stages=2),
    GateConfig(forward_stages=2, backward_stages=2),
    GateConfig(warpgroups=2, forward_stages=3, backward_stages=2),
)
WIDE_CONFIGS = (
    WideGateConfig(), WideGateConfig(parts=15), WideGateConfig(gating=1), WideGateConfig(gating=3),
    WideGateConfig(stages=4),
)  # fmt: skip
BF16 = 1e-2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    problem = draw()
    wrong = errors(problem)
    print("errors against float32:", " ".join(f"{error:.1e}" for error in wrong), flush=True)
    if not max(wrong) < BF16:
        return 1
    with (options.out / "mlp.jsonl").open("w") as file:
        for part, programs, round_s in (("kernel", kernels(problem), 0.02), ("mlp", whole(problem), 0.1)):
            lowered = [(name, jax.jit(function).lower(*given), given) for name, function, given in programs]
            with ThreadPoolExecutor() as pool:
                compiled = pool.map(lambda program: (program[0], (program[1].compile(), [program[2]])), lowered)
                calls = dict(compiled)
            for name, timing in time_calls(calls, rounds=7, round_s=round_s).items():
                row = {"part": part, "name": name, **dataclasses.asdict(timing)}
                file.write(json.dumps(row | {"device": jax.devices()[0].device_kind, "jax": jax.__version__}) + "\n")
                file.flush()
                print(f"{name:44s} {timing.p50_us:7.0f} us [{timing.p20_us:.0f}, {timing.p80_us:.0f}]", flush=True)
    return 0


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


def step(problem: dict, implementation: str | None = None, *, one_op: bool = True) -> tuple:
    """Computes y and all gradients; the baseline is the same MLP as three ops."""

    def run(x, as_, bs):
        rest = {name: problem[name] for name in ("tile_adapter", "scale", "dropout")}
        return pk.multi_lora_mlp(
            x, problem["ws"], as_, bs, down_dropout=problem["dropout"], implementation=implementation, **rest
        )

    apart = mock.patch.object(mlp, "_fused_call", return_value=None)
    with contextlib.nullcontext() if one_op else apart:
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


def kernels(problem: dict) -> Iterator[tuple[str, Callable, tuple]]:
    """Times the gate kernels, and XLA's gate without LoRA."""
    gate, up, dh = (normal(20 + i, TOKENS, HIDDEN) for i in range(3))
    s, ds = normal(23, TOKENS, 2 * RANK), normal(24, TOKENS, RANK)
    b, a = normal(25, ADAPTERS + 1, 2 * RANK, HIDDEN), normal(26, ADAPTERS + 1, RANK, HIDDEN)
    blocks = (jnp.arange(TOKENS // 64) * ADAPTERS // (TOKENS // 64)).astype(jnp.int32)
    bits = jax.random.bits(jax.random.key(27), (TOKENS, HIDDEN // 256, 8))
    chunks = make_chunks(blocks, ADAPTERS, gate_blocks(TOKENS), single=False)
    for config in CONFIGS:
        shared = {"places": PLACES, "config": config}
        tuning = f"{config.warpgroups} wg, {config.forward_stages} and {config.backward_stages} stages"
        for rate, drop, words in ((0.1, problem["dropout"], bits), (0, None, None)):
            yield (
                f"forward p{rate:g} {tuning}",
                lambda *given, shared=shared: gate_forward(*given, **shared),
                (gate, up, s, b, a, blocks, drop),
            )
            yield (
                f"backward p{rate:g} {tuning}",
                lambda *given, shared=shared: gate_backward(BackwardInputs(*given), **shared),
                (gate, up, dh, s, ds, b, a, words, chunks),
            )
    for config in WIDE_CONFIGS:
        adapter_chunks = make_chunks(blocks, ADAPTERS, config.blocks_per_chunk, single=False)
        for rate, words in ((0.1, bits), (0, None)):
            yield (
                f"all gradients p{rate:g} {config.gating} gate, {config.stages} stages, {config.parts} parts",
                lambda *given, config=config: wide_gate_backward(BackwardInputs(*given), places=PLACES, config=config),
                (gate, up, dh, s, ds, b, a, words, adapter_chunks),
            )
    yield "XLA gate forward", silu_gate, (gate, up)
    yield "XLA gate backward", lambda gate, up, dh: jax.vjp(silu_gate, gate, up)[1](dh), (gate, up, dh)


def whole(problem: dict) -> Iterator[tuple[str, Callable, tuple]]:
    def frozen(problem):
        def run(x):
            gate, up, down = problem["ws"]
            return silu_gate(x @ gate, x @ up) @ down

        y, vjp = jax.vjp(run, problem["x"])
        return y, vjp(problem["dy"])

    plain = problem | {"dropout": None}
    yield "frozen", frozen, (problem,)
    for rate, given in ((0.1, problem), (0, plain)):
        yield f"one op p{rate:g}", step, (given,)
        yield f"three ops p{rate:g}", lambda p: step(p, one_op=False), (given,)
        yield f"XLA p{rate:g}", lambda p: step(p, "xla"), (given,)


if __name__ == "__main__":
    sys.exit(main())
