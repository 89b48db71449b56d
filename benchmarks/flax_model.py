"""What does LoRA cost in a user's own NNX model? A decoder or a vision transformer under plain `jax.jit`.

    python -m benchmarks.flax_model --out $OUT/flax_model                  # one GPU, 100 s
    python -m benchmarks.flax_model --qwen3 --seconds 150 --out $OUT/flax_qwen3
    python -m benchmarks.flax_model --vit --seconds 150 --out $OUT/flax_vit
    python -m benchmarks.flax_model --qwen3 --no-check --profile --variants frozen "ours 4" --out $OUT/flax_qwen3
    python -m benchmarks.flax_model --qwen3 --no-check --tune --variants frozen "ours 4" --out $OUT/flax_qwen3_tuned
    python -m benchmarks.flax_model --vit --no-check --default-options --seconds 150 --out $OUT/flax_vit_default
    python -m benchmarks.flax_model --mesh --out $OUT/flax_model_mesh      # two GPUs, 100 s
    python -m benchmarks.flax_model --mesh --quantize fp8 --out $OUT/flax_mesh_fp8  # 100 s, and so nf4
    JAX_NUM_CPU_DEVICES=2 python -m benchmarks.flax_model --small --mesh --quantize fp8 --out /tmp/x

One GPU: a step (loss, gradients, AdamW of the adapters) with the base frozen; with one adapter by `nnx.LoRA` and, where
it is installed, by qwix; with ours for one adapter of all rows and for four. With --qwen3 the layers are those of
Bonsai's Qwen3 at a billion parameters, and ours also runs on a base in fp8; with --vit it is ViT-L/14. Memory is what a
compiled step needs on the device by XLA's own count, arguments included. Two GPUs: frozen and ours with four adapters,
on a mesh of two data and of two tensor devices, and the collectives of each compiled program; with --quantize on a
stored base, too. Results are compared with `nnx.LoRA`, on one GPU while XLA compiles. Variants are timed in turn;
writes rows.jsonl, a row after each case. The last word of a variant may be an implementation (`ours 4 xla`); with
`shared`, projections of one input share the reads of it. With --profile a step of each variant is profiled after the
times, and its kernels are compared with the frozen step's. --tune measures tile sizes of the layers' own shapes first.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import collectives
from benchmarks.conditions import conditions
from benchmarks.end_to_end import kernel_times
from benchmarks.flax_decoder import PROJECTIONS, Decoder, Probe, next_token_loss
from benchmarks.flax_qwen3 import GeneralLoRA
from benchmarks.flax_sizes import QWEN3, SMALL, SMALL_VIT, VIT, Size
from benchmarks.flax_vit import PATCH, ViT, classification_loss
from benchmarks.flax_vit import PROJECTIONS as OF_VIT
from benchmarks.harness import command_line
from lorafusion_jax.modules import AdapterSpec, apply_lora, quantize_base, share_inputs, use_adapters
from pallas_kernels import compiler_options, config_store
from pallas_kernels.arg_specs import LinearSpec
from pallas_kernels.policy import IMPLEMENTATIONS
from pallas_kernels.tuning.tune import tune

COLUMN, ROW = P(None, "tensor"), P("tensor", None)  # of a kernel [in, out]
TENSOR = {name: ROW if name in ("o", "down") else COLUMN for name in PROJECTIONS}
VARIANTS = ["frozen", "nnx.LoRA", "qwix", "ours 1", "ours 4", "ours 4 dropout 0.1"]
QWEN3_VARIANTS = ["frozen", "nnx.LoRA", "qwix", "ours 1", "ours 4", "ours 1 fp8", "ours 4 fp8"]
STORED = ("fp8", "int8", "nf4")  # kinds of quantize_base
SHARED = ["ours 4 shared", "ours 4 shared fp8"]
BY_NAME = [f"ours {count} {implementation}" for count in (1, 4) for implementation in IMPLEMENTATIONS]
TOP = 25  # kernels of a profile to print
ROUNDS, STEPS = 5, 4  # turns of each variant, timed steps of a turn
RESERVE = 0.75  # of the time; no variant is compiled after that
AGREE = 2e-2  # relative, of gradients in bfloat16: one rounding is 2^-8, sums come in another order


@dataclass(kw_only=True)
class Variant:
    """A model with its adapters, its compiled step and what was measured."""

    name: str
    model: nnx.Module
    optimizer: nnx.Optimizer
    step: Callable[..., Any]
    trains: Any  # filter of the variables that a step changes
    trained: Any = None  # their values
    frozen: Any = None
    seconds: list[float] = field(default_factory=list)

    def lower(self, *arguments: Any) -> Any:
        """Lowers the step as Flax's guide to performance has it: `nnx.jit` walks a thousand variables in a call."""
        graph, trained, self.frozen = nnx.split((self.model, self.optimizer), self.trains, ...)
        self.trained = jax.tree.map(jnp.copy, trained)  # donated; variants share arrays of the base

        def pure(trained, frozen, *arguments):
            model, optimizer = nnx.merge(graph, trained, frozen)
            value = self.step(model, optimizer, *arguments)
            return nnx.state((model, optimizer), self.trains), value

        return jax.jit(pure, donate_argnums=0).lower(self.trained, self.frozen, *arguments)

    def run(self, compiled: Any, arguments: tuple) -> jax.Array:
        self.trained, value = compiled(self.trained, self.frozen, *arguments)
        return value


