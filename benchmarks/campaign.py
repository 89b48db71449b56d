"""Runs every GPU benchmark in parallel on the GPUs of one host, within a time limit.

    python -m benchmarks.campaign --seconds 590 --out results
    python -m benchmarks.campaign --seconds 590 --out results --cells 70b 8b_data4 layer
    python -m benchmarks.campaign --out results --cells 8b_data4 8b_data1 8b_data1.2 8b_data1.3
    python -m benchmarks.campaign --list

A cell is one process with its own GPUs. Cells start in the order of the list (or of `--cells`) when enough GPUs are
free and enough time is left for them. A cell that exceeds its limit is killed. A name with a number, such as
8b_data1.2, repeats a cell, because GPUs of one host differ. The output is complete after every cell: campaign.jsonl
with one row per measurement, and campaign.tar.gz with the files and logs of the cells.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLACK = 1.6  # limit of a cell, relative to its known time
END_S = 6  # to kill, collect and write
# If a GPU runs out of memory, the others of its cell wait; the limit ends them early.
GPUS_WAIT = "--xla_gpu_nccl_termination_timeout_seconds=90"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One process: a benchmark of this folder with its arguments.

    Attributes:
        seconds: known or expected time on H200s.
    """

    name: str
    gpus: int
    seconds: float
    command: str

    @property
    def argv(self) -> list[str]:
        program, *rest = self.command.split()
        return [sys.executable, "-m", f"benchmarks.{program}", *rest]


