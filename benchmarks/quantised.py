"""Frozen weights in fewer bytes: correctness on the device first, then products, layouts and linears.

    python -m benchmarks.quantised --out results/quantised [--seconds 150] [--parts mlp passes] [--small]

A whole layer is `quantised_layer.py`. Every case writes its row at once, and one that fails writes its error and ends
nothing. Times are medians of interleaved rounds; ratios are within the run, over the frozen bfloat16 case of the same
part.

T packed tokens · K in features · N out features · A adapters
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
import traceback
from collections.abc import Callable
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
from pallas_kernels import device as pk_device
from pallas_kernels.frozen_weight import frozen_product
from pallas_kernels.linear.hopper.gemm_config import GemmConfig, gemm_config
from pallas_kernels.mlp.xla import silu_gate
from pallas_kernels.quantised import fp8, hopper, hopper_gemm, rows
from pallas_kernels.tuning.timing import time_calls

SMALL = kl.Shape(name="small", width=128, heads=2, key_heads=1, head=64, inner=256, tokens=256)
ADAPTERS, RATE = 4, 0.1


class Rows:
    """Writes a row as soon as it is known, and counts the time that is left."""

    def __init__(self, out: Path, seconds: float, name: str = "quantised.jsonl"):
        out.mkdir(parents=True, exist_ok=True)
        self._file, self._end = out / name, time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def add(self, **row: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """Runs a part; what fails is a row of its own."""
        if self.left_s < 0:
            self.add(part=name, skipped="no time left")
            return None
        try:
            return call()
        except Exception as error:
            self.add(part=name, error=f"{type(error).__name__}: {error}"[:400])
            traceback.print_exc(limit=3)
            return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="in this order")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script on a CPU")
    given = parser.parse_args()
    rows_out = Rows(given.out, given.seconds)
    rows_out.add(part="conditions", **conditions())
    shape = SMALL if given.small else kl.SHAPES[0]
    budget = {"rounds": 2, "round_s": 0.001} if given.small else {"rounds": 7, "round_s": 0.04}
    for name in given.parts:
        rows_out.attempt(name, lambda name=name: PARTS[name](rows_out, shape, budget))


# --- correctness -------------------------------------------------------------------------------------------------


def check(out: Rows, shape: kl.Shape, budget: dict) -> None:
    """One linear with LoRA against float64 of the quantised weights.

    Rounding a value to e4m3 errs by at most 2^-4 of it, evenly spread: some 2^-4 / sqrt(12) · 2 = 3.6 % of a row's
    norm at the worst place of a binade, 2.6 % on average. Products of independent terms keep that ratio, so y - LoRA
    and dx - LoRA may differ by 4 %. What is left over rounded operands is the products' own: 2^-8 of bfloat16 results.
    """
    T, K, N = min(shape.tokens, 2048), shape.width, shape.inner
    operands = _operands(T, K, N)
    weight = fp8.quantise(operands["w"].astype(jnp.float32))
    kernels = {"ours": None, "xla": "xla"}
    exact = _exact(operands, weight)
    for name, implementation in kernels.items():

        def check_backend(name=name, implementation=implementation):
            got = jax.jit(partial(_step, implementation))(operands, weight)
            errors = {key: _relative(got[key], exact[key]) for key in exact}
            bounds = {"y": 0.04, "dx": 0.04, "da": 0.012, "db": 0.012, "y_rounded": 0.006}
            rounded = _rounded(operands, weight)
            errors["y_rounded"] = _relative(got["y"], rounded)
            ok = all(errors[key] <= bounds[key] for key in bounds)
            out.add(part="check", case=name, shape=[T, K, N], errors=errors, bounds=bounds, ok=ok)
            again = jax.jit(partial(_step, implementation))(operands, weight)
            same = all(np.array_equal(np.asarray(got[key]), np.asarray(again[key])) for key in got)
            out.add(part="check", case=f"{name} twice", ok=same)

        out.attempt(f"check {name}", check_backend)

    def joint():
        """The rows of one adapter, with other rows beside them and without: bitwise."""
        step = jax.jit(partial(_step, None))
        half = T // 2
        other = dict(operands, x=operands["x"].at[half:].mul(100), dy=operands["dy"].at[half:].mul(-7))
        a, b = step(operands, weight), step(other, weight)
        same = all(np.array_equal(np.asarray(a[key][:half]), np.asarray(b[key][:half])) for key in ("y", "dx"))
        spoiled = dict(operands, x=operands["x"].at[half:].set(jnp.nan))
        clean = all(bool(jnp.isfinite(step(spoiled, weight)[key][:half]).all()) for key in ("y", "dx"))
        out.add(part="check", case="rows are isolated", ok=same and clean)

    def rounded_rows():
        """The kernel's values and scales are those of the formula, bit for bit."""
        from pallas_kernels.quantised.passes.pallas.rows import round_rows

        x = operands["x"] * jnp.exp(jax.random.normal(jax.random.key(5), (T, 1))).astype(jnp.bfloat16)
        interpret = jax.default_backend() == "cpu"
        ours = jax.jit(partial(round_rows, interpret=interpret))(x, weight.scales[:K])
        formula = jax.jit(lambda x, f: rows.round_rows(x.astype(jnp.float32) * f))(x, weight.scales[:K])
        bits = [np.asarray(lax.bitcast_convert_type(result[0], jnp.uint8)) for result in (ours, formula)]
        same = np.array_equal(bits[0], bits[1]) and np.array_equal(ours[1], formula[1])
        out.add(part="check", case="rounded rows", ok=bool(same), apart=int((bits[0] != bits[1]).sum()))

    def with_dropout():
        """Hopper's passes and XLA's form draw the same masks and round the same rows."""
        runs = [jax.jit(partial(_step, name, rate=RATE))(operands, weight) for name in (None, "xla")]
        errors = {key: _relative(runs[0][key], np.asarray(runs[1][key], np.float64)) for key in runs[0]}
        out.add(part="check", case="dropout, ours next to xla", errors=errors, ok=max(errors.values()) <= 0.012)

    out.attempt("check dropout", with_dropout)
    out.attempt("check joint", joint)
    out.attempt("check rows", rounded_rows)


