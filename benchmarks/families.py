"""Attention with windows and soft caps beside full attention, and a layer of Gemma-2-9B's shape over its frozen layer.

    python benchmarks/families.py --out DIR [--budget 120] [--small]

Checks each implementation against XLA's form before it times it. Prints conditions and a row per variant; rows are also
written to DIR/families.jsonl. All variants of a section run in one process, in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.conditions import conditions
from benchmarks.harness import write_within_budget
from benchmarks.layer_times import difference, seconds_of
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.models import ModelConfig, Segments, attention
from lorafusion_jax.models.forward import layer_inputs
from lorafusion_jax.models.layer import DecoderLayer
from lorafusion_jax.modules import LoRAContext

GEMMA2_9B = {
    "family": "gemma2", "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336, "num_layers": 2,
    "num_heads": 16, "num_kv_heads": 8, "head_dim": 256, "norms": "sandwich", "norm_offset": 1.0,
    "activation": "gelu_tanh", "attention_scale": 256**-0.5, "attention_soft_cap": 50.0,
}  # fmt: skip
SMALL = GEMMA2_9B | {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "window 4096": {"window": 4096},
    "window 1024": {"window": 1024},
    "window 512": {"window": 512},
    "cap": {"soft_cap": 50.0},
    "cap, window 1024": {"soft_cap": 50.0, "window": 1024},
}
IMPLEMENTATIONS = ("pallas_mosaic_gpu", "cudnn", "pallas_triton", "xla")
REPEATS = 5


def main() -> int:
    return write_within_budget("families", __doc__ or "", 120, _rows)


def _rows(small: bool) -> Iterator[dict[str, Any]]:
    yield {"section": "conditions", **conditions()}
    for adapters in (1, 4):
        yield from _layer_rows(SMALL if small else GEMMA2_9B, 256 if small else 8192, adapters)
    for width in (16,) if small else (128, 256):
        yield from _attention_rows(width, 256 if small else 8192, *((2, 1) if small else (16, 8)))


def _attention_rows(width: int, T: int, heads: int, key_heads: int) -> Iterator[dict[str, Any]]:
    """Forward and backward of attention over one sample that fills the microbatch, and over eight."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (
        jax.random.normal(key, (T, n, width), jnp.bfloat16)
        for key, n in zip(keys, (heads, key_heads, key_heads, heads), strict=True)
    )
    for samples in (1, 8):
        segments = jax.tree.map(jnp.asarray, Segments.from_lengths([T // samples] * samples, T))
        for name, rule in RULES.items():
            wanted = None
            for implementation in reversed(IMPLEMENTATIONS):
                run = jax.jit(partial(_passes, implementation=implementation, **rule))
                row = {"section": "attention", "width": width, "samples": samples, "rule": name}
                row["implementation"] = implementation
                try:
                    outputs = jax.block_until_ready(run(q, k, v, do, segments))
                except Exception as problem:  # a variant that a device cannot run is a row, too
                    yield row | {"failed": str(problem).splitlines()[0][:200]}
                    continue
                wanted = outputs if wanted is None else wanted
                error = max(difference(a, b) for a, b in zip(outputs, wanted, strict=True))
                assert error < 0.05, (row, error)
                yield row | {"us": 1e6 * _seconds(partial(run, q, k, v, do, segments)), "error": error}


def _passes(q, k, v, do, segments, *, implementation: str, **rule: Any):
    o, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, segments, implementation=implementation, **rule), q, k, v)
    return o, *pullback(do)


def _layer_rows(shape: dict[str, Any], T: int, count: int) -> Iterator[dict[str, Any]]:
    """Forward and backward of a layer with a window and of one without, with adapters and frozen."""
    rope = Rope()
    config = ModelConfig(**shape, pattern=(LayerType(window=4096, rope=rope), LayerType(rope=rope)))
    specs = [AdapterSpec(name=f"a{n}", rank=16, alpha=32, dropout=0.1, seed=n) for n in range(count)]
    tile = max(T // 64, 16)
    table = jnp.arange(T // tile, dtype=jnp.int32) * count // (T // tile)
    segments = jax.tree.map(jnp.asarray, Segments.from_lengths([T // 8] * 8, T))
    x = jax.random.normal(jax.random.key(1), (T, config.hidden_size), jnp.bfloat16)
    positions = jnp.arange(T) % (T // 8)
    for number, name in enumerate(("window", "full")):
        times = {}
        for adapters in ([], specs):
            layer = DecoderLayer(config, adapters, number=number, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
            graph, lora, frozen = nnx.split(layer, nnx.LoRAParam, ...)

            def passes(x, lora, frozen, graph=graph, adapters=adapters):
                keys = jnp.arange(T, dtype=jnp.uint32)
                context = LoRAContext.of(adapters, table, row_key=keys) if adapters else None
                inputs = layer_inputs(config, positions, segments, context)
                y, pullback = jax.vjp(lambda x, lora: nnx.merge(graph, lora, frozen)(x, inputs), x, lora)
                return y, pullback(y)

            run = jax.jit(passes)
            assert bool(jnp.isfinite(run(x, lora, frozen)[0].astype(jnp.float32)).all())
            times[len(adapters)] = _seconds(partial(run, x, lora, frozen))
        yield {
            "section": "layer", "layer": name, "adapters": count, "frozen_us": 1e6 * times[0],
            "adapted_us": 1e6 * times[count], "over_frozen": times[count] / times[0],
        }  # fmt: skip


def _seconds(run: Callable[[], Any], calls: int = 10) -> float:
    return seconds_of(run, calls, REPEATS)


if __name__ == "__main__":
    raise SystemExit(main())
