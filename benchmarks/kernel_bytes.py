"""Bytes that a layer moves through device memory, read by the card's own counters: ours against the plain form.

    python benchmarks/kernel_bytes.py --out results/     # starts ncu, which must be on the path

Forward and backward of one linear layer, four adapters and one, as one program each; every kernel of one call is
counted with warm caches and the clocks as they are. Programs are compiled before the profiler looks on: it makes
launches wait, which XLA's own timing of candidate kernels does not survive in reasonable time.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
CASES = ("frozen A1 p0", "xla_naive A1 p0.1", "ours A1 p0.1", "xla_wide A4 p0.1", "ours A4 p0.1")
CASE_S = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--child", choices=CASES)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.child:
        run_once(args.child, args.features)
        return
    with (args.out / "kernels_bytes.jsonl").open("w") as file, tempfile.TemporaryDirectory() as programs:
        file.write(json.dumps({"conditions": made_with()}) + "\n")
        for case in CASES:
            record = {"case": case, "features": args.features, "tokens": 8192, **count(case, args.features, programs)}
            file.write(json.dumps(record) + "\n")
            file.flush()
            said = record.get("error") or f"{record['bytes'] / 1e6:8.1f} MB in {record['kernels']} kernels"
            print(f"{case:20s} {said}", flush=True)


def made_with() -> dict:
    """The conditions, asked for in a process of its own: one that holds the GPU would leave the cases no memory."""
    ask = "import json; from benchmarks.conditions import conditions; print(json.dumps(conditions()))"
    return json.loads(subprocess.check_output([sys.executable, "-c", ask], text=True, cwd=ROOT).splitlines()[-1])


def count(case: str, features: int, programs: str) -> dict:
    """Runs one case, then once more under the profiler, and adds up its kernels."""
    child = [sys.executable, __file__, "--child", case, "--features", str(features)]
    profiler = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv"]
    profiler += ["--metrics", ",".join(METRICS), "--target-processes", "all"]
    kept = {"JAX_COMPILATION_CACHE_DIR": programs, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    # blocking launches, if said so, keep XLA from starting kernels that spin until the host answers
    watched = os.environ | kept | {"CUDA_LAUNCH_BLOCKING": "1"}
    try:
        subprocess.run(child, capture_output=True, text=True, timeout=CASE_S, env=os.environ | kept, check=True)
        run = subprocess.run(profiler + child, capture_output=True, text=True, timeout=CASE_S, env=watched)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as failed:
        return {"error": f"{failed} {str(failed.stderr)[-500:]}"}
    lines = run.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return {"error": (run.stdout + run.stderr)[-500:]}
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    scale = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    total = dict.fromkeys(METRICS, 0.0)
    for row in rows:
        if row["Metric Name"] in total:
            total[row["Metric Name"]] += float(row["Metric Value"].replace(",", "")) * scale[row["Metric Unit"]]
    return {"kernels": len({row["ID"] for row in rows}), "bytes": sum(total.values()), **total}


def run_once(case: str, features: int) -> None:
    """Compiles and warms up unseen, then one call between the profiler's start and stop."""
    import jax

    from benchmarks import kernel_sections, oracles
    from pallas_kernels.arg_specs import LinearSpec, make_arrays

    kind, adapters, rate = case.split()
    spec = LinearSpec(
        tokens=8192, in_features=features, out_features=features, adapters=int(adapters[1:]), rate=float(rate[1:])
    )
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