def check_mlp(out: Rows, shape: kl.Shape, budget: dict) -> None:
    """The whole MLP as one op next to XLA's three, with dropout. What is rounded between them differs by a rounding to
    bfloat16, 2^-9, which now and then decides to which e4m3 value an element goes: some 2^-4 of 2 % of all."""
    small = dataclasses.replace(shape, tokens=min(shape.tokens, 2048))
    variant, prepare = _variant("ours_fp8")
    arrays = prepare(kl.make_arrays(small, variant))
    names = (*kl.GROUPS[2], *kl.GROUPS[3])

    def step(implementation, arrays, x, a, b):
        w = [arrays["w"][name] for name in names]

        def mlp(x, a, b):
            return pk.multi_lora_mlp(
                x, w, a, b, tile_adapter=arrays["tile_adapter"], scale=arrays["scale"],
                dropout=kl.dropout_of("gate", arrays), down_dropout=kl.dropout_of("down", arrays),
                implementation=implementation,
            )  # fmt: skip

        y, pullback = jax.vjp(mlp, x, a, b)
        return {"y": y} | dict(zip(("dx", "da", "db"), pullback(x), strict=True))

    banks = ([arrays[part][name] for name in names] for part in "ab")
    given = (arrays, arrays["x"], *banks)
    xla = jax.jit(partial(step, "xla"))(*given)
    for own_products in (False, True):
        hopper.OWN_PRODUCTS = own_products
        ours = jax.jit(partial(step, None))(*given)
        errors = jax.tree.map(lambda a, b: _relative(a, np.asarray(b, np.float64)), ours, xla)
        case = "mlp" if own_products else "mlp by cublas"
        out.add(part="check", case=case, errors=errors, ok=max(jax.tree.leaves(errors)) <= 0.02)


def _operands(T: int, K: int, N: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(3), 5)
    half = jnp.bfloat16
    return {
        "x": jax.random.normal(keys[0], (T, K), jnp.float32).astype(half),
        "w": (jax.random.normal(keys[1], (K, N), jnp.float32) * 0.02).astype(half),
        "a": jax.random.normal(keys[2], (2, K, 16), jnp.float32) * 0.02,
        "b": jax.random.normal(keys[3], (2, 16, N), jnp.float32) * 0.02,
        "dy": jax.random.normal(keys[4], (T, N), jnp.float32).astype(half),
    }


