"""A layer of Qwen3-30B-A3B's shape with four adapters over its frozen layer, and beside transformers with PEFT.

    python -m benchmarks.experts --out DIR [--budget 200] [--small] [--parts layers peft …]

The base is in bfloat16, and in fp8. Prints a row per variant and writes it to DIR/experts.jsonl. One process runs all
variants. Parts, in this order: `layers`, compiled side by side: tokens/s are of one layer, forward and backward, and
`of_frozen` is next to the frozen bfloat16 layer; `peft`: the same in transformers; `products`: checks the kernels
against XLA's form before it times them; `passes` of one projection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.conditions import conditions
from benchmarks.harness import add_row, command_line
from benchmarks.saved_model import config_json
from lorafusion_jax.adapters.spec import AdapterSpec, resolve_targets
from lorafusion_jax.families.experts import Experts
from lorafusion_jax.models import ModelConfig, Segments
from lorafusion_jax.models.forward import layer_inputs
from lorafusion_jax.models.layer import DecoderLayer
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.weights.table import NONE, stored_kind
from pallas_kernels.device import interprets
from pallas_kernels.experts.api import Lora, expert_linear
from pallas_kernels.experts.rows import ExpertRows, sort_rows, spread_rows
from pallas_kernels.experts.sizes import sorted_rows, tile_rows
from pallas_kernels.experts.triton.backend import backward, down, forward, product, sums

SHAPE = {"hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128}
EXPERTS = Experts(width=2048, inner=768, count=128, active=8)
SMALL = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
SMALL_EXPERTS = Experts(width=64, inner=32, count=8, active=2)
ADAPTERS, RANK, REPEATS = 4, 8, 5
STORED = (NONE, "fp8")
PARTS = ("layers", "peft", "products", "passes")
LAYERS = {"frozen": None, "attention": "all-linear", "attention, experts": ["all-linear", "experts"]}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--budget", type=float, default=200.0, help="seconds; nothing new starts after them")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    stop = time.monotonic() + options.budget
    for row in _rows(options.small, options.parts):
        add_row(options.out / "experts.jsonl", row)
        if time.monotonic() > stop:
            break
    return 0


def _rows(small: bool, parts: Sequence[str]) -> Iterator[dict[str, Any]]:
    yield {"section": "conditions", **conditions()}
    config = ModelConfig(
        family="qwen3_moe", vocab_size=256, intermediate_size=6144, num_layers=1, qk_norm=True,
        experts=SMALL_EXPERTS if small else EXPERTS, **(SMALL if small else SHAPE),
    )  # fmt: skip
    tokens = 128 if small else 8192
    if "layers" in parts:
        yield from _layer_rows(config, tokens)
    if "peft" in parts:
        yield from _peft_rows(config, tokens)
    if "products" in parts:
        for quantize in STORED:
            yield from _product_rows(config, 64 if small else 1024, quantize)
    if "passes" in parts:
        yield from _pass_rows(config, 64 if small else tokens)


def _product_rows(config: ModelConfig, tokens: int, quantize: str) -> Iterator[dict[str, Any]]:
    """Forward and backward of one projection by each implementation, compared with XLA's form."""
    experts = config.experts
    assert experts is not None
    rows, x, w, a, b, dy = _arrays(experts, tokens)
    w = _stored(w, quantize, experts.count)
    wanted: tuple[jax.Array, ...] | None = None
    for implementation in ("xla", "pallas_triton"):

        @jax.jit
        def passes(x, w, a, b, dy, implementation=implementation):
            def run(x, a, b):
                pairs = Lora(a, b, jnp.ones(ADAPTERS))
                return expert_linear(x, w, rows, pairs, experts=experts.count, implementation=implementation)

            y, pullback = jax.vjp(run, x, a, b)
            return y, *pullback(dy)

        row = {"section": "product", "quantize": quantize, "tokens": tokens}
        row |= {"implementation": implementation, "tile": rows.tile}
        try:
            outputs = jax.block_until_ready(passes(x, w, a, b, dy))
        except Exception as problem:  # a variant that a device cannot run is a row, too
            yield row | {"failed": str(problem).splitlines()[0][:300]}
            continue
        wanted = outputs if wanted is None else wanted
        error = max(_difference(one_y, other_y) for one_y, other_y in zip(outputs, wanted, strict=True))
        assert error < 0.05, (row, error)
        yield row | {"us": 1e6 * _seconds(partial(passes, x, w, a, b, dy)), "error": error}


