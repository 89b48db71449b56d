"""A gated delta net over its frozen layer and beside gated full attention, of Qwen3.5-9B's shape.

    python benchmarks/delta_net.py --out DIR [--budget 150] [--small]

Checks the rule in chunks, by XLA and by the kernels, against the rule row by row before it times it. Prints conditions
and a row per variant; rows are also written to DIR/delta_net.jsonl. All variants run in one process; times are of
forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, get_args
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.conditions import conditions
from benchmarks.harness import write_within_budget
from benchmarks.layer_times import difference, seconds_of
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.families.delta_net import DeltaNet
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.models import ModelConfig, Segments, attention
from lorafusion_jax.models.forward import layer_inputs
from lorafusion_jax.models.layer import DecoderLayer
from lorafusion_jax.modules import LoRAContext
from pallas_kernels.delta_rule import gated_delta_rule
from pallas_kernels.delta_rule.api import DeltaRuleImplementation
from pallas_kernels.delta_rule.reference import delta_rule_by_rows
from pallas_kernels.delta_rule.triton import WalkConfig, walk
from pallas_kernels.delta_rule.xla import inverse_of_unit_lower, scan_chunks
from pallas_kernels.device import interprets

IMPLEMENTATIONS: tuple[DeltaRuleImplementation, ...] = get_args(DeltaRuleImplementation)

SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_heads": 16,
    "num_kv_heads": 4,
    "head_dim": 256,
}
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
NET = DeltaNet(width=4096, key_heads=16, value_heads=32, key_dim=128, value_dim=128)
SMALL_NET = DeltaNet(width=64, key_heads=2, value_heads=4, key_dim=16, value_dim=16)
ADAPTERS, RANK, REPEATS = 4, 16, 5


def main() -> int:
    return write_within_budget("delta_net", __doc__ or "", 150, _rows)


def _rows(small: bool) -> Iterator[dict[str, Any]]:
    yield {"section": "conditions", **conditions()}
    net, shape, tokens = (SMALL_NET, SMALL, 128) if small else (NET, SHAPE, 8192)
    for implementation in IMPLEMENTATIONS:
        yield _checked(net, 100 if small else 512, implementation)
    config = ModelConfig(
        family="qwen3_5_text", vocab_size=256, num_layers=2, qk_norm=True, norm_offset=1.0, attention_gate=True,
        delta_net=net, pattern=(LayerType(linear=True), LayerType(rope=Rope(channels=shape["head_dim"] // 4))), **shape,
    )  # fmt: skip
    yield from _rule_rows(net, config, tokens)
    for implementation in IMPLEMENTATIONS:
        rule = partial(gated_delta_rule, implementation=implementation)
        with mock.patch("lorafusion_jax.models.delta_net.gated_delta_rule", rule):
            yield from (row | {"rule": implementation} for row in _layer_rows(config, tokens))
    yield from _walk_rows(net, tokens)
    yield from _inverse_rows(net, tokens)


def _drawn(net: DeltaNet, tokens: int, dtype: Any) -> tuple[jax.Array, ...]:
    """q, k, v, decay and β of the rule."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k = (jax.random.normal(key, (tokens, net.key_heads, net.key_dim)) for key in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = jax.random.normal(keys[2], (tokens, net.value_heads, net.value_dim))
    decay = -jnp.exp(jax.random.uniform(keys[3], (tokens, net.value_heads), minval=-6, maxval=1))
    beta = jax.random.uniform(keys[4], (tokens, net.value_heads))
    return *(x.astype(dtype) for x in (q * net.key_dim**-0.5, k, v)), decay, beta


