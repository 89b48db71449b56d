"""What does a decoder layer cost with DoRA, VeRA and LoRA-FA adapters, beside LoRA and the frozen layer?

    python -m benchmarks.kinds --out results/kinds        # one GPU: LoRA, DoRA and VeRA, within 150 s
    python -m benchmarks.kinds --out results/kinds --all  # all variants, 240 s
    python -m benchmarks.kinds --out /tmp/try --small      # in miniature on a CPU

A run computes DoRA's norms once per optimizer step, so "dora" has them as inputs; "dora, norms in the call" does not.
Norms are first compared with those of W + scale · A B, and the gate's kernel with XLA. One layer of Llama-3.1-8B's
shape, 8192 tokens in eight samples, four adapters of rank 16 without dropout, bfloat16, forward and backward. A mixed
microbatch has one adapter of each kind. VeRA also runs at PEFT's default rank of 256. Variants compile side by side and
are timed in turns. Writes kinds.jsonl.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.conditions import conditions
from benchmarks.harness import add_row, command_line
from benchmarks.workloads import SHAPES
from lorafusion_jax.adapters.bank import prepare_tensors
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.models import ModelConfig, Segments
from lorafusion_jax.models.forward import layer_inputs
from lorafusion_jax.models.layer import DecoderLayer
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.modules.lora import LoRALinear
from pallas_kernels.mlp.scaled_gate import scaled_silu_gate

ADAPTERS, ROUNDS, CALLS = 4, 5, 10
NEEDED = ("lora", "dora", "vera")
VARIANTS: dict[str, tuple[str, ...]] = {  # kinds of the microbatch's adapters
    "frozen": (),
    "lora": ("lora",) * ADAPTERS,
    "dora": ("dora",) * ADAPTERS,
    "dora, norms in the call": ("dora",) * ADAPTERS,
    "vera": ("vera",) * ADAPTERS,
    "vera of rank 256": ("vera",) * ADAPTERS,
    "lora-fa": ("lora-fa",) * ADAPTERS,
    "mixed": ("lora", "dora", "vera", "lora-fa"),
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--all", action="store_true", help="all variants, not only those with a bound")
    args = parser.parse_args()
    began = time.perf_counter()
    shape, T = (SHAPES["tiny"], 256) if args.small else (SHAPES["8b"], 8192)
    runs: dict[str, Callable[[], Any]] = {}
    rows: list[dict[str, Any]] = [{"section": "conditions", **conditions()}]
    config = ModelConfig(**(shape | {"num_layers": 1}))
    with ThreadPoolExecutor(ADAPTERS) as threads:
        compiling = {
            name: threads.submit(
                _compiled, config, kinds, T, 256 if "256" in name else 16, prepared="in the call" not in name
            )
            for name, kinds in VARIANTS.items()
            if args.all or name in NEEDED
        }
        for name, program in compiling.items():
            try:
                runs[name] = program.result()
            except Exception as problem:  # a variant that a device cannot run is a row, too
                rows.append({"variant": name, "failed": str(problem).splitlines()[0][:200]})
    rows.append({"section": "compiled", "programs": len(runs), "seconds": round(time.perf_counter() - began, 1)})
    _check_forms(runs)
    _check_gate(T, config.layer(0).mlp.inner)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(_seconds(run))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    rows += [
        {"variant": name, "us": 1e6 * median, "over_lora": median / medians["lora"]} for name, median in medians.items()
    ]
    rows.append({"section": "all", "seconds": round(time.perf_counter() - began, 1)})
    for row in rows:
        add_row(args.out / "kinds.jsonl", row)


def _compiled(config: ModelConfig, kinds: tuple[str, ...], T: int, rank: int, *, prepared: bool) -> Callable[[], Any]:
    """Forward and backward of one layer, compiled; checks that its results are finite."""
    specs = [
        AdapterSpec(name=f"a{n}", rank=rank, alpha=2 * rank, dropout=0.0, seed=n, kind=kind)
        for n, kind in enumerate(kinds)
    ]
    tiles = 64
    table = jnp.arange(tiles, dtype=jnp.int32) * max(len(kinds), 1) // tiles
    segments = jax.tree.map(jnp.asarray, Segments.from_lengths([T // 8] * 8, T))
    x = jax.random.normal(jax.random.key(1), (T, config.hidden_size), jnp.bfloat16)
    positions = jnp.arange(T) % (T // 8)
    layer = DecoderLayer(config, specs, number=0, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), prepared=prepared)
    _prepare(layer, specs)
    graph, lora, frozen = nnx.split(layer, nnx.LoRAParam, ...)

    def passes(x, lora, frozen):
        context = LoRAContext.of(specs, table, row_key=jnp.arange(T, dtype=jnp.uint32)) if specs else None
        inputs = layer_inputs(config, positions, segments, context)
        y, pullback = jax.vjp(lambda x, lora: nnx.merge(graph, lora, frozen)(x, inputs), x, lora)
        return y, pullback(y)

    run = partial(jax.jit(passes).lower(x, lora, frozen).compile(), x, lora, frozen)
    for leaf in jax.tree.leaves(run()):
        assert bool(jnp.isfinite(leaf.astype(jnp.float32)).all()), kinds
    return run


def _prepare(layer: DecoderLayer, specs: list[AdapterSpec]) -> None:
    """Computes what kinds prepare, as a run does after each optimizer step."""
    for _, linear in nnx.iter_graph(layer):
        for index, spec in enumerate(specs if isinstance(linear, LoRALinear) and linear.prepared else ()):
            kind = adapter_kind(spec.kind)
            if kind.prepare is None:
                continue
            tensors = {leaf.name: getattr(linear, leaf.name)[...][index] for leaf in kind.leaves}
            size = (linear.in_features, linear.out_features, spec.rank)
            made, apart = _prepared(spec.kind, linear.kernel[...], tensors, size, spec.scale)
            assert float(apart) <= 2**-8, f"norms of {spec.kind} differ by {apart} of the largest"
            for name, value in made.items():
                variable = getattr(linear, name)
                variable[...] = variable[...].at[index].set(value)


@partial(jax.jit, static_argnums=(0, 3, 4))  # one program for each shape, not one for each operation
def _prepared(kind: str, kernel: Any, tensors: dict, size: tuple[int, int, int], scale: float) -> tuple[dict, Any]:
    """Returns what a kind prepares, and how far norms are from those of W + scale · A B, of the largest."""
    made = prepare_tensors(adapter_kind(kind), kernel, tensors, size, scale, jnp.bfloat16)
    if kind != "dora":
        return made, 0.0
    norms = jnp.linalg.norm(kernel.astype(jnp.float32) + scale * tensors["lora_a"] @ tensors["lora_b"], axis=0)
    return made, jnp.abs(made["column_norm"] - norms).max() / norms.max()


def _check_forms(runs: dict[str, Callable[[], Any]]) -> None:
    """Both forms of DoRA give the same output."""
    outputs = [runs[name]()[0].astype(jnp.float32) for name in runs if name.startswith("dora")]
    apart = max((float(jnp.abs(output - outputs[0]).max()) for output in outputs), default=0.0)
    assert apart <= 2**-6 * float(jnp.abs(outputs[0]).max() if outputs else 0.0), f"the forms of DoRA differ by {apart}"


def _check_gate(T: int, F: int) -> None:
    """The device's gate of scaled columns has the values and gradients of plain XLA."""
    keys = jax.random.split(jax.random.key(5), 5)
    gate, up, dh = (jax.random.normal(key, (T, F), jnp.bfloat16) for key in keys[:3])
    f, f_up = (jax.random.uniform(key, (64, F), minval=0.5, maxval=2.0) for key in keys[3:])

    def slopes(implementation: str | None) -> Any:
        def both(dh: Any, *given: Any) -> Any:
            y, pullback = jax.vjp(partial(scaled_silu_gate, implementation=implementation), *given)
            return y, pullback(dh)

        return jax.tree.leaves(jax.jit(both)(dh, gate, up, f, f_up))

    for ours, plain in zip(slopes(None), slopes("xla"), strict=True):
        apart, largest = (float(jnp.abs(value.astype(jnp.float32)).max()) for value in (ours - plain, plain))
        assert apart <= 2**-7 * largest, f"the gate's kernel differs from XLA by {apart} of {largest}"


def _seconds(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())
    began = time.perf_counter()
    for _ in range(CALLS - 1):
        run()
    jax.block_until_ready(run())
    return (time.perf_counter() - began) / CALLS


if __name__ == "__main__":
    main()
