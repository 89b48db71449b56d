"""The sections of `kernels.py`: one function per section, run in a child process.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from benchmarks import kernel_checks, kernel_layer, oracles
from benchmarks.conditions import conditions
from pallas_kernels.arg_specs import BENCHMARK_SHAPES, BENCHMARK_TOKENS, LinearSpec, make_arrays
from pallas_kernels.backend import select_name
from pallas_kernels.linear.describe import Arguments, describe
from pallas_kernels.tuning import search
from pallas_kernels.tuning.timing import time_calls

SWEEP_SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024))
FULL = 8192  # tokens of `ops`; `rows` has the other sizes
BACKENDS = ("pallas_mosaic_gpu", "pallas_triton", "xla")


class Recorder:
    """Appends JSON lines at once, so that a deadline loses nothing."""

    def __init__(self, path: pathlib.Path, budget_s: float):
        self._file = path.open("w")
        self._deadline = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        return self._deadline - time.monotonic()

    def add(self, **record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def plan(self, group: str, names: Iterable[str]) -> None:
        """Records the names of the rows that will follow, so that missing rows are detected."""
        self.add(group=group, planned=list(names))

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Runs `work`; an exception becomes a record."""
        if self.left_s < 3:
            self.add(name=name, error="no time left")
            return
        try:
            work()
        except Exception as error:  # the other variants go on
            self.add(name=name, error=f"{type(error).__name__}: {error}"[:600])


def benchmark_specs() -> list[LinearSpec]:
    """Every row of the kernel benchmark."""
    return [
        LinearSpec(tokens=t, in_features=k, out_features=n, rank=r, adapters=a, rate=p)
        for t in BENCHMARK_TOKENS
        for k, n in BENCHMARK_SHAPES
        for r in (16, 64)
        for p in (0.0, 0.1)
        for a in (1, 4, 16)
    ]