def _step(
    implementation: str | None, ops: dict[str, jax.Array], weight: Any, rate: float = 0.0
) -> dict[str, jax.Array]:
    T = ops["x"].shape[0]
    keys = {"key": jnp.arange(2, dtype=jnp.uint32), "row_key": jnp.arange(T, dtype=jnp.uint32)}
    dropout = pk.Dropout(rate=jnp.full(2, rate), **keys) if rate else None
    table = (jnp.arange(T // 128) * 2 // (T // 128)).astype(jnp.int32)

    def op(x, a, b):
        scale = jnp.array([2.0, 0.5])
        return pk.multi_lora_linear(
            x, weight, a, b, tile_adapter=table, scale=scale, dropout=dropout, implementation=implementation
        )

    y, pullback = jax.vjp(op, ops["x"], ops["a"], ops["b"])
    dx, da, db = pullback(ops["dy"])
    return {"y": y, "dx": dx, "da": da, "db": db}


def _exact(ops: dict[str, jax.Array], weight: Any) -> dict[str, np.ndarray]:
    """In float64, by the values of the quantised weight."""
    x, a, b, dy = (np.asarray(ops[name].astype(jnp.float32), np.float64) for name in ("x", "a", "b", "dy"))
    w = np.asarray(fp8.dequantise(weight, jnp.dtype("float32")), np.float64)
    half, scale = x.shape[0] // 2, (2.0, 0.5)
    y, dx = x @ w, dy @ w.T
    da, db = np.zeros_like(a), np.zeros_like(b)
    for adapter, members in enumerate((slice(0, half), slice(half, None))):
        s, ds = x[members] @ a[adapter], scale[adapter] * dy[members] @ b[adapter].T
        y[members] += scale[adapter] * s @ b[adapter]
        dx[members] += ds @ a[adapter].T
        da[adapter], db[adapter] = x[members].T @ ds, scale[adapter] * s.T @ dy[members]
    return {"y": y, "dx": dx, "da": da, "db": db}


def _rounded(ops: dict[str, jax.Array], weight: Any) -> np.ndarray:
    """y in float64 of the rounded x: what a product without any error of its own gives."""
    values, scales = rows.round_rows(ops["x"])
    x8 = np.asarray(values.astype(jnp.float32), np.float64) * np.asarray(scales, np.float64)
    x = np.asarray(ops["x"].astype(jnp.float32), np.float64)
    w = np.asarray(fp8.dequantise(weight, jnp.dtype("float32")), np.float64)
    a, b = (np.asarray(ops[name], np.float64) for name in ("a", "b"))
    half = x.shape[0] // 2
    low = np.concatenate([2.0 * x[:half] @ a[0] @ b[0], 0.5 * x[half:] @ a[1] @ b[1]])
    return x8 @ w + low


def _relative(got: Any, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact))


# --- a layer's linears ----------------------------------------------------------------------


def _variant(name: str) -> tuple[kl.Variant, Callable[[dict], dict]]:
    """A way to run a layer, and what it makes of the arrays' weights ahead of time."""

    def same(arrays: dict) -> dict:
        return arrays

    def as_fp8(arrays: dict) -> dict:
        make = jax.jit(lambda w: fp8.quantise(w.astype(jnp.float32), both=True))
        return arrays | {"w": {name: make(w) for name, w in arrays["w"].items()}}

    with_lora = {"adapters": ADAPTERS, "rate": RATE, "options": True}
    variants = {
        "frozen": (kl.Variant(kind="frozen", project=kl.frozen, options=True), same),
        "fp8": (kl.Variant(kind="frozen", project=frozen_fp8, options=True), as_fp8),
        "ours": (kl.Variant(kind="ours", project=kl.ours(None), mlp=kl.ours_mlp, **with_lora), same),
        "ours_fp8": (kl.Variant(kind="ours", project=kl.ours(None), mlp=kl.ours_mlp, **with_lora), as_fp8),
        "xla_fp8": (kl.Variant(kind="ours", project=kl.ours("xla"), **with_lora), as_fp8),
    }
    return variants[name]


def frozen_fp8(names, x, arrays):
    return tuple(frozen_product(x, arrays["w"][name]) for name in names)


def _linears(variant: kl.Variant, x: jax.Array, arrays: dict, shape: kl.Shape) -> jax.Array:
    """The seven projections with the gate between them, and nothing else of a layer."""
    q, k, v = variant.project(kl.GROUPS[0], x, arrays)
    (o,) = variant.project(kl.GROUPS[1], q, arrays)
    x = x + o + jnp.concatenate([k, v] * (shape.width // (2 * k.shape[1])), axis=1)
    if variant.mlp:
        return variant.mlp(x, arrays)
    gate, up = variant.project(kl.GROUPS[2], x, arrays)
    return variant.project(kl.GROUPS[3], silu_gate(gate, up), arrays)[0]


def groups(out: Rows, shape: kl.Shape, budget: dict, *, names: tuple[str, ...]) -> None:
    _compare(out, "linears", shape, budget, [(name, *_variant(name)) for name in names], _linears)


def _compare(out: Rows, part: str, shape: kl.Shape, budget: dict, chosen: list, body: Callable) -> None:
    calls, results = {}, {}
    for name, variant, prepare in chosen:

        def compile_one(name=name, variant=variant, prepare=prepare):
            arrays = prepare(kl.make_arrays(shape, variant))
            options = pk.compiler_options() if variant.options else None
            step = jax.jit(kl.forward_backward(variant, body, shape), compiler_options=options)
            compiled = step.lower(arrays).compile()
            y, (dx, *_) = compiled(arrays)
            memory = compiled.memory_analysis()
            results[name] = {
                "f8_products": (compiled.as_text() or "").count("__cublas$lt$matmul$f8"),
                "weights_mb": sum(leaf.nbytes for leaf in jax.tree.leaves(arrays["w"])) / 1e6,
                "temporary_mb": getattr(memory, "temp_size_in_bytes", 0) / 1e6,
                "y": np.asarray(y[:256], np.float32),
                "dx": np.asarray(dx[:256], np.float32),
            }
            calls[name] = (compiled, [(arrays,)])

        out.attempt(f"{part} {name}", compile_one)
    times = {name: timing.p50_us for name, timing in time_calls(calls, **budget).items()}
    for name, us in times.items():
        like = results.get("frozen" if name in ("frozen", "fp8") else "ours")
        cosine = {key: _cosine(results[name][key], like[key]) for key in ("y", "dx")} if like else None
        numbers = {key: value for key, value in results[name].items() if key not in ("y", "dx")}
        over = us / times["frozen"] if "frozen" in times else None
        out.add(part=part, case=name, us=us, over_frozen_bf16=over, cosine_to_bf16=cosine, **numbers)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))


# --- what the parts cost -----------------------------------------------------------------------------------------


def products(out: Rows, shape: kl.Shape, budget: dict) -> None:
    """One product of each layout and precision; "kn" and "nk" tell how the weight lies, forward sums over K."""
    T = shape.tokens
    for K, N in ((shape.width, shape.width), (shape.width, shape.inner), (shape.inner, shape.width)):
        x = jax.random.normal(jax.random.key(0), (T, K), jnp.bfloat16)
        w = jax.random.normal(jax.random.key(1), (K, N), jnp.bfloat16)
        x8, w8 = x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn)
        w8_nk = w8.T + jnp.zeros((), jnp.float8_e4m3fn)

        def product(lhs, rhs, axis, precision=lax.Precision.DEFAULT):
            dims = (((1,), (axis,)), ((), ()))
            return lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=jnp.bfloat16)

        tiles = gemm_config(T, K // 2, N, 0, 128, transposed=True) or GemmConfig()
        own_product = partial(
            hopper_gemm.gemm, config=dataclasses.replace(tiles, tile_k=2 * tiles.tile_k), num_sms=pk_device.num_sms()
        )
        cases = {
            "bf16": (partial(product, axis=0), (x, w)),
            "fp8 nk": (partial(product, axis=1), (x8, w8_nk)),
            "fp8 nk exact sums": (partial(product, axis=1, precision=lax.Precision.HIGHEST), (x8, w8_nk)),
            "fp8 nk own": (own_product, (x8, w8_nk, jnp.ones(T), jnp.ones(N))),
            "fp8 kn": (partial(product, axis=0), (x8, w8)),
            "int8 nk": (
                lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32),
                (x8.astype(jnp.int8), w8_nk.astype(jnp.int8)),
            ),
        }
        _time_parts(out, "products", budget, cases, flops=2 * T * K * N, shape=[T, K, N])
        _time_parts(out, "products", budget, {"transpose fp8": (lambda w: w.T, (w8,))}, shape=[K, N])