def _checked(net: DeltaNet, tokens: int, implementation: DeltaRuleImplementation) -> dict[str, Any]:
    """Outputs and gradients of two samples, of float32 and of the rounded inputs of bfloat16."""
    segments = jax.tree.map(jnp.asarray, Segments.from_lengths([tokens // 3], tokens))
    errors = {}
    for dtype, bound in ((jnp.float32, 1e-4), (jnp.bfloat16, 3e-2)):
        given = _drawn(net, tokens, dtype)
        wide = tuple(x.astype(jnp.float32) for x in given)
        wanted = jax.jit(partial(_passes, partial(delta_rule_by_rows, ids_T=segments.ids)))(*wide)
        actual = jax.jit(partial(_passes, partial(_rule, segments, implementation)))(*given)
        errors[jnp.dtype(dtype).name] = error = max(map(difference, actual, wanted))
        assert error < bound, (dtype, error)
    return {"section": "check", "rule": implementation, "tokens": tokens, **errors}


def _rule(segments: Segments, implementation: DeltaRuleImplementation, *rows: jax.Array) -> jax.Array:
    q, k, v, decay, beta = rows
    ids, offsets, lengths = map(jnp.asarray, (segments.ids, segments.offsets, segments.lengths))
    where = {"ids": ids, "offsets": offsets, "lengths": lengths}
    return gated_delta_rule(q, k, v, decay, beta, **where, implementation=implementation)


def _passes(function: Callable[..., jax.Array], *given: jax.Array) -> tuple[jax.Array, ...]:
    y, pullback = jax.vjp(function, *given)
    return y, *pullback(y)


def _rule_rows(net: DeltaNet, config: ModelConfig, tokens: int) -> Iterator[dict[str, Any]]:
    """The rule alone, and attention with as many operations of the projections around it."""
    given = _drawn(net, tokens, jnp.bfloat16)
    heads = ((config.num_heads, config.head_dim), *((config.num_kv_heads, config.head_dim),) * 2)
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (jax.random.normal(key, (tokens, *shape), jnp.bfloat16) for key, shape in zip(keys, heads, strict=True))
    for samples in (1, 8):
        segments = jax.tree.map(jnp.asarray, Segments.from_lengths([tokens // samples] * samples, tokens))
        for name, run, operands in (
            ("rule", partial(_rule, segments, "xla"), given),
            ("rule, pallas_triton", partial(_rule, segments, "pallas_triton"), given),
            ("attention", lambda q, k, v, segments=segments: attention(q, k, v, segments), (q, k, v)),
        ):
            row = {"section": "mixer", "mixer": name, "tokens": tokens, "samples": samples}
            for passes in ("forward", "both"):
                function = jax.jit(run if passes == "forward" else partial(_passes, run))
                row[f"{passes}_us"] = 1e6 * _seconds(partial(function, *operands))
            yield row


def _walk_rows(net: DeltaNet, tokens: int) -> Iterator[dict[str, Any]]:
    """The steps from chunk to chunk alone: XLA's loop, and the kernels as they may be compiled."""
    chunks, rows, keys = tokens // 64, (net.value_heads, 64), jax.random.split(jax.random.key(4), 4)
    u, w, late = (
        0.05 * jax.random.normal(key, (chunks, *rows, width))
        for key, width in zip(keys, (net.value_dim, net.key_dim, net.key_dim), strict=False)
    )
    given = u, w, late, jax.random.uniform(keys[3], (chunks, net.value_heads)), jnp.arange(chunks) % 16 == 0

    def time_of(walk: Callable[..., Any]) -> dict[str, float]:
        def both(*given: jax.Array) -> Any:
            y, pullback = jax.vjp(lambda *wide: walk(*wide, given[-1]), *given[:-1])
            return y, pullback(y)

        return {
            f"{name}_us": 1e6 * _seconds(partial(jax.jit(f), *given)) for name, f in (("forward", walk), ("both", both))
        }

    yield {"section": "walk", "by": "xla", **time_of(scan_chunks)}
    for columns, warps, stages in product((16, 32, 64, 128), (4, 8), (1, 2, 3)):
        if columns > net.value_dim:
            continue
        config = WalkConfig(columns=columns, num_warps=warps, num_stages=stages)
        row = {"section": "walk", "by": "pallas_triton", "columns": columns, "warps": warps, "stages": stages}
        try:
            yield row | time_of(lambda *given, config=config: walk(*given, None, config, interprets()))
        except jax.errors.JaxRuntimeError as problem:  # no room for it in shared memory
            yield row | {"error": str(problem).splitlines()[0][:120]}


def _inverse_rows(net: DeltaNet, tokens: int) -> Iterator[dict[str, Any]]:
    """Our inverse of the chunks' matrices, and XLA's triangular solve."""
    shape = (tokens // 64, net.value_heads, 64, 64)
    lower = jnp.tril(jax.random.uniform(jax.random.key(2), shape, minval=-0.3, maxval=0.3), -1)
    unit = jnp.broadcast_to(jnp.eye(64), shape)
    solve = partial(jax.lax.linalg.triangular_solve, left_side=True, lower=True, unit_diagonal=True)
    for name, function in (("blocks", inverse_of_unit_lower), ("solve", lambda x: solve(x, unit))):
        row = {"section": "inverse", "by": name, "matrices": shape[0] * shape[1]}
        yield row | {"us": 1e6 * _seconds(partial(jax.jit(function), lower))}


def _layer_rows(config: ModelConfig, tokens: int) -> Iterator[dict[str, Any]]:
    """A layer with a gated delta net and one with gated attention, frozen and with adapters on all projections."""
    tile = min(128, tokens // 8)
    table = jnp.arange(tokens // tile, dtype=jnp.int32) * ADAPTERS // (tokens // tile)
    segments = jax.tree.map(jnp.asarray, Segments.from_lengths([tokens // 8] * 8, tokens))
    x = jax.random.normal(jax.random.key(3), (tokens, config.hidden_size), jnp.bfloat16)
    positions = jnp.arange(tokens) % (tokens // 8)
    for number, name in enumerate(("gated delta net", "gated attention")):
        times = []
        targets = config.layer(number).targets
        specs = [AdapterSpec(name=f"a{n}", rank=RANK, alpha=32, targets=targets, seed=n) for n in range(ADAPTERS)]
        for adapters in ([], specs):
            layer = DecoderLayer(config, adapters, number=number, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
            graph, lora, frozen = nnx.split(layer, nnx.LoRAParam, ...)

            def passes(x, lora, frozen, graph=graph, adapters=adapters):
                context = LoRAContext.of(adapters, table) if adapters else None
                inputs = layer_inputs(config, positions, segments, context)
                y, pullback = jax.vjp(lambda x, lora: nnx.merge(graph, lora, frozen)(x, inputs), x, lora)
                return y, pullback(y)

            run = jax.jit(passes)
            assert bool(jnp.isfinite(run(x, lora, frozen)[0].astype(jnp.float32)).all())
            times.append(_seconds(partial(run, x, lora, frozen)))
        yield {
            "section": "layer", "mixer": name, "tokens": tokens, "adapters": ADAPTERS, "frozen_ms": 1e3 * times[0],
            "adapted_ms": 1e3 * times[1], "over_frozen": times[1] / times[0],
        }  # fmt: skip


def _seconds(run: Callable[[], Any], calls: int = 5) -> float:
    return seconds_of(run, calls, REPEATS)


if __name__ == "__main__":
    raise SystemExit(main())
