"""A decoder layer on a quantised base, forward and backward: times, where they go, then what the results differ by.

    python -m benchmarks.quantised_layer --out results/quantised_layer [--seconds 165] [--cases NAME ...] [--small]

One process: programs are traced in turn and compiled side by side. Times are medians of interleaved rounds, ratios are
over the frozen bfloat16 layer of the same rounds. Every row is written at once, and a case that fails writes its error.

Rows (`quantised_layer.jsonl`):
    layer     case, us, over_frozen_bf16, weights_mb, temporary_mb
    kernel    case, kernel, us and times a call: the kinds of kernels of that layer's program, longest first
    sequence  case, events: (kernel, us) of one call in order
    product   one product of 8-bit floats by cuBLAS and by our kernel: us, tflops
    check     case, relative errors of y, dx, dA and dB next to XLA's form of the same weights

T packed tokens · K in features · N out features
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels as pk
from benchmarks import kernel_layer as kl
from benchmarks.conditions import conditions
from benchmarks.quantised import ADAPTERS, RATE, SMALL, Rows, frozen_fp8
from lorafusion_jax.objective.loss import token_losses
from lorafusion_jax.weights.table import KINDS
from pallas_kernels import device as pk_device
from pallas_kernels.linear import vjp as linear_vjp
from pallas_kernels.linear.hopper.gemm_config import GemmConfig, gemm_config
from pallas_kernels.quantised import fp8, hopper, hopper_gemm, rows
from pallas_kernels.tuning.timing import time_calls

WORKERS = 10
VOCABULARY = 128256
STOP_COMPILING_S = 85  # before the end: what timing, profiles and checks take
OWN = ("OWN_PRODUCTS", "OWN_SUMS")
BOUND = 0.03  # of a layer's y and dx: two sums whose rounded inputs differ by 1.7 % each (see `quantised.check_mlp`)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to run the layer.

    Attributes:
        weights: "bf16", "fp8" (both orders), "fp8 one order", "int8" or "nf4".
        own: flags of `quantised.hopper` that are on while the case is traced.
    """

    name: str
    weights: str
    variant: kl.Variant
    own: tuple[str, ...] = ()
    profiled: bool = False


def cases() -> Iterator[Case]:
    """The most important ones first: what is not compiled in time is not run."""
    lora = {"adapters": ADAPTERS, "rate": RATE, "options": True}
    frozen = kl.Variant(kind="frozen", project=kl.frozen, options=True)
    frozen_of_8_bits = kl.Variant(kind="frozen", project=frozen_fp8, options=True)
    ours = kl.Variant(kind="ours", project=kl.ours(None), mlp=kl.ours_mlp, **lora)
    apart = dataclasses.replace(ours, mlp=None)
    yield Case(name="frozen bf16", weights="bf16", variant=frozen)
    yield Case(name="frozen fp8", weights="fp8", variant=frozen_of_8_bits, profiled=True)
    yield Case(name="fp8", weights="fp8", variant=ours, profiled=True)
    yield Case(name="fp8 own products", weights="fp8", variant=ours, own=("OWN_PRODUCTS",))
    yield Case(name="fp8 own products and sums", weights="fp8", variant=ours, own=OWN, profiled=True)
    yield Case(name="fp8 one order", weights="fp8 one order", variant=ours)
    yield Case(name="fp8 mlp apart", weights="fp8", variant=apart)
    yield Case(name="fp8 by xla", weights="fp8", variant=dataclasses.replace(apart, project=kl.ours("xla")))
    for kind in ("nf4", "int8"):
        yield Case(name=kind, weights=kind, variant=dequantised(kind, ours), profiled=kind == "nf4")
        yield Case(name=f"frozen {kind}", weights=kind, variant=dequantised(kind, frozen))
    yield Case(name="bf16", weights="bf16", variant=ours)
    yield Case(name="fp8 mlp apart, own products and sums", weights="fp8", variant=apart, own=OWN)
    yield Case(name="frozen fp8 one order", weights="fp8 one order", variant=frozen_of_8_bits)