type Made = tuple[Variant, tuple, Any]  # a variant, the step's other arguments, its lowered step
type Ready = tuple[Variant, Any, tuple]  # a variant, its compiled step, the step's other arguments


def parts_of(size: Size) -> tuple[Callable[..., nnx.Module], tuple[str, ...], Callable[..., jax.Array]]:
    """(a model, its projections in a layer, the loss of a batch)"""
    return (ViT, OF_VIT, classification_loss) if size.model == "vit" else (Decoder, PROJECTIONS, next_token_loss)


def holder(layer: nnx.Module, path: str) -> tuple[nnx.Module, str]:
    """The module that has a projection, and its name there."""
    *modules, name = path.split(".")
    return reduce(getattr, modules, layer), name


def names_of(size: Size) -> tuple[str, ...]:
    return tuple(path.rpartition(".")[2] for path in parts_of(size)[1])


def specs_of(count: int, size: Size, dropout: float = 0.0) -> list[AdapterSpec]:
    return [
        AdapterSpec(name=f"a{index}", rank=size.rank, alpha=2 * size.rank, dropout=dropout, seed=index)
        for index in range(count)
    ]


def make_step(
    specs: list[AdapterSpec] | None, wrt: type, loss_of: Callable[..., jax.Array], implementation: Any = None
) -> Callable[..., Any]:
    """The training step that a user writes."""
    meshed = not jax.sharding.get_abstract_mesh().empty

    def step(model, optimizer, inputs, table, number):
        def loss(model):
            if specs is None:
                return loss_of(model, inputs)
            rows = {"only": 0} if len(specs) == 1 else {"table": table}
            with use_adapters(specs, **rows, step=number, implementation=implementation):
                return loss_of(model, inputs)

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, grads)
        if meshed:  # or XLA splits what it returns as it likes, and the next call has other arguments
            for holder, what in ((model, wrt), (optimizer, nnx.OptState)):
                nnx.update(holder, jax.lax.with_sharding_constraint(nnx.state(holder, what), P()))
        return value

    return step