LARGE = "end_to_end --model 70b --stages 4 --capacity 6144 --batch 16"
REPLICAS = "end_to_end --model 8b --variants ours --no-profile"
HIDE = "--xla gpu_enable_latency_hiding_scheduler="  # overrides the program's own choice
SIZES = (("ops", 8192), ("rows", 2048), ("rows", 4096), ("rows", 16384))  # sections of kernels.py, tokens
CELLS = (
    Cell(name="70b", gpus=4, seconds=440, command=f"{LARGE} --variants ours mlora"),
    # Four replicas: 26 slots are 104 microbatches.
    Cell(name="70b_fsdp", gpus=4, seconds=260, command=f"{LARGE} --variants fsdp_xla --baseline-slots 26"),
    Cell(name="70b_flush", gpus=4, seconds=260, command=f"{LARGE} --variants flush --baseline-slots 40"),
    Cell(
        name="32b", gpus=2, seconds=440,
        command="end_to_end --model 32b --stages 2 --variants ours fsdp_xla --baseline-slots 38",
    ),
    Cell(
        name="32b_order", gpus=2, seconds=250,
        command="end_to_end --model 32b --stages 2 --variants mlora ours --slots 40 --no-profile",
    ),
    Cell(
        name="32b_baselines", gpus=2, seconds=430,
        command="end_to_end --model 32b --stages 2 --variants ours flush single --baseline-slots 25"
        " --slots 40 --no-profile",
    ),
    Cell(
        name="8b_mix", gpus=1, seconds=280,
        command="end_to_end --model 8b --workloads mix --variants ours single_xla single frozen"
        " --baseline-slots 50",
    ),
    Cell(
        name="8b_rest", gpus=1, seconds=350,
        command="end_to_end --model 8b --workloads xsum cnn wiki het --variants ours",
    ),
    Cell(
        name="8b_rest_single", gpus=1, seconds=190,
        command="end_to_end --model 8b --workloads xsum cnn wiki het --variants single_xla --baseline-slots 50",
    ),
    Cell(
        name="8b_single", gpus=1, seconds=170,
        command="end_to_end --model 8b --workloads mix --variants ours single --baseline-slots 50",
    ),
    Cell(name="8b_het", gpus=1, seconds=110, command="end_to_end --model 8b --workloads het --variants ours"),
    Cell(name="layer", gpus=1, seconds=240, command="kernels --sections layer --only 8B --budget 230"),
    Cell(name="layer_large", gpus=1, seconds=180, command="kernels --sections layer --only 32B 70B --budget 170"),
    Cell(name="siblings", gpus=1, seconds=80, command="kernels --sections layer --only q,k,v gate,up --budget 78"),
    Cell(name="check", gpus=1, seconds=130, command="kernels --sections check --budget 120"),
    *(  # two shapes of each number of tokens, and the three others: all rows of all shapes take two GPUs 16 minutes
        Cell(
            name=f"{section}_{tokens}_{part}", gpus=1, seconds=seconds,
            command=f"kernels --sections {section} --budget {1.5 * seconds:.0f} --only {only}",
        )
        for section, tokens in SIZES
        for part, seconds, only in (
            ("large", 310, f"{tokens}x5120 {tokens}x8192 {tokens}x14336"), ("square", 200, f"{tokens}x4096"),
        )
    ),
    *(  # Hopper's kernels and the forms that they must not be slower than
        Cell(
            name=f"{section}_{tokens}_hopper", gpus=1, seconds=550,
            command=f"kernels --sections {section} --budget 800 --only {tokens}x"
            " --variants frozen xla_naive xla_wide xla pallas_mosaic_gpu",
        )
        for section, tokens in SIZES
    ),
    *(  # of these, ranks up to 64 alone
        Cell(
            name=f"{section}_{tokens}_64", gpus=1, seconds=200,
            command=f"kernels --sections {section} --budget 300 --only {tokens}x --matching ^frozen|_r64_"
            " --variants frozen xla_naive xla_wide pallas_mosaic_gpu",
        )
        for section, tokens in SIZES
    ),
    Cell(name="profile", gpus=1, seconds=90, command="kernels --sections profile --budget 130"),
    Cell(name="products", gpus=1, seconds=80, command="kernels --sections products --budget 110"),
    Cell(
        name="bytes_64", gpus=1, seconds=90,
        command="kernel_bytes --features 8192 --rank 64 --cases ours,A1,p0 ours,A4,p0",
    ),
    Cell(name="gpu_tests", gpus=1, seconds=330, command="gpu_tests"),
    Cell(
        name="32b_fp8", gpus=1, seconds=130,
        command="end_to_end --model 32b --workloads mix --variants ours_fp8 --slots 12 --no-profile",
    ),
    Cell(name="quantised_layer", gpus=1, seconds=125, command="quantised_layer --seconds 110"),
    Cell(name="quantised_loss", gpus=1, seconds=260, command="quantised_loss"),
    Cell(name="layer_small", gpus=1, seconds=130, command="kernels --sections layer --only 8B-2048 8B-4096"),
    Cell(name="start", gpus=1, seconds=260, command="starting --work /dev/shm"),
    Cell(name="start_2", gpus=2, seconds=260, command="starting --work /dev/shm --stages 2"),
    Cell(name="attention", gpus=1, seconds=110, command="attention --sections check,isolation,whole --budget 100"),
    Cell(name="bytes", gpus=1, seconds=90, command="kernel_bytes"),
    Cell(name="8b_overlap", gpus=1, seconds=95, command=f"{REPLICAS} {HIDE}true"),
    Cell(name="8b_data2_overlap", gpus=2, seconds=108, command=f"{REPLICAS} --data 2 {HIDE}true"),
    Cell(
        name="8b_fsdp", gpus=2, seconds=120,
        command="end_to_end --model 8b --stages 2 --variants fsdp_xla --baseline-slots 50",
    ),
    Cell(
        name="8b_fsdp_apart", gpus=2, seconds=120,
        command=f"end_to_end --model 8b --stages 2 --variants fsdp_xla --baseline-slots 50 {HIDE}false",
    ),
    Cell(name="8b_data4", gpus=4, seconds=110, command=f"{REPLICAS} --data 4"),
    Cell(name="8b_data2", gpus=2, seconds=108, command=f"{REPLICAS} --data 2"),
    Cell(name="8b_data1", gpus=1, seconds=95, command=REPLICAS),
    # Four adapters with batches of 8 fill four replicas' microbatches to 95.6 %, with batches of 16 to 98.6 %.
    Cell(name="8b_data4_large", gpus=4, seconds=100, command=f"{REPLICAS} --data 4 --batch 16"),
    Cell(name="8b_data8", gpus=8, seconds=120, command=f"{REPLICAS} --data 8 --batch 16"),
    Cell(
        name="8b_tensor4", gpus=4, seconds=260,
        command="tensor --gpus 4 --adapters 4 --meshes one tensor parts data --seconds 240",
    ),
    Cell(
        name="70b_fp8", gpus=4, seconds=300,
        command="end_to_end --model 70b --stages 2 --data 2 --capacity 6144 --batch 16 --workloads mix"
        " --variants ours_fp8 --no-profile",
    ),
    *(
        Cell(
            name=f"70b_start_{stages}", gpus=stages, seconds=580,
            command=f"starting --work /dev/shm --shape llama-70b --stages {stages} --repeats 10 --until-first-step"
            " --seconds 480",
        )
        for stages in (4, 8)
    ),
    Cell(
        name="235b_fp8", gpus=8, seconds=400,
        command="end_to_end --model qwen3-235b-a22b --stages 8 --capacity 4096 --batch 16 --workloads mix"
        " --variants ours_fp8 --no-profile",
    ),
    Cell(name="policy_4", gpus=4, seconds=590, command="live_policy --work /dev/shm --gpus 4 --over 300"),
    Cell(name="8b_data1_large", gpus=1, seconds=95, command=f"{REPLICAS} --batch 16"),
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Running:
    """A running cell."""

    cell: Cell
    gpus: list[str]
    process: subprocess.Popen
    killed_at: float


class Campaign:
    """Runs cells on free GPUs and collects their output."""

    def __init__(self, cells: Sequence[Cell], gpus: Sequence[str], seconds: float, out: Path, work: Path):
        self._waiting, self._free = list(cells), list(gpus)
        self._running: list[Running] = []
        self._began, self._seconds = time.monotonic(), seconds
        self._out, self._work = out, work
        self._outcomes: dict[str, str] = {}

    @property
    def left_s(self) -> float:
        return self._seconds - END_S - (time.monotonic() - self._began)

    def run(self) -> dict[str, str]:
        """Returns the outcome of every cell. If the campaign ends early, it ends its cells and collects their rows."""
        try:
            while self._waiting or self._running:
                self._start_waiting()
                time.sleep(0.2)
                self._end_finished()
        finally:
            for running in self._running:
                kill(running.process)
            self._collect()
        return self._outcomes

    def _start_waiting(self) -> None:
        for cell in list(self._waiting):
            if cell.seconds > self.left_s:
                self._waiting.remove(cell)
                self._report(cell, f"not started: needs {cell.seconds:.0f} s, {max(self.left_s, 0):.0f} s left")
            elif cell.gpus <= len(self._free):
                self._waiting.remove(cell)
                gpus, self._free = self._free[: cell.gpus], self._free[cell.gpus :]
                self._running.append(self._launch(cell, gpus))
            else:
                return  # keep the order: a small cell would delay the larger one before it

    def _launch(self, cell: Cell, gpus: list[str]) -> Running:
        folder = self._work / cell.name
        folder.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(gpus), PYTHONUNBUFFERED="1")
        environment["XLA_FLAGS"] = f"{GPUS_WAIT} {os.environ.get('XLA_FLAGS', '')}".strip()
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                [*cell.argv, "--out", str(folder)], stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
        limit = min(cell.seconds * SLACK, self.left_s)
        return Running(cell=cell, gpus=gpus, process=process, killed_at=time.monotonic() + limit)

    def _end_finished(self) -> None:
        for running in list(self._running):
            status = running.process.poll()
            if status is None and time.monotonic() < running.killed_at:
                continue
            if status is None:  # SIGTERM would let a training loop finish its microbatches
                kill(running.process)
            self._running.remove(running)
            self._free = sorted(self._free + running.gpus)
            self._report(running.cell, "killed at its limit" if status is None else f"exit status {status}")
            self._collect()

    def _report(self, cell: Cell, text: str) -> None:
        self._outcomes[cell.name] = text
        print(f"{time.monotonic() - self._began:5.0f} s  {cell.name}: {text}", flush=True)

    def _collect(self) -> None:
        rows = [
            json.dumps({"cell": path.parent.name} | row) + "\n"
            for path in sorted(self._work.glob("*/*.jsonl"))
            for row in whole_rows(path.read_text())
        ]
        put(self._out / "campaign.jsonl", lambda file: file.write_text("".join(rows)))

        def pack(file: Path) -> None:
            with tarfile.open(file, "w:gz") as archive:
                archive.add(self._work, "campaign")

        put(self._out / "campaign.tar.gz", pack)


