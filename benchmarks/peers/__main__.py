"""Ours, the frozen floor and every peer on one card, in one run.

    python -m benchmarks.peers --batch 8 --out benchmarks/results/peers_h200_DATE [--lorafusion CHECKOUT]
    python -m benchmarks.peers --batch 8 16 32 64 --variants packed lorafusion --out …

Each program runs in a process of its own, one after another. `--torch` names a Python with torch, transformers, peft
and liger-kernel when this one has none. Rows: peers.jsonl and end_to_end.jsonl; then peers.csv and peers.png.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import command_line
from benchmarks.measured_code import write_measured
from benchmarks.peers.report import report
from benchmarks.workloads import WORKLOADS

PEERS = (
    "packed", "packed_full", "compiled", "compiled_full", "lorafusion", "lorafusion_full", "default", "checkpointed",
    "nf4",
)  # fmt: skip
OURS = ("frozen", "ours", "ours_fp8", "ours_nf4", "single", "single_sizes")


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", choices=("8b", "70b", "tiny"), default="8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try")
    parser.add_argument("--workload", choices=WORKLOADS, default="mix")
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--steps", type=int, default=12, help="timed optimizer steps of a peer")
    parser.add_argument("--slots", type=int, default=40, help="timed microbatches of ours")
    parser.add_argument("--variants", nargs="+", choices=(*OURS, *PEERS), default=[*OURS, *PEERS])
    parser.add_argument("--lorafusion", type=Path, help="a checkout of LoRAFusion; without it its rows are left out")
    parser.add_argument("--torch", default=sys.executable, help="a Python with torch, transformers and peft")
    parser.add_argument("--device", default="cuda", help="of the peers")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no program starts after this long")
    options = parser.parse_args()
    write_measured(options.out)
    began, failed = time.perf_counter(), 0
    for command in commands(options):
        if time.perf_counter() - began > options.seconds:
            print("no time left for", *command[2:], flush=True)
            continue
        failed += bool(subprocess.run(command, check=False).returncode)
    report(options.out)
    return int(failed > 0)


def commands(options: argparse.Namespace) -> Iterator[list[str]]:
    """One command line per program and batch size, ours first."""
    model = ["--model", options.model, *(["--layers", str(options.layers)] if options.layers else [])]
    ours = [variant for variant in options.variants if variant in OURS]
    for batch in options.batch:
        common = [*model, "--batch", str(batch), "--out", str(options.out)]
        if ours:
            yield [
                sys.executable, "-m", "benchmarks.end_to_end", *common, "--workloads", options.workload,
                "--slots", str(options.slots), "--no-profile", "--variants", *ours,
            ]  # fmt: skip
        for variant in options.variants:
            if variant in OURS or (variant.startswith("lorafusion") and options.lorafusion is None):
                continue
            yield [
                options.torch, "-m", "benchmarks.peers.torch_peers", *common, "--workload", options.workload,
                "--variant", variant, "--steps", str(max(options.steps * 8 // batch, 4)), "--device", options.device,
                *(["--lorafusion", str(options.lorafusion)] if options.lorafusion else []),
            ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