def with_nnx_lora(model: nnx.Module, size: Size) -> nnx.Module:
    """Every projection inside Flax's own `nnx.LoRA`."""
    rngs = nnx.Rngs(7)
    for layer in model.layers:
        for module, name in (holder(layer, path) for path in parts_of(size)[1]):
            linear = getattr(module, name)
            if isinstance(linear, (nnx.Einsum, nnx.LinearGeneral)):
                setattr(module, name, GeneralLoRA(linear, size.rank, size.dtype, rngs))
                continue
            sizes = (linear.in_features, size.rank, linear.out_features)
            setattr(module, name, nnx.LoRA(*sizes, base_module=linear, dtype=size.dtype, rngs=rngs))
    return model


def with_qwix(model: nnx.Module, size: Size, inputs: jax.Array) -> nnx.Module:
    import qwix  # where it is installed

    provider = qwix.LoraProvider(module_path=rf".*/({'|'.join(names_of(size))})", rank=size.rank, alpha=2.0 * size.rank)
    return qwix.apply_lora_to_model(model, provider, inputs, rngs=nnx.Rngs(7))


def make_variant(name: str, base: nnx.Module, size: Size, inputs: jax.Array) -> Variant:
    model, specs = nnx.clone(base), None
    if name == "nnx.LoRA":
        model = with_nnx_lora(model, size)
    elif name == "qwix":
        model = with_qwix(model, size, inputs)
    elif name != "frozen":
        specs = specs_of(int(name.split()[1]), size, dropout=0.1 if "dropout" in name else 0.0)
        model = apply_lora(model, specs, targets=names_of(size))
        model = share_inputs(model) if "shared" in name else model
    wrt = Probe if name == "frozen" else nnx.LoRAParam
    optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=wrt)
    trains = nnx.filterlib.Any(wrt, nnx.OptState)
    named = name.split()[-1] if name in BY_NAME else None
    step = make_step(specs, wrt, parts_of(size)[2], named)
    return Variant(name=name, model=model, optimizer=optimizer, step=step, trains=trains)


def batch(size: Size, adapters: int) -> tuple[jax.Array, jax.Array]:
    """(tokens or images, adapter of each example)"""
    rng, of_example = np.random.default_rng(0), jnp.asarray(np.arange(size.examples) % adapters, jnp.int32)
    if size.model == "vit":
        side = math.isqrt(size.positions) * PATCH
        return jnp.asarray(rng.normal(size=(size.examples, side, side, 3)), size.dtype), of_example
    return jnp.asarray(rng.integers(0, size.vocabulary, (size.examples, size.positions), dtype=np.int32)), of_example


def options(*, default: bool) -> dict | None:
    return compiler_options() if jax.default_backend() == "gpu" and not default else None


class Rows:
    """Writes every row as soon as it is known."""

    def __init__(self, folder: Path, limit_s: float):
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._conditions = folder / "rows.jsonl", conditions()
        self._start, self._limit_s = time.monotonic(), limit_s

    def add(self, **row: Any) -> None:
        row |= {"at_s": round(time.monotonic() - self._start, 1)}
        print(json.dumps(row), flush=True)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row | self._conditions) + "\n")

    def attempt(self, case: str, work: Callable[[], Any], *, compiles: bool = False) -> Any:
        """Runs a case; what goes wrong is a row, and the others go on."""
        if compiles and time.monotonic() - self._start > RESERVE * self._limit_s:
            self.add(case=case, skipped="no time left")
            return None
        try:
            return work()
        except Exception as problem:
            self.add(case=case, error=f"{type(problem).__name__}: {problem}"[:600])
            return None