def kill(process: subprocess.Popen) -> None:
    """Ends a cell and all its processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def whole_rows(text: str) -> Iterator[dict]:
    """Complete rows of a file that may still be written or may be truncated."""
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def put(file: Path, write: Callable[[Path], object]) -> None:
    """Writes a file atomically."""
    draft = file.with_name(f".{file.name}")
    write(draft)
    draft.replace(file)


def cell_named(name: str) -> Cell:
    """The cell of a name, with or without a number: 8b_data1.2."""
    known = {cell.name: cell for cell in CELLS}
    base, dot, number = name.partition(".")
    if base not in known or (dot and not number.isdecimal()):
        raise argparse.ArgumentTypeError(f"{name!r} is not a cell: {', '.join(known)}, also as NAME.NUMBER")
    return replace(known[base], name=name)


def visible_gpus() -> list[str]:
    """The GPUs in CUDA_VISIBLE_DEVICES, or all GPUs."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip()]
    return [str(i) for i in range(len(subprocess.check_output(["nvidia-smi", "-L"], text=True).splitlines()))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="default: all that are visible")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--cells", nargs="+", type=cell_named, metavar="CELL", default=list(CELLS))
    parser.add_argument("--list", action="store_true", help="print the cells and exit")
    parser.add_argument("--out", type=Path, help="folder")
    options = parser.parse_args()
    if options.list:
        for cell in options.cells:
            print(f"{cell.name:15s} {cell.gpus} GPUs {cell.seconds:4.0f} s  {cell.command}")
        return 0
    if options.out is None:
        parser.error("--out must name the output folder")
    if len({cell.name for cell in options.cells}) < len(options.cells):
        parser.error("a cell is named twice: give the second one a number, as in 8b_data1.2")
    gpus = visible_gpus()[: options.gpus]
    too_large = [cell.name for cell in options.cells if cell.gpus > len(gpus)]
    if too_large:
        print(f"left out, more than {len(gpus)} GPUs: {', '.join(too_large)}")
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the cells too
    with tempfile.TemporaryDirectory() as work:
        ready = [cell for cell in options.cells if cell.gpus <= len(gpus)]
        ended = Campaign(ready, gpus, options.seconds, options.out, Path(work)).run()
    return int(any(text != "exit status 0" for text in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