def run(
    section: str, out: pathlib.Path, *, budget_s: float, tiny: bool, only: Sequence[str] = (),
    kinds: Sequence[str] = (), matching: str = "",
) -> None:  # fmt: skip
    print(f"   jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    recorder = Recorder(out / f"{section}.jsonl", budget_s)
    recorder.add(conditions=conditions())
    sections = {
        "check": kernel_checks.run, "ops": partial(run_ops, only=only, kinds=kinds, matching=matching),
        "rows": partial(run_ops, tokens=(2048, 4096, 16384), only=only, kinds=kinds, matching=matching),
        "profile": partial(run_profile, only=only),
        "sweep": partial(run_sweep, only=only), "products": run_products,
        "layer": partial(kernel_layer.run, only=only, kinds=kinds),
    }  # fmt: skip
    sections[section](recorder, tiny)


def run_ops(
    recorder: Recorder,
    tiny: bool,
    tokens: Sequence[int] = (FULL,),
    only: Sequence[str] = (),
    kinds: Sequence[str] = (),
    matching: str = "",
) -> None:
    """Times forward and backward of whole ops as one program each; variants of a shape are interleaved."""
    planned: dict[str, list[Variant]] = {}
    for num, k, n in [(256, 256, 512)] if tiny else [(t, *shape) for t in tokens for shape in BENCHMARK_SHAPES]:
        if not only or f"{num}x{k}->{n}".startswith(tuple(only)):
            planned[f"{num}x{k}->{n}"] = [
                variant
                for variant in op_variants(num, k, n, tiny=tiny)
                if (not kinds or variant.kind in kinds) and re.search(matching, variant.name)
            ]
    for shape, variants in planned.items():
        recorder.plan(shape, (variant.name for variant in variants))
    for shape, variants in planned.items():
        if recorder.left_s < 25 and not tiny:
            return
        calls = compile_all(recorder, variants)
        timings = time_calls(calls, rounds=2 if tiny else 9, round_s=0.001 if tiny else 0.02)
        for variant in variants:
            if variant.name not in timings:
                continue
            record = {
                "name": variant.name, "shape": shape, "adapters": variant.spec.adapters, "rank": variant.spec.rank,
                "rate": variant.spec.rate, **dataclasses.asdict(timings[variant.name]),
            }  # fmt: skip
            recorder.add(variant=variant.kind, **record)
            if variant.kind in BACKENDS and variant.kind == default_backend(variant):
                recorder.add(variant="default", program=variant.kind, **record)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run one layer."""

    kind: str
    spec: LinearSpec
    layer: Callable[..., jax.Array]  # (x, a, b, w, arrays) -> y
    parallel: bool  # may compile in parallel, because XLA does not autotune it on the device

    @property
    def name(self) -> str:
        return f"{self.kind} {self.spec.name}"


def op_variants(tokens: int, k: int, n: int, *, tiny: bool) -> Iterator[Variant]:
    """The frozen layer, then XLA's forms, `ragged_dot` and each backend by dropout, rank and number of adapters."""

    def row(kind: str, layer: Callable[..., jax.Array], **changes) -> Variant:
        spec = LinearSpec(tokens=tokens, in_features=k, out_features=n, tile=64 if tiny else 128, **changes)
        return Variant(kind=kind, spec=spec, parallel=kind.startswith("pallas"), layer=layer)

    yield row("frozen", lambda x, a, b, w, arrays: oracles.frozen(x, w))
    for rate, rank, adapters in product((0.0, 0.1), (16,) if tiny else (16, 64), (1, 4) if tiny else (1, 4, 16)):
        changes = {"rate": rate, "rank": rank, "adapters": adapters}
        if adapters == 1:
            yield row("xla_naive", naive, **changes)
        else:
            yield row("xla_wide", wide, **changes)
            yield row("ragged_dot", ragged, **changes)
        for backend in BACKENDS[1:] if tiny else BACKENDS:
            yield row(backend, ours(backend), **changes)


def default_backend(variant: Variant) -> str:
    """The default backend of a call; the `default` row has its time."""
    arrays = jax.eval_shape(lambda: make_arrays(variant.spec))
    table = None if variant.spec.adapters == 1 else jnp.zeros(arrays["tile_adapter"].shape, jnp.int32)
    arguments = Arguments(
        x=arrays["x"],
        ws=(arrays["w"],),
        as_=(arrays["a"],),
        bs=(arrays["b"],),
        biases=(None,),
        tile_adapter=table,
        scale=jnp.ones(variant.spec.adapters),
        dropout=arrays["dropout"],
    )
    return select_name(*describe(arguments), None)


def ours(backend: str | None):
    def layer(x, a, b, w, arrays):
        options = {"scale": arrays["scale"], "dropout": arrays["dropout"], "implementation": backend}
        if a.shape[0] == 1:
            return pk.lora_linear(x, w, a[0], b[0], **{**options, "scale": arrays["scale"][0]})
        return pk.multi_lora_linear(x, w, a, b, tile_adapter=arrays["tile_adapter"], **options)

    return layer


def naive(x, a, b, w, arrays):
    rate = 0.1 if arrays["dropout"] is not None else 0.0
    return oracles.lora_xla(x, w, a[0], b[0], scale=2.0, rate=rate, key=arrays["key"])


def wide(x, a, b, w, arrays):
    rate = 0.1 if arrays["dropout"] is not None else 0.0
    return oracles.lora_wide(
        x, w, a, b, tile_adapter=arrays["tile_adapter"], scale=arrays["scale"], rate=rate, key=arrays["key"]
    )


def ragged(x, a, b, w, arrays):
    rate = 0.1 if arrays["dropout"] is not None else 0.0
    return oracles.lora_ragged(
        x, w, a, b, tile_adapter=arrays["tile_adapter"], scale=arrays["scale"], rate=rate, key=arrays["key"]
    )


def forward_backward(variant: Variant):
    """y, dx, dA, dB in one program."""

    def step(arrays):
        x, a, b = arrays["x"], arrays["a"], arrays["b"]
        y, vjp = jax.vjp(lambda x, a, b: variant.layer(x, a, b, arrays["w"], arrays), x, a, b)
        grads = vjp(arrays["dy"])
        return (y, grads[0]) if variant.kind == "frozen" else (y, *grads)

    return step


def compile_all(recorder: Recorder, variants: list[Variant]):
    """Compiles, in parallel if XLA does not autotune on the device; returns name -> (function, inputs)."""
    jobs, inputs = {}, {}
    with ThreadPoolExecutor(14) as pool:
        for variant in variants:

            def lower(variant=variant):
                if variant.spec not in inputs:
                    arrays = dict(make_arrays(variant.spec), key=jax.random.key(3))
                    other = {**arrays, "x": jnp.roll(arrays["x"], 1, 0), "dy": jnp.roll(arrays["dy"], 1, 0)}
                    inputs[variant.spec] = [(arrays,), (other,)]
                options = pk.compiler_options() if variant.parallel else None
                fn = jax.jit(forward_backward(variant), compiler_options=options)
                lowered = fn.lower(*inputs[variant.spec][0])
                compiled = pool.submit(lowered.compile) if variant.parallel else lowered.compile
                jobs[variant.name] = (compiled, inputs[variant.spec])

            recorder.attempt(variant.name, lower)
        done = {}
        for parallel in (False, True):  # the pool compiles ours while these are autotuned
            for variant in variants:
                if variant.name in jobs and variant.parallel == parallel:

                    def finish(variant=variant):
                        compiled, sets = jobs[variant.name]
                        fn = compiled.result() if variant.parallel else compiled()
                        jax.block_until_ready(fn(*sets[0]))
                        done[variant.name] = (fn, sets)

                    recorder.attempt(variant.name, finish)
    return done


def run_profile(recorder: Recorder, tiny: bool, only: Sequence[str] = ()) -> None:
    """Lists the kernels of one call with their times, on a GPU as warm as in the comparison of whole ops."""
    if tiny:
        return
    from jax.experimental.mosaic.gpu import profiler

    plain = (("frozen", 16, 1, 0.0), *((BACKENDS[0], 16, *case) for case in ((1, 0.0), (1, 0.1), (4, 0.1))))
    large = [(BACKENDS[0], 64, *case) for case in product((1, 4, 16), (0.0, 0.1))]
    shapes = {(4096, 4096): plain, (4096, 14336): plain, (14336, 4096): plain, (8192, 8192): (plain[0], *large)}
    variants = []
    for (k, n), cases in shapes.items():
        for kind, rank, adapters, rate in cases:
            if not only or f"{FULL}x{k}->{n}".startswith(tuple(only)):
                spec = LinearSpec(tokens=FULL, in_features=k, out_features=n, rank=rank, adapters=adapters, rate=rate)
                layer = ours(kind) if kind != "frozen" else lambda x, a, b, w, arrays: oracles.frozen(x, w)
                variants.append(Variant(kind=kind, spec=spec, layer=layer, parallel=True))
    recorder.plan("kernel lists", (variant.name for variant in variants))
    for variant in variants:

        def work(variant=variant):
            arrays = make_arrays(variant.spec)
            fn = jax.jit(forward_backward(variant), compiler_options=pk.compiler_options())
            for _ in range(200):
                out = fn(arrays)
            jax.block_until_ready(out)
            del out
            _, runs = profiler.measure(fn, aggregate=False, iterations=25)(arrays)
            kernels = [
                (name[:60], statistics.median(run[i][1] for run in runs) * 1e3) for i, (name, _) in enumerate(runs[0])
            ]
            recorder.add(name=variant.name, kernels=kernels)

        recorder.attempt(variant.name, work)


def run_sweep(recorder: Recorder, tiny: bool, only: Sequence[str] = ()) -> None:
    """Times tile sizes kernel by kernel (of those in `only`, if given), over several copies of the large operand."""
    shapes = ((256, 256),) if tiny else SWEEP_SHAPES
    sizes = {"tokens": 256 if tiny else FULL, "tile": 64 if tiny else 128}
    plans = {}
    for k, n, rank in [(*shape, 16) for shape in shapes] + [(*shapes[0], 64)]:
        spec = LinearSpec(in_features=k, out_features=n, rank=rank, rate=0.1, **sizes)
        plans[spec] = planned_sweep(recorder, spec, tiny, quick=not only and (tiny or rank == 64), only=only)
    for spec, chosen in plans.items():
        sweep_shape(recorder, spec, tiny, chosen)


def run_products(recorder: Recorder, tiny: bool) -> None:
    """Times the Hopper GEMMs separately, with one and several adapters and in different contexts."""
    plans = {}
    for rank, adapters in product((16, 64), () if tiny else (1, 4, 16)):
        spec = LinearSpec(tokens=FULL, in_features=8192, out_features=8192, rank=rank, adapters=adapters)
        plans[spec] = planned_sweep(recorder, spec, tiny, quick=True, only=("mosaic_fwd", "mosaic_dx"))
    for spec, chosen in plans.items():
        sweep_shape(recorder, spec, tiny, chosen)


def planned_sweep(
    recorder: Recorder, spec: LinearSpec, tiny: bool, *, quick: bool, only: Sequence[str]
) -> dict[str, search.Candidate]:
    """Candidates of a shape by name; the names are recorded before measuring."""
    chosen = {
        f"{spec.name} {candidate.kernel} {candidate.config}": candidate
        for candidate in search.candidates(spec, quick=quick)
        if not (tiny and candidate.kernel.startswith("mosaic")) and (not only or candidate.kernel in only)
    }
    recorder.plan(spec.name, chosen)
    return chosen


def sweep_shape(recorder: Recorder, spec: LinearSpec, tiny: bool, chosen: dict[str, search.Candidate]) -> None:
    inputs, copies = search.make_inputs(spec)
    jobs, calls = {}, {}
    with ThreadPoolExecutor(14) as pool:
        for name, candidate in chosen.items():
            sets = sweep_sets(inputs, copies, candidate)

            def lower(candidate=candidate, name=name, sets=sets):
                def many(inputs, larges, w):
                    return [candidate.run(inputs, candidate.config, large, w) for large in larges]

                jobs[name] = (pool.submit(jax.jit(many).lower(*sets[0]).compile), sets)

            recorder.attempt(name, lower)
        for name, (job, sets) in jobs.items():

            def finish(name=name, job=job, sets=sets):
                fn = job.result(timeout=max(1, recorder.left_s - 5))
                jax.block_until_ready(fn(*sets[0]))
                calls[name] = (fn, sets)

            recorder.attempt(name, finish)
    for name, timing in time_calls(calls, rounds=2 if tiny else 7, round_s=0.001 if tiny else 0.006).items():
        per_call = len(jobs[name][1][0][1])
        times = {key: value / per_call for key, value in dataclasses.asdict(timing).items()}
        recorder.add(
            name=name, spec=spec.name, kernel=chosen[name].kernel, config=changed(chosen[name].config), **times
        )


def sweep_sets(inputs, copies: dict, candidate) -> list[tuple]:
    """Arguments of a candidate. Short kernels run over all copies in one program, GEMMs over one copy at a time."""
    larges, weights = copies[candidate.large], copies["w"]
    if candidate.bytes:
        return [(inputs, larges, weights[0])]
    return [(inputs, [large], w) for large, w in zip(larges, weights, strict=True)]


def changed(config) -> dict:
    """The fields of a configuration that differ from its defaults."""
    fields = dataclasses.fields(config)
    return {f.name: getattr(config, f.name) for f in fields if getattr(config, f.name) != f.default}