def check(rows: Rows, size: Size) -> None:
    """Loss and gradients of ours with one adapter against `nnx.LoRA` with the same A and B, on two layers."""
    small = replace(size, layers=2, examples=2, positions=min(size.positions, 256))
    make, paths, loss_of = parts_of(small)
    inputs, _ = batch(small, 1)
    base = make(small, nnx.Rngs(0))
    ours = apply_lora(nnx.clone(base), specs_of(1, small), targets=names_of(small))
    theirs = with_nnx_lora(nnx.clone(base), small)
    key = jax.random.key(3)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for path in paths:
            layer, lora = (getattr(*holder(block, path)) for block in (mine, other))
            key, b_key = jax.random.split(key)
            lora.lora_a[...] = layer.lora_a[...][0]
            lora.lora_b[...] = 0.02 * jax.random.normal(b_key, lora.lora_b.shape)
            layer.lora_b[...] = lora.lora_b[...][None] / 2  # ours has the scale alpha / rank = 2

    def gradients(model, specs):
        def loss(model):
            if specs is None:
                return loss_of(model, inputs)
            with use_adapters(specs, only=0, train=False):
                return loss_of(model, inputs)

        value, grads = nnx.jit(nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam)))(model)
        return float(value), [
            np.asarray(reduce(getitem, path.split("."), layer)["lora_a"][...], np.float64).reshape(-1, small.rank)
            for layer in (grads["layers"][number] for number in range(small.layers))
            for path in paths
        ]

    (loss, mine), (expected, other) = gradients(ours, specs_of(1, small)), gradients(theirs, None)
    worst = max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(mine, other, strict=True))
    rows.add(case="check", loss=loss, nnx_lora_loss=expected, worst_relative=float(worst), agrees=bool(worst < AGREE))


def measure(rows: Rows, variants: list[Ready], tokens: int, **facts: Any) -> None:
    """Times compiled steps in turn; each turn begins with a step that does not count."""
    for number in range(ROUNDS):
        for variant, compiled, arguments in random.Random(number).sample(variants, len(variants)):
            jax.block_until_ready(variant.run(compiled, arguments))
            start = time.perf_counter()
            for _ in range(STEPS):
                value = variant.run(compiled, arguments)
            jax.block_until_ready(value)
            variant.seconds.append((time.perf_counter() - start) / STEPS)
    medians = {variant.name: statistics.median(variant.seconds) for variant, _, _ in variants}
    for variant, _, _ in variants:
        rows.add(
            case="step",
            variant=variant.name,
            **facts,
            step_ms=round(1000 * medians[variant.name], 3),
            spread_ms=[round(1000 * seconds, 3) for seconds in sorted(variant.seconds)],
            tokens_per_s=round(tokens / medians[variant.name]),
            over_frozen=round(medians[variant.name] / medians["frozen"], 4) if "frozen" in medians else None,
        )


def compile_all(
    rows: Rows,
    cases: dict[str, Callable[[], Made]],
    meanwhile: Callable[[], None] | None = None,
    *,
    default_options: bool = False,
) -> dict[str, Ready]:
    """Lowers one case after another; XLA compiles them side by side meanwhile. Each runs once.

    Args:
        meanwhile: is called while XLA compiles.
        default_options: XLA's own.
    """
    begun, ready = [], {}
    with ThreadPoolExecutor(max_workers=len(cases)) as pool:
        for name, make in cases.items():

            def lower(name=name, make=make):
                start = time.perf_counter()
                variant, arguments, lowered = make()
                rows.add(case="lowered", variant=name, seconds=round(time.perf_counter() - start, 1))
                return name, variant, arguments, pool.submit(lowered.compile, options(default=default_options))

            if (made := rows.attempt(f"lower {name}", lower, compiles=True)) is not None:
                begun.append(made)
        if meanwhile is not None:
            meanwhile()
        for name, variant, arguments, future in begun:

            def finish(name=name, variant=variant, arguments=arguments, future=future):
                compiled = future.result()
                loss = float(variant.run(compiled, arguments))
                sent = collectives(compiled.as_text())
                rows.add(case="compiled", variant=name, loss=loss, memory_gb=memory_gb(compiled), collectives=sent)
                return variant, compiled, arguments

            if (made := rows.attempt(f"compile {name}", finish)) is not None:
                ready[name] = made
    return ready


