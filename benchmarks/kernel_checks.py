"""Correctness of every backend on the attached device: values, gradients, isolation, determinism.

T packed tokens · K in features · N out features · R padded rank · A adapters
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk

# relative error of the whole array against float32; bfloat16 has 8 bits, S and dS are rounded to it once more
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
ISOLATION = "bf16 A4 r16 p.1"  # the case that is poisoned


def run(recorder, tiny: bool) -> None:
    """Checks every case with every backend that takes it; all programs compile first, side by side."""
    backends = ("pallas_triton",) if tiny else ("pallas_mosaic_gpu", "pallas_triton")
    inputs = {name: draw(case) for name, case in cases(tiny).items()}
    for backend in backends:
        recorder.plan(backend, (f"{backend} {name}" for name in (*inputs, "isolation")))
    wide = {name: jax.tree.map(_float32, value) for name, value in inputs.items()}
    with ThreadPoolExecutor(2 if tiny else 14) as pool:
        wanted = {name: _compile(pool, value, "xla") for name, value in wide.items()}
        for backend in backends:
            jobs = {name: _compile(pool, value, backend) for name, value in inputs.items()}
            for name, job in jobs.items():
                recorder.attempt(
                    f"{backend} {name}",
                    lambda b=backend, n=name, j=job: check(recorder, b, n, cases(tiny)[n], j, wanted[n], inputs, wide),
                )
            job = jobs[ISOLATION]
            recorder.attempt(
                f"{backend} isolation", lambda b=backend, j=job: isolation(recorder, b, cases(tiny)[ISOLATION], j)
            )


def _compile(pool, inputs: dict, backend: str):
    """Starts a compilation; a refusal comes back as the text of its reason."""
    try:
        return pool.submit(jax.jit(lambda inputs: gradients(inputs, backend)).lower(inputs).compile)
    except NotImplementedError as refused:
        return str(refused)


def cases(tiny: bool) -> dict[str, dict]:
    t, k = (256, 256) if tiny else (2048, 1024)
    every = {
        "bf16 A4 r16 p0": {"adapters": 4, "ranks": (16,), "widths": (512,), "rate": 0.0},
        "bf16 A4 r16 p.1": {"adapters": 4, "ranks": (16,), "widths": (512,), "rate": 0.1},
        "bf16 A4 r24 p.3": {"adapters": 4, "ranks": (24,), "widths": (512,), "rate": 0.3},
        "bf16 A4 r64 p.1": {"adapters": 4, "ranks": (64,), "widths": (768,), "rate": 0.1},
        "bf16 qkv r16 p.1": {"adapters": 4, "ranks": (16, 16, 16), "widths": (1024, 256, 256), "rate": 0.1},
        "bf16 gate,None r8": {"adapters": 4, "ranks": (8, None), "widths": (512, 512), "rate": 0.1},
        "bf16 A17 r16": {"adapters": 17, "ranks": (16,), "widths": (512,), "rate": 0.1},
        "f16 A2 r16 p.1": {"adapters": 2, "ranks": (16,), "widths": (512,), "rate": 0.1, "dtype": "float16"},
        "f32 A3 r16 p.1": {"adapters": 3, "ranks": (16,), "widths": (512,), "rate": 0.1, "dtype": "float32"},
        "bf16 odd 1000->300": {"adapters": 3, "ranks": (16,), "widths": (300,), "rate": 0.1, "k": 1000},
        "bf16 bias p.1": {"adapters": 4, "ranks": (16,), "widths": (512,), "rate": 0.1, "bias": True},
        "bf16 one adapter p0": {"adapters": 1, "ranks": (16,), "widths": (512,), "rate": 0.0, "single": True},
        "bf16 one adapter p.1": {"adapters": 1, "ranks": (16,), "widths": (512,), "rate": 0.1, "single": True},
        "bf16 r160": {"adapters": 2, "ranks": (160,), "widths": (512,), "rate": 0.1},
    }
    shared = {"t": t, "k": k, "tile": 32 if tiny else 128, "dtype": "bfloat16"}
    return {name: {**shared, **case} for name, case in every.items()}


def check(recorder, backend: str, name: str, case: dict, job, wanted, inputs: dict, wide: dict) -> None:
    """Compares with the same op in float32 through XLA, and two runs with each other."""
    if isinstance(job, str):
        recorder.add(name=f"{backend} {name}", ok=True, detail=f"refused: {job[-90:]}")
        return
    run_once = job.result()
    got, again = run_once(inputs[name]), run_once(inputs[name])
    want = wanted.result()(wide[name])
    errors = [relative(g, w) for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True)
    same = all(np.array_equal(_bits(g), _bits(h)) for g, h in pairs)
    worst = max(errors)
    ok = bool(worst < TOLERANCE[case["dtype"]] and same)
    detail = f"worst {worst:.1e} of {' '.join(f'{e:.0e}' for e in errors)}, runs {'equal' if same else 'DIFFER'}"
    recorder.add(name=f"{backend} {name}", ok=ok, detail=detail)


def isolation(recorder, backend: str, case: dict, job) -> None:
    """A NaN in the rows, A, B or incoming gradient of one adapter leaves the others bitwise as they were."""
    run_once = job.result()
    clean = draw(case)
    reference = run_once(clean)
    sick = 2
    table = np.asarray(clean["tile_adapter"])
    rows = np.repeat(table, case["t"] // table.shape[0]) == sick
    poisoned = dict(clean)
    poisoned["x"] = jnp.where(jnp.asarray(rows)[:, None], jnp.nan, clean["x"])
    poisoned["dys"] = [jnp.where(jnp.asarray(rows)[:, None], jnp.nan, dy) for dy in clean["dys"]]
    poisoned["as_"] = [a.at[sick].set(jnp.nan) for a in clean["as_"]]
    poisoned["bs"] = [b.at[sick].set(jnp.nan) for b in clean["bs"]]
    got = run_once(poisoned)
    others = np.array([k for k in range(case["adapters"]) if k != sick])
    pick = [lambda ys: ys[0][~rows], lambda dx: dx[~rows], lambda das: das[0][others], lambda dbs: dbs[0][others]]
    same = [bool(np.array_equal(_bits(p(g)), _bits(p(w)))) for p, g, w in zip(pick, got, reference, strict=True)]
    sick_is_nan = bool(np.isnan(np.asarray(got[2][0][sick], np.float32)).all())
    detail = f"y, dx, dA, dB of the others unchanged: {same}; its own dA is NaN: {sick_is_nan}"
    recorder.add(name=f"{backend} isolation", ok=all(same) and sick_is_nan, detail=detail)


def draw(case: dict) -> dict:
    """Inputs of a call: mixed tiles, among them padding; rates differ between adapters."""
    random = np.random.default_rng(0)
    dtype = jnp.dtype(case["dtype"])

    def normal(*shape, scale=1.0):
        return jnp.asarray(random.normal(size=shape) * scale, jnp.float32).astype(dtype)

    t, k, adapters = case["t"], case["k"], case["adapters"]
    num_tiles = t // case["tile"]
    table = np.concatenate([[-1], np.arange(num_tiles - 1) % adapters]).astype(np.int32)
    random.shuffle(table)
    dropout = None
    if case["rate"]:
        dropout = pk.Dropout(
            rate=jnp.asarray(
                case["rate"] * (np.arange(adapters) % 3 if adapters > 1 else np.full(1, 2)) / 2, jnp.float32
            ),
            key=jnp.arange(adapters, dtype=jnp.uint32),
            row_key=jnp.asarray(random.integers(0, 2**32, t), jnp.uint32),
        )
    return {
        "x": normal(t, k),
        "ws": [normal(k, n, scale=k**-0.5) for n in case["widths"]],
        "as_": [None if r is None else normal(adapters, k, r, scale=k**-0.5) for r in case["ranks"]],
        "bs": [
            None if r is None else normal(adapters, r, n, scale=r**-0.5)
            for r, n in zip(case["ranks"], case["widths"], strict=True)
        ],
        "dys": [normal(t, n) for n in case["widths"]],
        "biases": [normal(n) if case.get("bias") else None for n in case["widths"]],
        "tile_adapter": None if case.get("single") else jnp.asarray(table),  # None: the op of one adapter
        "scale": jnp.linspace(0.5, 2.0, adapters),
        "dropout": dropout,
    }


def gradients(inputs: dict, backend: str):
    """ys, dx, dAs, dBs."""

    def layer(x, as_, bs):
        if inputs["tile_adapter"] is None:
            rest = {"scale": inputs["scale"][0], "dropout": inputs["dropout"], "implementation": backend}
            return (pk.lora_linear(x, inputs["ws"][0], as_[0][0], bs[0][0], **rest),)
        return pk.multi_lora_linears(
            x, inputs["ws"], as_, bs, tile_adapter=inputs["tile_adapter"], scale=inputs["scale"],
            dropout=inputs["dropout"], biases=inputs["biases"], implementation=backend,
        )  # fmt: skip

    ys, vjp = jax.vjp(layer, inputs["x"], inputs["as_"], inputs["bs"])
    return ys, *vjp(tuple(inputs["dys"]))


def relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def _float32(leaf):
    return leaf.astype(jnp.float32) if leaf.dtype in (jnp.bfloat16, jnp.float16) else leaf


def _bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(np.uint8) if array.dtype.itemsize == 1 else array.view(f"u{array.dtype.itemsize}")