def rounding(out: Rows, shape: kl.Shape, budget: dict) -> None:
    """Rounding by XLA and by the kernel; XLA's alone, and after the norm and the gate that it may fuse with."""
    from pallas_kernels.quantised.passes.pallas.rows import round_rows

    T = shape.tokens
    kernel = partial(round_rows, interpret=jax.default_backend() == "cpu")
    for K in (shape.width, shape.inner):
        x, u = (jax.random.normal(jax.random.key(i), (T, K), jnp.bfloat16) for i in range(2))
        f = jnp.ones(K)
        cases = {
            "xla": (rows.round_rows, (x,)),
            "kernel": (kernel, (x,)),
            "kernel with factor": (kernel, (x, f)),
            "gate": (silu_gate, (x, u)),
            "gate, xla": (lambda x, u: ((y := silu_gate(x, u)), rows.round_rows(y)), (x, u)),
            "gate, kernel": (lambda x, u: ((y := silu_gate(x, u)), kernel(y)), (x, u)),
        }
        _time_parts(out, "rounding", budget, cases, shape=[T, K])


def passes(out: Rows, shape: kl.Shape, budget: dict) -> None:
    """The kernels around products, next to a copy of as many bytes; and the bytes of a weight in another order."""
    from pallas_kernels.quantised.passes.pallas.finish import finish
    from pallas_kernels.quantised.passes.pallas.rows import round_rows

    T, interpret = shape.tokens, jax.default_backend() == "cpu"
    for N in (shape.width, shape.inner):
        sums = jax.random.normal(jax.random.key(0), (T, N), jnp.bfloat16)
        s, bank = jnp.ones((T, 64), jnp.bfloat16), jnp.ones((5, 16, N), jnp.bfloat16)
        scales, columns, owners = jnp.ones((T, 1)), jnp.ones(N), jnp.zeros(T // 64, jnp.int32)
        w8 = jnp.ones((N, shape.width), jnp.float8_e4m3fn)
        cases = {
            "round": (partial(round_rows, interpret=interpret), (sums, columns)),
            "finish": (partial(finish, interpret=interpret), (sums, scales, columns, s, bank, owners)),
            "scale by xla": (lambda x, a, b: (x.astype(jnp.float32) * a * b).astype(x.dtype), (sums, scales, columns)),
            "copy": (lambda x: -x, (sums,)),
            "transpose fp8": (lambda w: w.T, (w8,)),
        }
        _time_parts(out, "passes", budget, cases, shape=[T, N])


def _time_parts(out: Rows, part: str, budget: dict, cases: dict, flops: int = 0, **more: Any) -> None:
    calls = {}
    for name, (function, operands) in cases.items():

        def compile_one(name=name, function=function, operands=operands):
            options = pk.compiler_options() or None
            compiled = jax.jit(function, compiler_options=options).lower(*operands).compile()
            jax.block_until_ready(compiled(*operands))
            calls[name] = (compiled, [operands])

        out.attempt(f"{part} {name}", compile_one)
    quick = budget | {"round_s": budget["round_s"] / 4}
    for name, timing in time_calls(calls, **quick).items():
        rate = {"tflops": flops / timing.p50_us / 1e6} if flops else {}
        out.add(part=part, case=name, us=timing.p50_us, **rate, **more)


PARTS: dict[str, Callable[[Rows, kl.Shape, dict], None]] = {
    "check": check,
    "mlp": check_mlp,
    "passes": passes,
    "products": products,
    "rounding": rounding,
    "linears": partial(groups, names=("frozen", "fp8", "ours", "ours_fp8", "xla_fp8")),
}

if __name__ == "__main__":
    main()