def memory_gb(compiled: Any) -> float | None:
    """Arguments, results and intermediates of a step; donated arguments count once."""
    sizes = compiled.memory_analysis()
    if sizes is None:
        return None
    total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return round((total - sizes.alias_size_in_bytes) / 1e9, 3)


def profile(rows: Rows, variants: list[Ready]) -> None:
    """Times of the kernels of a step, those that the frozen step has not or has shorter first."""
    spent: dict[str, dict[str, list[float]]] = {}
    for variant, compiled, arguments in variants:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(STEPS):
                    value = variant.run(compiled, arguments)
                jax.block_until_ready(value)
            kernels: dict[str, list[float]] = {}
            for name, calls, ms in kernel_times(Path(folder)):
                entry = kernels.setdefault(re.sub(r"[._]\d+$", "", name), [0.0, 0.0])
                entry[0] += calls / STEPS
                entry[1] += ms / STEPS
        spent[variant.name] = kernels
        frozen = spent.get("frozen", {})
        total = sum(ms for _, ms in kernels.values())
        rows.add(case="profile", variant=variant.name, kernels=len(kernels), busy_ms=round(total, 3))
        more = {name: ms - frozen.get(name, [0, 0.0])[1] for name, (_, ms) in kernels.items()}
        for name in sorted(more, key=lambda name: -more[name])[:TOP]:
            calls, ms = kernels[name]
            rows.add(
                case="kernel",
                variant=variant.name,
                kernel=name,
                calls=round(calls, 1),
                ms=round(ms, 3),
                more_than_frozen_ms=round(more[name], 3),
            )


def tune_layers(rows: Rows, size: Size, path: Path) -> None:
    """Measures tile sizes of the projections' shapes and uses them from here on."""
    head = size.width // size.heads
    into = {(size.width, columns) for columns in (size.width, size.kv_heads * head, size.hidden)}
    tokens = size.examples * size.positions
    specs = [
        LinearSpec(tokens=tokens, in_features=inner, out_features=outer, rank=size.rank, adapters=4)
        for inner, outer in sorted({*into, (size.hidden, size.width)})
    ]
    began = time.perf_counter()
    table = tune(specs, path, quick=True)
    config_store.use(path)
    rows.add(case="tuned", entries=len(table.entries), seconds=round(time.perf_counter() - began, 1))


def one_gpu(
    rows: Rows, size: Size, names: list[str], *, checks: bool, profiled: bool = False, default_options: bool = False
) -> None:
    inputs, table = batch(size, 4)
    base = parts_of(size)[0](size, nnx.Rngs(0))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(base, nnx.Param)))

    def make(name: str) -> Made:
        variant = make_variant(name, base, size, inputs)
        if name.split()[-1] in STORED:
            quantize_base(variant.model, name.split()[-1])
        trained = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(variant.model, nnx.LoRAParam)))
        rows.add(case="model", variant=name, parameters=parameters, trained=trained)
        arguments = (inputs, table if "4" in name else jnp.zeros_like(table), jnp.uint32(1))
        return variant, arguments, variant.lower(*arguments)

    compare = partial(rows.attempt, "check", partial(check, rows, size)) if checks else None
    cases = {name: partial(make, name) for name in names}
    ready = compile_all(rows, cases, compare, default_options=default_options)
    measure(rows, list(ready.values()), size.examples * size.positions, parameters=parameters)
    if profiled:
        rows.attempt(
            "profile", lambda: profile(rows, sorted(ready.values(), key=lambda made: made[0].name != "frozen"))
        )


def two_gpus(rows: Rows, size: Size, stored: list[str]) -> None:
    names = ["frozen", "ours 4", *(f"ours 4 {kind}" for kind in stored)]
    cases = [(axis, name) for axis in ("data", "tensor") for name in names]
    ready = compile_all(rows, {f"{axis} {name}": partial(make_meshed, size, axis, name) for axis, name in cases})
    for axis in ("data", "tensor"):
        variants = [made for name, made in ready.items() if name.startswith(axis)]
        rows.attempt(f"time {axis}", partial(measure, rows, variants, size.examples * size.positions, mesh=axis))


