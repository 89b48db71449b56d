"""Device-memory traffic of a layer by hardware counters: ours against plain XLA.

    python -m benchmarks.kernel_bytes --out FOLDER     # starts ncu; skips everything where that is not on the path
    python -m benchmarks.kernel_bytes --out FOLDER --features 8192 --rank 64 --cases ours,A1,p0 ours,A4,p0

Counts every kernel of forward and backward of one linear layer, with four adapters and one, with warm caches and
default clocks. Programs are compiled before profiling starts, because XLA's autotuning is too slow under the profiler.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
TIME = "gpu__time_duration.sum"
CASES = ("frozen A1 p0", "xla_naive A1 p0.1", "ours A1 p0.1", "xla_wide A4 p0.1", "ours A4 p0.1")
SCALE = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}  # the profiler's units, to bytes
SCALE |= {"ns": 1e-3, "nsecond": 1e-3, "us": 1, "usecond": 1, "ms": 1e3, "msecond": 1e3}  # and to microseconds
CASE_S = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="folder of the run")
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--cases", nargs="+", default=CASES, help="form, adapters and rate of dropout of each")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all cases")
    parser.add_argument("--tiny", action="store_true", help="count nothing; for checking `kernels.py` on a CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_once(args.child, args.features, args.rank)
        return
    deadline = time.monotonic() + args.budget
    with (args.out / "bytes.jsonl").open("w") as file, tempfile.TemporaryDirectory() as programs:

        def add(**record) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        add(conditions=made_with())
        if reason := "--tiny counts nothing" if args.tiny else not_here():
            add(skipped=reason)
            print(f"skipped: {reason}")
            return
        add(planned=list(args.cases), group=f"{args.features} features, rank {args.rank}")
        for case in args.cases:
            sizes = {"features": args.features, "rank": args.rank, "tokens": 8192}
            counts = count(case, args.features, args.rank, programs, deadline)
            add(name=case, case=case, **sizes, **counts)
            summary = counts.get("error") or f"{counts['bytes'] / 1e6:8.1f} MB in {counts['kernels']} kernels"
            print(f"{case:20s} {summary}", flush=True)


def not_here() -> str | None:
    """Why counting is not possible on this machine; None if it is."""
    return None if shutil.which("ncu") else "the profiler ncu is not on the path"


def made_with() -> dict:
    """The conditions, from a child process, so that this one uses no GPU memory."""
    ask = "import json; from benchmarks.conditions import conditions; print(json.dumps(conditions()))"
    return json.loads(subprocess.check_output([sys.executable, "-c", ask], text=True, cwd=ROOT).splitlines()[-1])


def count(case: str, features: int, rank: int, programs: str, deadline: float) -> dict:
    """Runs one case, then again under the profiler, and sums its kernels."""
    child = [sys.executable, "-m", "benchmarks.kernel_bytes", "--child", case]
    child += ["--features", str(features), "--rank", str(rank)]
    profiler = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv"]
    profiler += ["--metrics", ",".join((*METRICS, TIME)), "--target-processes", "all"]
    kept = {"JAX_COMPILATION_CACHE_DIR": programs, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    # blocking launches keep XLA from starting kernels that spin until the host answers
    watched = os.environ | kept | {"CUDA_LAUNCH_BLOCKING": "1"}

    def limit() -> float:
        return max(0.0, min(CASE_S, deadline - time.monotonic()))

    try:
        subprocess.run(
            child, capture_output=True, text=True, timeout=limit(), env=os.environ | kept, check=True, cwd=ROOT
        )
        run = subprocess.run(profiler + child, capture_output=True, text=True, timeout=limit(), env=watched, cwd=ROOT)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as failed:
        if isinstance(failed, subprocess.TimeoutExpired) and time.monotonic() >= deadline:
            return {"error": "no time left"}
        return {"error": f"{failed} {str(failed.stderr)[-500:]}"}
    lines = run.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return {"error": (run.stdout + run.stderr)[-500:]}
    return added(list(csv.DictReader(io.StringIO("\n".join(lines[start:])))))


def added(rows: Sequence[dict[str, str]]) -> dict:
    """Sums over all kernels, and (name, bytes, microseconds) of each kernel in order."""
    kernels: dict[str, dict] = {}
    for row in rows:
        kernel = kernels.setdefault(row["ID"], {"name": row["Kernel Name"]} | dict.fromkeys((*METRICS, TIME), 0.0))
        if row["Metric Name"] in kernel:
            kernel[row["Metric Name"]] += float(row["Metric Value"].replace(",", "")) * SCALE[row["Metric Unit"]]
    total = {metric: sum(kernel[metric] for kernel in kernels.values()) for metric in METRICS}
    kernel_bytes = [
        [kernel["name"][:40], round(sum(kernel[metric] for metric in METRICS)), round(kernel[TIME], 1)]
        for kernel in kernels.values()
    ]
    return {"kernels": len(kernels), "bytes": sum(total.values()), **total, "each": kernel_bytes}


def run_once(case: str, features: int, rank: int) -> None:
    """Compiles and warms up, then makes one call under the profiler."""
    import jax

    from benchmarks import kernel_sections, oracles
    from pallas_kernels.arg_specs import LinearSpec, make_arrays

    kind, adapters, rate = case.replace(",", " ").split()
    spec = LinearSpec(
        tokens=8192, in_features=features, out_features=features, rank=rank, adapters=int(adapters[1:]),
        rate=float(rate[1:]),
    )  # fmt: skip
    layers = {
        "frozen": lambda x, a, b, w, arrays: oracles.frozen(x, w),
        "xla_naive": kernel_sections.naive, "xla_wide": kernel_sections.wide, "ours": kernel_sections.ours(None),
    }  # fmt: skip
    variant = kernel_sections.Variant(kind=kind, spec=spec, layer=layers[kind], parallel=False)
    arrays = dict(make_arrays(spec), key=jax.random.key(3))
    fn = jax.jit(kernel_sections.forward_backward(variant)).lower(arrays).compile()
    for _ in range(3):
        jax.block_until_ready(fn(arrays))
    cuda = ctypes.CDLL("libcudart.so")
    cuda.cudaProfilerStart()
    jax.block_until_ready(fn(arrays))
    cuda.cudaProfilerStop()


if __name__ == "__main__":
    main()