def dequantised(kind: str, variant: kl.Variant) -> kl.Variant:
    """The weights of a call's projections become bfloat16 arrays when it runs."""

    def usable(names: tuple[str, ...], x: jax.Array, arrays: dict) -> tuple[jax.Array, dict]:
        stored, x = lax.optimization_barrier(({name: arrays["w"][name] for name in names}, x))
        return x, arrays | {"w": {name: KINDS[kind].dequantise(each, x.dtype) for name, each in stored.items()}}

    def project(names: tuple[str, ...], x: jax.Array, arrays: dict) -> tuple[jax.Array, ...]:
        return variant.project(names, *usable(names, x, arrays))

    def mlp(x: jax.Array, arrays: dict) -> jax.Array:
        return kl.ours_mlp(*usable((*kl.GROUPS[2], *kl.GROUPS[3]), x, arrays))

    return dataclasses.replace(variant, project=project, mlp=mlp if variant.mlp else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=165)
    parser.add_argument("--cases", nargs="+", help="names of cases; all by default")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script on a CPU")
    given = parser.parse_args()
    out = Rows(given.out, given.seconds, "quantised_layer.jsonl")
    out.add(part="conditions", **conditions())
    shape = SMALL if given.small else kl.SHAPES[0]
    budget = {"rounds": 2, "round_s": 0.001} if given.small else {"rounds": 7, "round_s": 0.04}
    chosen = [case for case in cases() if not given.cases or case.name in given.cases]
    with ThreadPoolExecutor(WORKERS) as pool:
        layers = Layers.compile(out, pool, shape, chosen)
        single = compile_products(out, pool, shape)
        layers.wait()
    out.attempt("layer", partial(layers.time, budget))
    out.attempt("kernels", layers.profile)
    out.attempt("product", partial(time_products, out, single, budget))
    out.attempt("check", layers.check)
    out.add(part="end", left_s=out.left_s)


# --- layers ------------------------------------------------------------------------------------------------------


class Layers:
    """Compiled layers by name, with their arrays."""

    def __init__(self, out: Rows):
        self._out = out
        self._calls: dict[str, tuple[Callable, list[tuple]]] = {}
        self._waiting: list[tuple[Case, Future]] = []
        self._chosen: list[Case] = []
        self._weights: dict[str, dict] = {}

    @classmethod
    def compile(cls, out: Rows, pool: ThreadPoolExecutor, shape: kl.Shape, chosen: list[Case]) -> Layers:
        self = cls(out)
        arrays = kl.make_arrays(shape, kl.Variant(kind="", project=kl.frozen, adapters=ADAPTERS, rate=RATE))
        waiting: list[tuple[Case, Future]] = []
        for number, case in enumerate(chosen):
            if out.left_s < STOP_COMPILING_S and number:
                out.add(part="layer", case=case.name, skipped="no time left to compile")
                continue
            own = arrays | {"w": self._weights_of(case.weights, arrays["w"])}
            step = out.attempt(f"layer {case.name}", partial(lowered, case, own, shape))
            if step is None:
                continue
            # These two by themselves: cuBLAS's algorithms are chosen by their time, and the others take the same ones.
            before = [future for _, future in waiting[: min(number, 2)]]
            compile_one = partial(self._compiled, case, step, own, before)
            waiting.append((case, pool.submit(out.attempt, f"layer {case.name}", compile_one)))
        self._waiting = waiting
        return self

    def wait(self) -> None:
        for case, future in self._waiting:
            future.result()
            if case.name in self._calls:
                self._chosen.append(case)

    def _weights_of(self, kind: str, plain: dict) -> dict:
        if kind not in self._weights:
            self._weights[kind] = {name: _stored(kind, w) for name, w in plain.items()}
        return self._weights[kind]

    def _compiled(self, case: Case, step: Any, arrays: dict, before: list[Future]) -> None:
        for future in before:
            future.result()
        start = time.monotonic()
        compiled = step.compile()
        jax.block_until_ready(compiled(arrays))
        memory = compiled.memory_analysis()
        self._calls[case.name] = (compiled, [(arrays,)])
        self._out.add(
            part="compiled", case=case.name, seconds=round(time.monotonic() - start, 1),
            weights_mb=sum(leaf.nbytes for leaf in jax.tree.leaves(arrays["w"])) / 1e6,
            temporary_mb=getattr(memory, "temp_size_in_bytes", 0) / 1e6, left_s=round(self._out.left_s),
        )  # fmt: skip

    def time(self, budget: dict) -> None:
        times = time_calls(self._calls, **budget)
        for case in self._chosen:
            us = times[case.name].p50_us
            over = us / times["frozen bf16"].p50_us if "frozen bf16" in times else None
            self._out.add(part="layer", case=case.name, over_frozen_bf16=over, **dataclasses.asdict(times[case.name]))

    def profile(self, runs: int = 5) -> None:
        """How long each kind of kernel takes in a call, and how long no kernel runs between the first and the last."""
        for case in self._chosen:
            if case.profiled and self._out.left_s > 10:
                compiled, ((arrays,),) = self._calls[case.name]
                profile(self._out, case.name, partial(compiled, arrays), runs)

    def check(self) -> None:
        """Next to XLA's form on the same weights; nf4 and int8 next to bfloat16: how far off their weights are."""
        found: dict[str, Any] = {}
        for name in ("fp8 by xla", "bf16", "frozen bf16"):
            if name in self._calls:
                found[name] = self._results(name)
        for case in self._chosen:
            frozen = "frozen" in case.name
            like = "frozen bf16" if frozen else "fp8 by xla" if "fp8" in case.name else "bf16"
            if case.name == like or like not in found:
                continue
            got, wanted = self._results(case.name), found[like]
            errors = {key: [_relative(a, b) for a, b in zip(got[key], wanted[key], strict=True)] for key in wanted}
            row = {"part": "check", "case": case.name, "next_to": like, "errors": errors}
            exact = like == "fp8 by xla"
            self._out.add(**row, **({"ok": all(e <= BOUND for e in errors["y"] + errors["dx"])} if exact else {}))

    def _results(self, name: str) -> dict[str, list[np.ndarray]]:
        compiled, ((arrays,),) = self._calls[name]
        y, (dx, *banks) = compiled(arrays)
        found = {"y": [y], "dx": [dx]} | {
            key: [bank[site] for site in kl.SITES] for key, bank in zip(("da", "db"), banks, strict=False)
        }
        return jax.tree.map(lambda array: np.asarray(array[:512], np.float32), found)


