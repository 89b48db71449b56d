"""Do short tiles pay on a card? A layer of Llama-3.1-8B's shape with 64 adapters, by the rows of a tile.

    python -m benchmarks.short_tiles --out DIR [--budget 90] [--small]      # one Hopper GPU

A sample starts on a tile of its own, so its last tile is padded: of samples of 64 to 512 tokens tiles of 128 rows waste
a sixth, of 32 rows a twentieth. A row of `short_tiles.jsonl` has the time of 8 192 rows, forward and backward, with
LoRA of rank 8 on all linears or on two, and `useful_of_first`: useful tokens per second of such samples over those of
the first row, tiles of 128. Tiles that Hopper's kernels do not serve are XLA's by default. All are compiled side by
side and timed in turns.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.conditions import conditions
from benchmarks.harness import write_within_budget
from benchmarks.layer_times import seconds_of
from benchmarks.random_job import SHAPE, SMALL
from lorafusion_jax.adapters.spec import AdapterSpec, resolve_targets
from lorafusion_jax.models import ModelConfig, Segments
from lorafusion_jax.models.forward import layer_inputs
from lorafusion_jax.models.layer import DecoderLayer
from lorafusion_jax.modules import LoRAContext
from pallas_kernels import compiler_options
from pallas_kernels.policy import Implementation

TILES = (128, 64, 32, 16)
TARGETS: dict[str, Any] = {"q, v": ["q_proj", "v_proj"], "all linears": "all-linear"}
LENGTHS = range(64, 513)
RANK, TURNS, CALLS = 8, 5, 5

type Case = tuple[str, int, Implementation | None]  # targets, rows of a tile, form; None: as a run has it


def main() -> int:
    return write_within_budget("short_tiles", __doc__ or "", 90, _rows)


def _rows(small: bool) -> Iterator[dict[str, Any]]:
    yield {"section": "conditions", **conditions()}
    config = ModelConfig(family="llama", **(SMALL if small else SHAPE))
    tokens, adapters, tiles = (128, 2, (64, 16)) if small else (8192, 64, TILES)
    cases: list[Case] = [(targets, tile, None) for targets in TARGETS for tile in tiles]
    cases.extend(("q, v", tile, "pallas_triton") for tile in tiles if tile < 64)
    with ThreadPoolExecutor(len(cases)) as pool:
        begun = []
        for case in cases:
            try:
                lowered, arrays = _lowered(config, tokens, adapters, case)
                options = compiler_options() if jax.default_backend() == "gpu" else None
                begun.append((case, pool.submit(lowered.compile, options), arrays))
            except Exception as problem:  # a form that does not serve a tile is a row, too
                yield _row(case) | {"failed": str(problem).splitlines()[0][:300]}
        began, ready = time.perf_counter(), {}
        for case, compiled, arrays in begun:
            try:
                run = partial(compiled.result(), *arrays)
                jax.block_until_ready(run())
                ready[case] = run
            except Exception as problem:
                yield _row(case) | {"failed": str(problem).splitlines()[0][:300]}
        print(f"waited {time.perf_counter() - began:.0f} s for the compiler", flush=True)
    times: dict[Case, list[float]] = {case: [] for case in ready}
    for turn in range(TURNS):
        for case in random.Random(turn).sample(list(ready), len(ready)):
            times[case].append(seconds_of(ready[case], CALLS, 1))
    medians = {case: statistics.median(seconds) for case, seconds in times.items()}
    for case, seconds in medians.items():
        row = _row(case) | {"tokens": tokens, "adapters": adapters, "ms": 1e3 * seconds}
        if usual_s := medians.get((case[0], tiles[0], None)):
            row["useful_of_first"] = usual_s / seconds * useful_share(case[1]) / useful_share(tiles[0])
        yield row


def _lowered(config: ModelConfig, tokens: int, adapters: int, case: Case) -> tuple[Any, tuple[Any, ...]]:
    """Forward and backward passes of a layer, and their arguments."""
    targets, tile, form = case
    chosen = resolve_targets(TARGETS[targets], config.targets)
    specs = [AdapterSpec(name=f"a{n}", rank=RANK, alpha=16, targets=chosen, seed=n) for n in range(adapters)]
    layer = DecoderLayer(config, specs, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, lora, frozen = nnx.split(layer, nnx.LoRAParam, ...)
    x = jax.random.normal(jax.random.key(1), (tokens, config.hidden_size), jnp.bfloat16)
    segments = jax.tree.map(jnp.asarray, Segments.from_lengths([tokens // 32] * 32, tokens))
    positions = jnp.arange(tokens) % (tokens // 32)
    table = jnp.arange(tokens // tile, dtype=jnp.int32) * adapters // (tokens // tile)

    def passes(x, lora, frozen, table):
        context = LoRAContext.of(specs, table, implementation=form)
        inputs = layer_inputs(config, positions, segments, context)
        y, pullback = jax.vjp(lambda x, lora: nnx.merge(graph, lora, frozen)(x, inputs), x, lora)
        return y, pullback(y)

    arrays = x, lora, frozen, table
    return jax.jit(passes).lower(*arrays), arrays


def _row(case: Case) -> dict[str, Any]:
    targets, tile, form = case
    return {"section": "layer", "targets": targets, "tile": tile, "form": form or "default"}


def useful_share(tile: int) -> float:
    """Tokens of samples over the rows that they take."""
    return sum(LENGTHS) / sum(-(-length // tile) * tile for length in LENGTHS)


if __name__ == "__main__":
    raise SystemExit(main())