def _arrays(experts: Experts, tokens: int) -> tuple[ExpertRows, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Sorted rows of gate and up, and x, W, A, B and dY."""
    keys = jax.random.split(jax.random.key(0), 6)
    (num_in, num_out), linear = experts.linears[0].shape, experts.linears[0]
    draw = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)  # noqa: E731
    chosen = jax.lax.top_k(jax.random.normal(keys[0], (tokens, experts.count)), experts.active)[1]
    adapter = jnp.arange(tokens, dtype=jnp.int32) * ADAPTERS // tokens
    rows = sort_rows(chosen, adapter, experts=experts.count, adapters=ADAPTERS)
    x, w = draw(keys[1], tokens, num_in), draw(keys[2], *linear.kernel_shape) * num_in**-0.5
    a = draw(keys[3], ADAPTERS, experts.count, num_in, RANK).astype(jnp.float32) * num_in**-0.5
    b = draw(keys[4], ADAPTERS, experts.count, RANK, num_out).astype(jnp.float32)
    dy = jnp.where((rows.source >= 0)[:, None], draw(keys[5], len(rows.source), num_out), 0)
    return rows, spread_rows(x, rows), w, a, b, dy


def _stored(kernel: jax.Array, quantize: str, experts: int = 0) -> Any:
    """A kernel as products read it."""
    kind = stored_kind(quantize)
    if kind is None:
        return kernel
    form = kind.of(experts)
    assert form.operand is not None
    return form.operand(jax.jit(lambda kernel: form.quantise(kernel.astype(jnp.float32)))(kernel))


def _pass_rows(config: ModelConfig, tokens: int) -> Iterator[dict[str, Any]]:
    """Each pass of one projection alone."""
    experts = config.experts
    assert experts is not None
    rows, x, w, a, b, dy = _arrays(experts, tokens)
    scale, count = jnp.ones(ADAPTERS), experts.count
    bank = jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, 16 - RANK))).astype(x.dtype).reshape(-1, a.shape[2], 16)
    s = jax.jit(lambda x, bank, rows: down(x, bank, rows, count))(x, bank, rows)
    ahead = lambda x, w, rows, *low: forward(x, w, rows, count, *low)  # noqa: E731
    back = lambda x, w, rows, *rest: backward(x, w, rows, count, *rest)  # noqa: E731
    passes: list[tuple[str, str, Callable[..., Any], tuple[Any, ...]]] = []
    for quantize in STORED:
        kernels = _stored(w, quantize, count)
        passes += [
            ("x W", quantize, partial(product, experts=count), (x, kernels, rows)),
            ("dy W'", quantize, partial(product, experts=count, transposed=True), (dy, kernels, rows)),
            ("forward", quantize, ahead, (x, kernels, rows, a, b, scale)),
            ("backward", quantize, back, (x, kernels, rows, a, b, scale, s, dy)),
        ]  # fmt: skip
    eighths = _stored(w, "fp8", count)
    round_rows = lambda x, transposed: eighths.rounded(rows, x, transposed=transposed, interpret=interprets())  # noqa: E731
    passes += [
        ("q(x)", "fp8", partial(round_rows, transposed=False), (x,)),
        ("q(dy sw)", "fp8", partial(round_rows, transposed=True), (dy,)),
        ("W turned over", "fp8", lambda w: w.values_turned, (eighths,)),
        ("x A", NONE, lambda x, bank, rows: down(x, bank, rows, count), (x, bank, rows)),
        ("sums of dA", NONE, lambda x, s, rows: sums(x, s, rows, a.shape, scale), (x, s, rows)),
        ("sums of dB", NONE, lambda y, s, rows: sums(y, s, rows, b.shape, scale, transposed=True), (dy, s, rows)),
    ]
    for name, quantize, run, arrays in passes:
        timed = _timed(partial(jax.jit(run), *arrays))
        yield {"section": "pass", "pass": name, "quantize": quantize, "tokens": tokens} | timed


def _timed(run: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"us": 1e6 * _seconds(run, calls=10)}
    except Exception as problem:  # a pass that a device cannot run is a row, too
        return {"failed": str(problem).splitlines()[0][:300]}


def _layer_rows(config: ModelConfig, tokens: int) -> Iterator[dict[str, Any]]:
    """The frozen layer, adapters on attention, and on attention and experts, for each way to store the base."""
    experts = config.experts
    assert experts is not None
    with ThreadPoolExecutor(len(STORED) * len(LAYERS)) as pool:
        begun = []
        for quantize in STORED:
            for name in LAYERS:
                step, arrays = _layer(config, tokens, quantize, name)
                begun.append((quantize, name, pool.submit(step.lower(*arrays).compile), arrays))
        frozen_ms = 0.0
        for quantize, name, compiled, arrays in begun:
            row = {"section": "layer", "quantize": quantize, "adapters_on": name, "tokens": tokens}
            try:
                run = partial(compiled.result(), *arrays)
                assert bool(jnp.isfinite(run()[0].astype(jnp.float32)).all())
                seconds = _seconds(run)
            except Exception as problem:  # a variant that a device cannot run is a row, too
                yield row | {"failed": str(problem).splitlines()[0][:300]}
                continue
            frozen_ms = frozen_ms or 1e3 * seconds
            yield row | {
                "ms": 1e3 * seconds, "of_frozen": frozen_ms / (1e3 * seconds), "tokens_per_s": tokens / seconds,
                "tile": tile_rows(tokens, experts.active, experts.count),
                "sorted_rows": sorted_rows(tokens, experts.active, experts.count),
            }  # fmt: skip


def _layer(config: ModelConfig, tokens: int, quantize: str, name: str) -> tuple[Any, tuple[Any, ...]]:
    """A jitted forward and backward pass of a layer, and its arguments."""
    tile, chosen = min(128, tokens // 8), LAYERS[name]
    table = jnp.arange(tokens // tile, dtype=jnp.int32) * ADAPTERS // (tokens // tile)
    segments = jax.tree.map(jnp.asarray, Segments.from_lengths([tokens // 8] * 8, tokens))
    x = jax.random.normal(jax.random.key(1), (tokens, config.hidden_size), jnp.bfloat16)
    positions = jnp.arange(tokens) % (tokens // 8)
    experts_of = {f"{linear.path}.kernel": linear.experts for linear in config.layer(0).linears}
    specs = [] if chosen is None else _specs(config, chosen)
    layer = DecoderLayer(config, specs, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, lora, frozen = nnx.split(layer, nnx.LoRAParam, ...)
    leaves = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(frozen)}
    weights = {
        leaf_name: _stored(leaf[...], quantize, experts_of[leaf_name]) if leaf_name in experts_of else leaf[...]
        for leaf_name, (_, leaf) in leaves.items()
    }

    def passes(x, lora, weights):
        inputs = layer_inputs(config, positions, segments, LoRAContext.of(specs, table) if specs else None)
        filled = nnx.from_flat_state([(path, leaf.replace(weights[key])) for key, (path, leaf) in leaves.items()])
        y, pullback = jax.vjp(lambda x, lora: nnx.merge(graph, lora, filled)(x, inputs), x, lora)
        return y, pullback(y)

    return jax.jit(passes), (x, lora, weights)


def _specs(config: ModelConfig, chosen: str | list[str]) -> list[AdapterSpec]:
    targets = resolve_targets(chosen, config.targets)
    return [AdapterSpec(name=f"a{n}", rank=RANK, alpha=16, targets=targets, seed=n) for n in range(ADAPTERS)]


def _peft_rows(config: ModelConfig, tokens: int) -> Iterator[dict[str, Any]]:
    """The same layer in transformers with PEFT, one adapter: four adapters take turns there."""
    try:
        import peft
        import torch
        import transformers
    except ImportError as missing:
        yield {"section": "peft", "failed": str(missing)}
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {key: value for key, value in config_json(config).items() if key not in ("architectures", "model_type")}
    hf = transformers.Qwen3MoeConfig(**shape)
    for name, parameters in (
        ("attention", None),
        ("attention, experts", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ):
        with torch.device(device):
            model = transformers.Qwen3MoeForCausalLM(hf).to(torch.bfloat16)
        options = {"target_parameters": parameters} if parameters else {}
        lora = peft.LoraConfig(
            r=RANK, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], **options
        )
        adapted = peft.get_peft_model(model, lora)
        ids = torch.randint(0, 256, (8, tokens // 8), device=device)

        def step(adapted=adapted, ids=ids):
            adapted(input_ids=ids, labels=ids).loss.backward()
            if device == "cuda":
                torch.cuda.synchronize()

        row = {
            "section": "peft",
            "adapters_on": name,
            "tokens": tokens,
            "versions": f"{torch.__version__} {peft.__version__}",
        }
        try:
            seconds = _seconds(step)
        except Exception as problem:
            yield row | {"failed": str(problem).splitlines()[0][:300]}
            continue
        yield row | {"ms": 1e3 * seconds, "tokens_per_s": tokens / seconds}


def _difference(actual: jax.Array, wanted: jax.Array) -> float:
    actual, wanted = actual.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.abs(actual - wanted).max() / jnp.maximum(jnp.abs(wanted).max(), 1e-6))


def _seconds(run: Callable[[], Any], calls: int = 3) -> float:
    """Median of several runs, each of several calls."""
    jax.block_until_ready(run())
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return float(np.median(times))


if __name__ == "__main__":
    raise SystemExit(main())
