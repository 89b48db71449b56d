"""Times the fused residual addition and norm, forward and backward, by XLA and by a kernel; checks both on the device.

python -m benchmarks.norm --out benchmarks/results/norm_h200_2026-11-24
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.norm import add_rms_norm
from pallas_kernels.tuning.timing import time_calls

SHAPES = ((8192, 4096), (8192, 5120), (6144, 8192))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for T, D in SHAPES:
        x, delta, ds, dy = (jax.random.normal(jax.random.key(i), (T, D), jnp.bfloat16) for i in range(4))
        weight = jnp.ones(D, jnp.bfloat16)
        run = {name: jax.jit(partial(both, name)) for name in ("xla", "pallas_triton")}
        outputs = {name: step(x, delta, weight, ds, dy) for name, step in run.items()}
        error = max(
            float(np.max(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32))))
            for a, b in zip(*outputs.values(), strict=True)
        )
        sets = [(x + i, delta, weight, ds, dy) for i in range(3)]
        times = {
            name: timing.p50_us for name, timing in time_calls({n: (step, sets) for n, step in run.items()}).items()
        }
        floor = 8 * T * D * 2 / 4.3e12  # 4 arrays in or out each way
        row = {"T": T, "D": D, "largest_difference": error, "floor_us": round(floor * 1e6, 1), "us": times}
        with (out / "norm.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def both(implementation: str, x, delta, weight, ds, dy):
    (s, y), pullback = jax.vjp(
        lambda x, d: add_rms_norm(x, d, weight, eps=1e-5, implementation=implementation), x, delta
    )
    return s, y, pullback((ds, dy))[0]


if __name__ == "__main__":
    main()
