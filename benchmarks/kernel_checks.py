"""Correctness of every backend on the attached device: values, gradients, isolation, determinism, unsupported calls.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import kernel_calls
from benchmarks.kernel_calls import ANY, HOPPER, TOLERANCE, draw, draw_case, owners
from pallas_kernels.device import is_hopper

MOSAIC, TRITON, XLA = BACKENDS = ("pallas_mosaic_gpu", "pallas_triton", "xla")
LORA = {"adapters": 4, "ranks": (16,), "widths": (512,), "rate": 0.1}
QKV = {"ranks": (16, 16, 16), "widths": (1024, 256, 256)}
CASES = {  # differences from LORA
    "bf16 A4 r16 p0": {"rate": 0.0},
    "bf16 A4 r16 p.1": {},
    "bf16 A4 r24 p.3": {"ranks": (24,), "rate": 0.3},
    "bf16 A4 r64 p0": {"ranks": (64,), "widths": (768,), "rate": 0.0},
    "bf16 A4 r64 p.1": {"ranks": (64,), "widths": (768,)},
    "bf16 qkv r16 p0": {**QKV, "rate": 0.0},
    "bf16 qkv r16 p.1": QKV,
    "bf16 gate,None r8": {"ranks": (8, None), "widths": (512, 512)},
    "bf16 A17 r16": {"adapters": 17},
    "f16 A2 r16 p.1": {"adapters": 2, "dtype": "float16"},
    "f32 A3 r16 p.1": {"adapters": 3, "dtype": "float32"},
    "bf16 odd 1000->300": {"adapters": 3, "widths": (300,), "num_in": 1000},
    "bf16 bias p.1": {"bias": True},
    "bf16 one adapter p0": {"adapters": 1, "rate": 0.0, "single": True},
    "bf16 one adapter p.1": {"adapters": 1, "single": True},
    "bf16 r160": {"adapters": 2, "ranks": (160,)},
    "bf16 r256 p0": {"adapters": 2, "ranks": (256,), "rate": 0.0, "tile": 64},
    "bf16 r256 p.1": {"adapters": 2, "ranks": (256,), "tile": 64},
    "bf16 r16,256 p0": {"adapters": 2, "ranks": (256,), "own_ranks": (16, 256), "rate": 0.0},
    "bf16 r16,40,160 p.1": {"adapters": 3, "ranks": (160,), "own_ranks": (16, 40, 160), "tile": 64},
}
# Unsupported cases, with a part of the expected reason.
REFUSED = {
    (MOSAIC, "f32 A3 r16 p.1"): "x is float32",
    (MOSAIC, "bf16 odd 1000->300"): "1000 in features: it needs a multiple of 128",
}
ISOLATION = ("bf16 A4 r16 p0", "bf16 A4 r16 p.1", "bf16 A4 r64 p0", "bf16 A4 r64 p.1")
SICK, WELL = 2, 1  # the adapter with NaN, and the one whose neighbours change
RANDOM = {  # how to draw a call, the seeds, and the backends that support all draws
    "any": (ANY, (1, 2, 3, 4), (TRITON, XLA)),
    "hopper": (HOPPER, (0, 1, 4, 7), (MOSAIC,)),
}
LARGER = {  # larger than in the tests, which run in interpret mode
    "any": {"most_tiles": 24, "features": lambda random: int(random.integers(1, 1500))},
    "hopper": {
        "tiles": (64, 128, 192), "most_tiles": 24, "features": lambda random: 128 * int(random.integers(1, 9)),
    },
}  # fmt: skip
# interpreted kernels compile slowly and run once
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Call(NamedTuple):
    """A call of the op and the incoming gradients."""

    arguments: dict[str, Any]
    dys: list[jax.Array]


def run(recorder, tiny: bool) -> None:
    """Checks every case with every backend; programs and reference results are computed in parallel."""
    for backend in BACKENDS:
        recorder.plan(backend, (name for name in names() if name.startswith(f"{backend} ")))
    calls = {name: call(name, tiny) for name in dict.fromkeys(name for _, name in pairs())}
    with ThreadPoolExecutor(2 if tiny else 14) as compilers, ThreadPoolExecutor(1) as host:  # numpy has threads itself
        wanted = {name: host.submit(kernel_calls.formula, *arguments) for name, arguments in calls.items()}
        jobs = {pair: _compile(compilers, pair[0], calls[pair[1]], QUICK if tiny else {}) for pair in pairs()}
        for name, pair, work in _checks(calls, wanted):
            recorder.attempt(name, partial(_check, recorder, name, jobs[pair], expected_reason(*pair), work))


def names() -> list[str]:
    """Names of all records."""
    return [name for name, _, _ in _checks({}, {})]


def pairs() -> list[tuple[str, str]]:
    """Every (backend, call) to compile."""
    of_cases = [(backend, name) for backend in BACKENDS for name in CASES]
    return of_cases + [
        (backend, f"random {kind} {seed}")
        for kind, (_, seeds, served) in RANDOM.items()
        for backend in served
        for seed in seeds
    ]


def call(name: str, tiny: bool) -> Call:
    if name in CASES:
        sizes = {"rows": 256, "num_in": 256, "tile": 32} if tiny else {"rows": 2048, "num_in": 1024, "tile": 128}
        return Call(*draw_case(**(sizes | LORA | CASES[name])))
    _, kind, seed = name.split()
    return Call(*draw(int(seed), **(RANDOM[kind][0] | ({} if tiny else LARGER[kind]))))


def expected_reason(backend: str, name: str) -> str | None:
    """A part of the reason why a backend does not support a call on the attached device; None if it must support it."""
    if backend == MOSAIC and not is_hopper():
        return "it needs a Hopper GPU"
    return REFUSED.get((backend, name))


def _compile(pool: ThreadPoolExecutor, backend: str, call: Call, options: dict[str, Any]) -> Future | str:
    """Starts a compilation; returns the reason as text if the call is not supported."""
    try:
        lowered = jax.jit(partial(kernel_calls.gradients, backend)).lower(*call)
        return pool.submit(lowered.compile, compiler_options=options)
    except NotImplementedError as refused:
        return str(refused)
    except Exception as broken:  # the other programs still count
        failed = Future()
        failed.set_exception(broken)
        return failed


def _checks(calls: dict[str, Call], wanted: dict[str, Future]):
    """Yields (name of the record, program, check)."""
    for backend, name in pairs():
        yield f"{backend} {name}", (backend, name), lambda run, n=name: values(run, calls[n], wanted[n].result())
    for backend in BACKENDS:
        for name in ISOLATION:
            yield f"{backend} isolation {name}", (backend, name), lambda run, n=name: isolation(run, calls[n])
            yield f"{backend} company {name}", (backend, name), lambda run, n=name: company(run, calls[n])


def _check(recorder, name: str, job: Future | str, refused: str | None, work: Callable) -> None:
    if isinstance(job, str):
        as_expected = refused is not None and refused in job
        detail = f"refused{'' if as_expected else ' AGAINST EXPECTATION'}: {job[-90:]}"
        recorder.add(name=name, ok=as_expected, detail=detail)
    elif refused is not None:
        recorder.add(name=name, ok=False, detail=f"NOT REFUSED, expected: {refused}")
    else:
        ok, detail = work(job.result())
        recorder.add(name=name, ok=bool(ok), detail=detail)


def values(run: Callable, call: Call, want) -> tuple[bool, str]:
    """Compares results with the formula, and two runs with each other."""
    got, again = run(*call), run(*call)
    errors = kernel_calls.errors(got, want)
    worst, repeats = max(errors), all(_equal(jax.tree.leaves(got), jax.tree.leaves(again)))
    detail = f"worst {worst:.1e} of {' '.join(f'{e:.0e}' for e in errors)}, runs {'equal' if repeats else 'DIFFER'}"
    return worst < TOLERANCE[str(call.arguments["x"].dtype)] and repeats, detail


def isolation(run: Callable, call: Call) -> tuple[bool, str]:
    """Checks that NaN or infinity of one adapter, or in padding, changes no bit of the others."""
    clean, owner, every = run(*call), owners(call.arguments), np.arange(len(call.arguments["scale"]))
    checks = {}
    for what, adapter, value in (("NaN", SICK, np.nan), ("Inf", SICK, np.inf), ("NaN in padding", -1, np.nan)):
        got = run(*_with_bad_value(call, adapter, value))
        others = owner != adapter, every != adapter
        own_parts = _select(got, owner == adapter, every == adapter)
        arrived = not any(np.isfinite(part.astype(np.float32)).any() for part in own_parts)
        checks[what] = [*_equal(_select(got, *others), _select(clean, *others)), arrived]
    return _all_true(checks), f"y, dx, dA, dB of the others unchanged, its own not finite: {checks}"


def _with_bad_value(call: Call, adapter: int, value: float) -> Call:
    rows = jnp.asarray(owners(call.arguments) == adapter)[:, None]

    def of_rows(values):
        return jnp.where(rows, jnp.asarray(value, values.dtype), values)

    changed = {"x": of_rows(call.arguments["x"])}
    for name in ("as_", "bs") if adapter >= 0 else ():
        changed[name] = [bank.at[adapter].set(value) for bank in call.arguments[name]]
    return Call(call.arguments | changed, [of_rows(dy) for dy in call.dys])


def company(run: Callable, call: Call) -> tuple[bool, str]:
    """Checks that the adapters of other tiles change no bit of an adapter's results."""
    table, rows = np.asarray(call.arguments["tile_adapter"]), owners(call.arguments) == WELL
    adapters = np.arange(len(call.arguments["scale"])) == WELL
    clean, mine = run(*call), table == WELL
    renamed = np.where(mine, WELL, np.array([3, 2, WELL, -1, 0])[table + 1])
    tables = {"renamed": renamed, "one adapter": np.where(mine, WELL, 3), "padding": np.where(mine, WELL, -1)}
    checks = {}
    for what, other in tables.items():
        got = run(call.arguments | {"tile_adapter": jnp.asarray(other, jnp.int32)}, call.dys)
        moved = not all(_equal([np.asarray(got[0][0])[~rows]], [np.asarray(clean[0][0])[~rows]]))
        checks[what] = [*_equal(_select(got, rows, adapters), _select(clean, rows, adapters)), moved]
    return _all_true(checks), f"y, dx, dA, dB of one adapter unchanged, other rows changed: {checks}"


def _select(results, rows: np.ndarray, adapters: np.ndarray) -> list[np.ndarray]:
    """Selects some rows and adapters of ys, dx, dAs and dBs."""
    ys, dx, das, dbs = results
    return [np.asarray(part)[rows] for part in (*ys, dx)] + [np.asarray(part)[adapters] for part in (*das, *dbs)]


def _equal(some, others) -> list[bool]:
    """Whether each array is bitwise equal."""
    return [np.array_equal(_bits(g), _bits(h)) for g, h in zip(some, others, strict=True)]


def _all_true(checks: dict[str, list[bool]]) -> bool:
    return all(all(equal) for equal in checks.values())


def _bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")
