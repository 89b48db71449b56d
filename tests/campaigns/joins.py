"""Does a process grow with every adapter that joins, once adapters have ended?

    python -m campaigns.joins --work FOLDER --out benchmarks/results/joins_cpu_DATE    # ten minutes

trains one adapter of a tiny model in this process. Others join one after another: each trains for six steps, and when
it has ended, the next is added. A row after each: memory of the process, and arrays on the device. An adapter that has
ended keeps its place, so that it can be extended: its arrays may add up, programs of fewer adapters may not.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from campaigns import tiny_run

from benchmarks.conditions import conditions
from benchmarks.csv_rows import append_row, write_rows
from lorafusion_jax.checkpoint.requests import write_addition, write_request
from lorafusion_jax.config import load_config
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.training import train

FIRST = "first"
EPOCHS = 20  # of the first adapter, for each that joins; those have one


def resident_mb() -> float:
    """Memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(round(int(line.split()[1]) / 1024, 1) for line in lines if line.startswith("VmRSS"))


def write_job(work: Path, joins: int) -> JobConfig:
    base = work / "base"
    if not base.exists():
        tiny_run.write_base(base)
    data = {"train": tiny_run.write_rows(work, "ask")}
    lora = {"rank": 4, "dropout": 0.1, "targets": ["down_proj"]}
    train = {"plan_seconds": 0.01, "log_every_s": 2}
    save = {"every_steps": 10**6, "keep": 1}
    entries = [{"name": FIRST, "data": data, "epochs": EPOCHS * joins}]
    return load_config(tiny_run.write_job(work, base, entries, lora=lora, train=train, save=save))


def adds_one_after_another(config: JobConfig, run: Path, joins: int, write: Callable[[dict[str, Any]], None]):
    """Returns a listener of the run that adds the next adapter when one has ended."""
    (first,) = config.adapters
    began, joined = time.monotonic(), 0

    def listen(event: Any) -> None:
        nonlocal joined
        ended = event.kind == "adapter-done" and event.adapter != FIRST
        if ended:
            arrays = jax.live_arrays()
            write(
                {
                    "joined": joined,
                    "seconds": round(time.monotonic() - began, 1),
                    "resident_mb": resident_mb(),
                    "arrays": len(arrays),
                    "array_mb": round(sum(array.nbytes for array in arrays) / 2**20, 2),
                }
            )
        if not (ended or (event.kind == "step" and event.step == 1 and event.adapter == FIRST)):
            return
        if joined == joins:
            write_request(run, "finish", FIRST)
            return
        joined += 1
        write_addition(
            run, [first.model_copy(update={"name": f"new{joined}", "seed": joined, "epochs": 1, "weight": 100.0})]
        )

    return listen


def main() -> int:
    parser = tiny_run.arguments_of_a_run(__doc__, work="folder for the run; it is removed")
    parser.add_argument("--joins", type=int, default=100)
    arguments = parser.parse_args()
    work, run = arguments.work.resolve(), arguments.work.resolve() / "run"
    shutil.rmtree(run, ignore_errors=True)
    for folder in (work, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    memory = arguments.out / "memory.csv"
    memory.unlink(missing_ok=True)
    config = write_job(work, arguments.joins)

    def write(row: dict[str, Any]) -> None:
        append_row(memory, row)
        print(row, flush=True)

    listener = adds_one_after_another(config, run, arguments.joins, write)
    result = train(config, run, listeners=[listener])
    write_rows(arguments.out / "conditions.csv", [conditions()])
    print(f"{len(result.adapters) - 1} of {arguments.joins} adapters have joined")
    return int(result.exit_code != 0 or len(result.adapters) <= arguments.joins)


if __name__ == "__main__":
    sys.exit(main())