def make_meshed(size: Size, axis: str, name: str) -> Made:
    sizes = (2, 1) if axis == "data" else (1, 2)
    mesh = jax.make_mesh(sizes, ("data", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices()[:2])
    tokens, table = batch(size, 4)
    with jax.set_mesh(mesh):
        variant = make_variant(name, Decoder(size, nnx.Rngs(0)), size, tokens)
        put_on_mesh(variant, mesh)
        if (kind := name.split()[-1]) in STORED:
            quantize_base(variant.model, kind)
        arguments = (
            jax.device_put(tokens, NamedSharding(mesh, P("data"))),
            jax.device_put(table, NamedSharding(mesh, P("data"))),
            jax.device_put(jnp.uint32(1), NamedSharding(mesh, P())),
        )
        return variant, arguments, variant.lower(*arguments)


def put_on_mesh(variant: Variant, mesh: jax.sharding.Mesh) -> None:
    """Kernels over the tensor axis, everything else on every device."""
    for holder in (variant.model, variant.optimizer):
        state = nnx.state(holder)
        flat = nnx.to_flat_state(state)
        placed = [
            (path, leaf.replace(jax.device_put(leaf[...], NamedSharding(mesh, spec_of(path))))) for path, leaf in flat
        ]
        nnx.update(holder, nnx.from_flat_state(placed))


def spec_of(path: tuple) -> P:
    return TENSOR.get(path[-2], P()) if len(path) > 1 and path[-1] == "kernel" and "opt_state" not in path else P()


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--mesh", action="store_true", help="two devices")
    parser.add_argument("--qwen3", action="store_true", help="layers of Bonsai's Qwen3, a billion parameters")
    parser.add_argument("--vit", action="store_true", help="ViT-L/14 on images of 224 pixels")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script on a CPU")
    parser.add_argument("--quantize", nargs="*", choices=STORED, default=[], help="on a mesh, a base stored so, too")
    parser.add_argument(
        "--variants", nargs="+", choices={*VARIANTS, *QWEN3_VARIANTS, *BY_NAME, *SHARED}, help="of one GPU"
    )
    parser.add_argument("--profile", action="store_true", help="of one GPU: the kernels of a step of each variant")
    parser.add_argument("--tune", action="store_true", help="of one GPU: measure tile sizes of these layers first")
    parser.add_argument("--default-options", action="store_true", help="of one GPU: XLA's own, with Triton's products")
    parser.add_argument("--layers", type=int, help="fewer compile sooner")
    parser.add_argument("--no-check", action="store_true", help="where the results were compared in another run")
    parser.add_argument("--seconds", type=float, default=100, help="no variant is compiled after three quarters of it")
    args = parser.parse_args()
    if args.vit and args.mesh:
        parser.error("--mesh places the decoder's kernels; leave --vit or --mesh out")
    large, small = (
        (VIT, SMALL_VIT) if args.vit else (QWEN3, replace(SMALL, model="qwen3")) if args.qwen3 else (Size(), SMALL)
    )
    rows, size = Rows(args.out, args.seconds), small if args.small else large
    size = replace(size, layers=args.layers or size.layers)
    names = args.variants or (VARIANTS if size.model == "decoder" else QWEN3_VARIANTS)
    if args.mesh and not args.no_check:
        rows.attempt("check", lambda: check(rows, size))
    if args.tune:
        rows.attempt("tune", lambda: tune_layers(rows, size, args.out / "tiles.json"))
    one = partial(
        one_gpu,
        rows,
        size,
        names,
        checks=not args.no_check,
        profiled=args.profile,
        default_options=args.default_options,
    )
    rows.attempt("steps", lambda: two_gpus(rows, size, args.quantize) if args.mesh else one())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