def lowered(case: Case, arrays: dict, shape: kl.Shape) -> Any:
    options = pk.compiler_options() if case.variant.options else None
    with _flags(case.own):
        step = jax.jit(kl.forward_backward(case.variant, kl.layer, shape), compiler_options=options)
        return step.lower(arrays)


@contextlib.contextmanager
def _flags(names: tuple[str, ...]) -> Iterator[None]:
    """A call that was traced before is not traced again, so what is remembered must go, too."""
    for name in names:
        setattr(hopper, name, True)
    for traced in (linear_vjp._compute, linear_vjp._differentiate):
        traced.clear_cache()
    try:
        yield
    finally:
        for name in names:
            setattr(hopper, name, False)


def _stored(kind: str, w: jax.Array) -> Any:
    if kind == "bf16":
        return w
    if kind in ("fp8", "fp8 one order"):
        return _quantise_fp8(w, both=kind == "fp8")
    return jax.jit(lambda w: KINDS[kind].quantise(w.astype(jnp.float32)))(w)


_quantise_fp8 = jax.jit(lambda w, both: fp8.quantise(w.astype(jnp.float32), both=both), static_argnames="both")


def _relative(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def profile(out: Rows, name: str, call: Callable[[], Any], runs: int) -> None:
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([call() for _ in range(runs)][-1])
        found = list(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(found[0]))
        events = [
            (event.name, event.start_ns, event.duration_ns)
            for plane in data.planes if plane.name.startswith("/device:GPU")
            for line in plane.lines if line.name.startswith("Stream")
            for event in line.events
        ]  # fmt: skip
    events.sort(key=lambda event: event[1])
    spent, count = defaultdict(float), defaultdict(int)
    for kind, _, duration in events:
        kind = re.sub(r"[._]\d+$", "", kind)
        spent[kind] += duration / 1e3 / runs
        count[kind] += 1
    if not events:
        return
    whole = max(start + duration for _, start, duration in events) - min(start for _, start, _ in events)
    busy = round(sum(spent.values()), 1)
    out.add(part="kernels", case=name, busy_us=busy, elapsed_us=whole / 1e3 / runs, kernels=len(events) / runs)
    for kind, us in sorted(spent.items(), key=lambda pair: -pair[1])[:60]:
        out.add(part="kernel", case=name, kernel=kind[:120], us=round(us, 1), times=count[kind] / runs)
    last = events[-len(events) // runs :]
    out.add(part="sequence", case=name, events=[[kind[:60], round(duration / 1e3, 1)] for kind, _, duration in last])


# --- products ----------------------------------------------------------------------------------------------------

PLANS = {  # of our kernel: changes to the tiles that a layer takes
    "own": {},
    "own, columns shared": {"split_n": False, "along_n": False},
    "own, band 16": {"along_n": False, "band": 16},
    "own, wide stores": {"store_n": 64},
}


def compile_products(out: Rows, pool: ThreadPoolExecutor, shape: kl.Shape) -> dict[tuple[int, int], dict]:
    """{(K, N): {case: call}}, compiled while layers are; each of a product with its scales and low-rank part."""
    found: dict[tuple[int, int], dict] = {}
    T = shape.tokens
    for K, N in ((shape.width, shape.width), (shape.width, shape.inner), (shape.inner, shape.width)):
        calls = found[K, N] = {}
        x8, w8 = (jnp.ones((size, K), rows.E4M3) for size in (T, N))
        x8, w8 = (_spread(each) for each in (x8, w8))
        scales, columns = jnp.ones((T, 1)), jnp.ones(N)
        s, bank = jnp.ones((T, 16), jnp.bfloat16), jnp.ones((ADAPTERS + 1, 16, N), jnp.bfloat16)
        operands = (x8, w8, scales, columns, s, bank, jnp.arange(T // 64, dtype=jnp.int32) % ADAPTERS)
        chosen: dict[str, Callable] = {"cublas": _by_cublas, "cublas and finish": _by_cublas_and_finish}
        if jax.default_backend() == "gpu":
            tiles = gemm_config(T, K // 2, N, 16, 128, transposed=True) or GemmConfig()
            tiles = dataclasses.replace(tiles, tile_k=2 * tiles.tile_k)
            for name, changes in PLANS.items():
                config = dataclasses.replace(tiles, **changes)
                chosen[name] = partial(_by_us, config, low=False)
                if name == "own":
                    chosen["own with low rank"] = partial(_by_us, config, low=True)
        for name, function in chosen.items():

            def compile_one(name=name, function=function, operands=operands, calls=calls):
                compiled = jax.jit(function).lower(*operands).compile(compiler_options=pk.compiler_options() or None)
                jax.block_until_ready(compiled(*operands))
                calls[name] = (compiled, [operands])

            pool.submit(out.attempt, f"product {name} {K} {N}", compile_one)
    compile_head(out, pool, shape, found)
    return found


def compile_head(out: Rows, pool: ThreadPoolExecutor, shape: kl.Shape, found: dict) -> None:
    """Head and loss of a microbatch, forward and backward: what no layer's time contains."""
    T, D = shape.tokens, shape.width
    hidden, head = (_spread(jnp.ones(dims, jnp.bfloat16)) for dims in ((T, D), (D, VOCABULARY)))
    operands = (hidden, head, jnp.zeros(T, jnp.int32), jnp.ones(T))

    def step(hidden, head, targets, weights):
        return jax.value_and_grad(lambda hidden: token_losses(hidden, head, targets, weights).sum())(hidden)

    def compile_one():
        compiled = jax.jit(step).lower(*operands).compile(compiler_options=pk.compiler_options() or None)
        jax.block_until_ready(compiled(*operands))
        found[shape.width, VOCABULARY] = {"head and loss": (compiled, [operands])}

    if jax.default_backend() == "gpu":
        pool.submit(out.attempt, "product head", compile_one)


@jax.jit
def _spread(ones: jax.Array) -> jax.Array:
    """Values as products meet them: what is multiplied decides what a GPU draws, and so its clock."""
    return jax.random.normal(jax.random.key(0), ones.shape, jnp.bfloat16).astype(ones.dtype)


def _by_cublas(x8, w8, scales, columns, s, bank, owners):
    return lax.dot_general(x8, w8, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def _by_cublas_and_finish(x8, w8, scales, columns, s, bank, owners):
    from pallas_kernels.quantised import passes

    sums = _by_cublas(x8, w8, scales, columns, s, bank, owners)
    interpret = pk_device.interprets()
    return passes.load().finish(sums, scales, columns, s, bank, owners, interpret=interpret)


def _by_us(config: GemmConfig, x8, w8, scales, columns, s, bank, owners, *, low: bool):
    part = hopper_gemm.LowRank(s=s, bank=bank, block_adapter=owners[:: config.tile_m // 64]) if low else None
    return hopper_gemm.gemm(
        x8, w8, scales[:, 0], columns, part, config=config, num_sms=pk_device.num_sms()
    )  # fmt: skip


def time_products(out: Rows, single: dict[tuple[int, int], dict], budget: dict) -> None:
    for (K, N), calls in single.items():
        T = next(iter(calls.values()))[1][0][0].shape[0]
        for name, timing in time_calls(calls, **budget | {"round_s": budget["round_s"] / 3}).items():
            us = timing.p50_us
            out.add(part="product", case=name, shape=[T, K, N], us=us, tflops=2e-6 * T * K * N / us)


if __name__ == "__main__":
    main()
