"""Benchmarks LoRA linear layers: correctness, whole ops, decoder layers, bytes, tile sizes, kernel lists.

    python -m benchmarks.kernels --out FOLDER     # everything: the tables of ops, layers and bytes
    python -m benchmarks.kernels --sections check,ops --budget 700 --out FOLDER

`ops` times all forms at 8192 tokens, `rows` at 2048, 4096 and 16384; `--only` divides them between GPUs. `bytes` needs
the profiler ncu and is skipped without it.
Every section runs in its own process with a deadline, so a kernel that hangs or crashes affects only its section.
Records
are JSON lines, one file per section: conditions, planned rows, results. The tables at the end are printed from them,
and `kernel_report.py` writes them as CSV files and a plot. A planned row without a result fails the command.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECTIONS = {
    "check": 120,
    "profile": 90,
    "layer": 500,
    "ops": 480,
    "rows": 1440,
    "sweep": 150,
    "products": 80,
    "bytes": 90,
}  # approximate seconds on an H200; the budget is split in proportion
MAY_FAIL = ("sweep", "products")  # their candidates may be too large for the device


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument(
        "--budget", type=float, default=3600,
        help="seconds for everything (default %(default)d): all sections take one H200 about 50 minutes, 32 of them for"
        " the 240 sizes of ops and rows",
    )  # fmt: skip
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the run")
    parser.add_argument(
        "--only", nargs="+", default=[],
        help="kernels of the sweep (mosaic_down), parts of layer (32B), else beginnings of shapes (16384x)",
    )  # fmt: skip
    parser.add_argument(
        "--variants", nargs="+", default=[], help="variants of ops, rows and layer: frozen pallas_mosaic_gpu"
    )
    parser.add_argument("--matching", default="", help="rows of ops and rows whose names have it, a regular expression")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: checks this script on a CPU")
    parser.add_argument("--child", choices=tuple(SECTIONS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        from benchmarks import kernel_sections

        chosen = {"only": args.only, "kinds": args.variants, "matching": args.matching}
        kernel_sections.run(args.child, args.out, budget_s=args.budget, tiny=args.tiny, **chosen)
        return 0
    started = time.monotonic()
    sections = args.sections.split(",")
    broken = []
    for i, section in enumerate(sections):
        left = args.budget - (time.monotonic() - started)
        shares = [SECTIONS[name] for name in sections[i:]]
        if not run_section(section, args, left * shares[0] / sum(shares)):
            broken.append(section)
    bad = report(args.out, sections)
    from benchmarks import kernel_report

    files = [args.out / f"{section}.jsonl" for section in sections]
    kernel_report.write([file for file in files if file.exists()], args.out / "kernels")
    lost = [line for section in sections for line in missing(section, lines_of(args.out, section))]
    if lost:
        print("\nMISSING: no time was left for", *lost, sep="\n  ")
    if broken or bad or lost:
        print(f"\nFAILED: sections {', '.join(broken) or 'none'}; {bad} rows are BAD or raised")
    return int(bool(broken or bad or lost))


def run_section(section: str, args: argparse.Namespace, budget_s: float) -> bool:
    """Runs one section in a child process and kills it at its deadline; True if it succeeded.

    Records of an earlier run are deleted first.
    """
    (args.out / f"{section}.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.kernel_bytes"]  # starts its own processes
    if section != "bytes":
        command = [sys.executable, "-m", "benchmarks.kernels", "--child", section]
        command += ["--only", *args.only] if args.only else []
        command += ["--variants", *args.variants] if args.variants else []
        command += ["--matching", args.matching] if args.matching else []
    command += ["--out", str(args.out.absolute()), "--budget", f"{budget_s:.0f}"]
    flags = os.environ.get("XLA_FLAGS", "")
    if not args.tiny:
        if section in ("sweep", "products", "profile"):
            flags += " --xla_gpu_enable_command_buffer="  # graphs would overlap kernels of one module
        if section in (
            "check",
            "sweep",
            "products",
        ):  # they only time our kernels, so autotuning of XLA's products is turned off
            flags += " --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    environment = dict(os.environ, XLA_FLAGS=flags, XLA_PYTHON_CLIENT_PREALLOCATE="false", PYTHONUNBUFFERED="1")
    print(f"== {section}: {budget_s:.0f} s", flush=True)
    child = subprocess.Popen(command + (["--tiny"] if args.tiny else []), env=environment, cwd=ROOT)
    try:
        child.wait(timeout=budget_s + 15)
    except subprocess.TimeoutExpired:
        print(f"== {section}: stopped at its deadline", flush=True)
        child.kill()
        child.wait()
        return False
    if child.returncode:
        print(f"== {section}: failed with exit status {child.returncode}", flush=True)
    return child.returncode == 0


def lines_of(out: pathlib.Path, section: str) -> list[dict]:
    path = out / f"{section}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def missing(section: str, lines: Sequence[dict]) -> list[str]:
    """Planned rows without results, one line per group of rows (a shape, a decoder layer).

    Without this check, a partial table could be taken for a complete one.
    """
    known = {line["name"] for line in lines if "name" in line and line.get("error") != "no time left"}
    lost = []
    for line in lines:
        names = [name for name in line.get("planned", ()) if name not in known]
        if names:
            which = "all" if len(names) == len(line["planned"]) else ", ".join(names)
            lost.append(f"{section}, {line['group']}: {len(names)} of {len(line['planned'])} rows: {which}")
    return lost


def report(out: pathlib.Path, sections: list[str]) -> int:
    """Prints the tables, shortest last; returns the number of failed checks and rows."""
    bad = 0
    order = ("sweep", "products", "profile", "check", "ops", "rows", "layer", "bytes")
    for section in sorted(sections, key=order.index):
        lines = [line for line in lines_of(out, section) if not {"conditions", "planned"} & line.keys()]
        if skipped := [line["skipped"] for line in lines if "skipped" in line]:
            print(f"\n== {section}: skipped, {skipped[0]}")
            continue
        rows = [line for line in lines if line.get("error") != "no time left"]
        failed = [row for row in rows if "error" in row]
        print(f"\n== {section}: {len(rows)} records, {len(failed)} failed")
        for row in failed[:12]:
            print("  FAILED", row.get("name"), row["error"][:220])
        PRINTERS[section]([row for row in rows if "error" not in row])
        if section not in MAY_FAIL:
            bad += sum("error" in row or not row.get("ok", True) for row in rows)
    return bad


def print_check(rows: list[dict]) -> None:
    for row in rows:
        mark = "ok " if row["ok"] else "BAD"
        print(f"  {mark} {row['name']:44s} {row['detail']}")


def print_profile(rows: list[dict]) -> None:
    for row in rows:
        print(f"  {row['name']} ({sum(us for _, us in row['kernels']):.0f} us)")
        for name, us in row["kernels"]:
            print(f"      {us:8.1f}  {name}")


def print_sweep(rows: list[dict]) -> None:
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["spec"], row["kernel"]), []).append(row)
    for (spec, kernel), members in groups.items():
        best = sorted(members, key=lambda row: row["p50_us"])
        text = "; ".join(f"{row['p50_us']:.1f} {row['config']}" for row in best[:2])
        print(f"  {spec:38s} {kernel:11s} {text} ... {best[-1]['p50_us']:.1f}")


def print_ops(rows: list[dict]) -> None:
    frozen = {row["shape"]: row["p50_us"] for row in rows if row["variant"] == "frozen"}
    for row in rows:
        ratio = row["p50_us"] / frozen.get(row["shape"], float("nan"))
        print(
            f"  {row['shape']:20s} {row['variant']:18s} A{row['adapters']:<2d} r{row['rank']} p{row['rate']:<4g}"
            f" {row['p50_us']:8.1f} us [{row['p20_us']:.0f}, {row['p80_us']:.0f}]  {ratio:.3f} of frozen"
        )


def print_layer(rows: list[dict]) -> None:
    for row in rows:
        same = [r["p50_us"] for r in rows if r["part"] == row["part"] and r["variant"] == "frozen"]
        print(
            f"  {row['part']:18s} {row['variant']:16s} A{row['adapters']:<2d} p{row['rate']:<4g}"
            f" {row['p50_us']:9.1f} us [{row['p20_us']:.0f}, {row['p80_us']:.0f}]"
            f"  {row['p50_us'] / (same or [1])[0]:.3f} of frozen"
        )


def print_bytes(rows: list[dict]) -> None:
    for row in rows:
        print(f"  {row['case']:20s} {row['bytes'] / 1e6:8.1f} MB in {row['kernels']} kernels")


PRINTERS = {
    "check": print_check, "ops": print_ops, "rows": print_ops, "profile": print_profile, "sweep": print_sweep,
    "products": print_sweep,
    "layer": print_layer, "bytes": print_bytes,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
