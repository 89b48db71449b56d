"""What saving costs while training goes on, at 1 G trainable parameters; and what a first and a second start cost.

    python -m benchmarks.saving --out "$OUT"                # one GPU with 80 GB or more, 40 GB of disk, about 6 minutes
    python -m benchmarks.saving --out "$OUT" --cases saving --stop-after 120    # without the check: half the time
    python -m benchmarks.saving --out /tmp/try --small      # in miniature on a CPU, to try the script

Six layers of Llama-3.1-8B's shape with random weights, four adapters of rank 512. First a short run is resumed from its
first checkpoint and has to end in the same bytes. Then a run saves every minute: wall time between the first slots and
the last, pauses, and microbatches while a checkpoint is written beside those while none is. `lost_share` is the time
beyond that of usual microbatches: pauses, and whatever a save delays. Rows are written as they come; a case that fails
leaves its error.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import yaml

from benchmarks.random_job import SHAPE, SMALL, WRITE, write_data

INTERRUPTED = 130
NAMES = ("a", "b", "c", "d")
WARM_SLOTS = 5


def write_inputs(work: Path, *, small: bool, steps: int) -> None:
    """Writes base, tokenizer, data and job."""
    shape = SMALL if small else SHAPE | {"num_layers": 6, "vocab_size": 32000}
    subprocess.run([sys.executable, "-c", WRITE, str(work / "base"), json.dumps(shape)], check=True)
    tokenizer = Path(__file__).parent.parent / "examples" / "base"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, work / "base" / name)
    mean, longest = (40, 128) if small else (800, 4096)
    for name in NAMES:
        write_data(work / f"{name}.jsonl", mean, mean * 0.6, 4 * steps, tokenizer / "tokenizer.json", longest)
    job = {
        "base": {"model": "base"},
        "data": {"max_length": longest},
        "lora": {"rank": 8 if small else 512, "alpha": 64, "dropout": 0.1},
        "batch": {"capacity_tokens": 128 if small else 8192, "tile_tokens": 16 if small else 128, "global_samples": 4},
        "adapters": [{"name": name, "data": {"train": f"{name}.jsonl"}} for name in NAMES],
    }
    (work / "jobs.yaml").write_text(yaml.safe_dump(job))


def train(work: Path, run: str, *settings: str, resume: bool = False, stop_after: float | None = None) -> float:
    """Runs the command and returns its seconds. Interrupts it `stop_after` seconds after its first microbatch."""
    began = time.perf_counter()
    what = ["resume", str(work / run)] if resume else ["train", str(work / "jobs.yaml"), "--out", str(work / run)]
    process = subprocess.Popen([sys.executable, "-m", "lorafusion_jax", *what, *settings])
    if stop_after is not None:
        while process.poll() is None and not (rows := slots_of(work / run)):
            time.sleep(0.2)
        while process.poll() is None and time.time() < rows[0]["time"] + stop_after:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)  # it saves, and ends with 130
    if process.wait() not in (0, INTERRUPTED if stop_after else 0):
        raise RuntimeError(f"{what[0]} ended with exit code {process.returncode}")
    return round(time.perf_counter() - began, 1)


def slots_of(run: Path) -> list[dict]:
    return rows_of(run, "metrics.jsonl", "slot") if (run / "metrics.jsonl").exists() else []


def rows_of(run: Path, name: str, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def weights(run: Path) -> dict[str, bytes]:
    return {name: (run / "adapters" / name / "latest" / "adapter_model.safetensors").read_bytes() for name in NAMES}


def check(work: Path) -> dict:
    """A checkpoint that was written while training went on leads to the same bytes."""
    command_s = train(work, "check", "train.max_steps=4", "save.every_steps=5", "save.keep=9")
    before = weights(work / "check")
    slots = sorted((work / "check" / "state").iterdir(), key=lambda folder: int(folder.name))
    for folder in slots[1:]:
        shutil.rmtree(folder)
    second_s = train(work, "check", resume=True)
    started = rows_of(work / "check", "events.jsonl", "started-up")
    same = weights(work / "check") == before
    shutil.rmtree(work / "check")
    assert same, "resumed from a checkpoint, the run ended in other weights"
    return {
        "bitwise": same,
        "checkpoints": len(slots),
        "first_s": command_s,
        "second_s": second_s,
        "started_up": started,
    }


def measure(work: Path, every_minutes: float, stop_after: float | None) -> dict:
    """A run that saves by the clock."""
    run = work / "run"
    settings = f"save.every_minutes={every_minutes}", "save.keep=1", "train.log_every_s=0"
    train(work, "run", *settings, stop_after=stop_after)
    return summary(run)


def summary(run: Path) -> dict:
    """What slots and events of a run say about its saves. A pause includes the wait for the save before."""
    saved = rows_of(run, "events.jsonl", "saved")
    slots = slots_of(run)[WARM_SLOTS:]
    wall_s = slots[-1]["time"] - slots[0]["time"]
    writing = [(row["time"] - row["seconds"], row["time"]) for row in saved]
    pairs = [(b["time"], b["time"] - a["time"], b["slot"] - a["slot"]) for a, b in pairwise(slots)]
    slot_times = {True: [], False: []}
    for at, seconds, count in pairs:
        if count:
            slot_times[any(begin < at < end for begin, end in writing)].append(seconds / count)
    paused_s = sum(row["paused_s"] for row in saved)
    usual_s = statistics.median(slot_times[False] or slot_times[True])
    return {
        "trainable": rows_of(run, "events.jsonl", "started")[0]["trainable"],
        "wall_s": round(wall_s, 2),
        "paused_s": round(paused_s, 3),
        "paused_share": round(paused_s / wall_s, 5),
        "saves": [{key: row[key] for key in ("slot", "seconds", "paused_s")} for row in saved],
        "slot_s_writing": statistics.median(slot_times[True]) if slot_times[True] else None,
        "slot_s_otherwise": usual_s,
        "longest_slot_s": round(max(slot_times[True] + slot_times[False]), 3),
        "lost_share": round(1 - usual_s * (slots[-1]["slot"] - slots[0]["slot"]) / wall_s, 4),  # of all time
        "shown": {key: slots[-1][key] for key in ("useful_tokens_per_s", "processed_tokens_per_s", "paused_s")},
        "processed_per_wall_s": round((slots[-1]["slot"] - slots[0]["slot"]) / wall_s, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=None, help="of each adapter; default: about three minutes")
    parser.add_argument("--every-minutes", type=float, default=None)
    parser.add_argument("--cases", nargs="+", choices=("check", "saving"), default=["check", "saving"])
    parser.add_argument("--stop-after", type=float, help="seconds of the run that saves, from its first microbatch")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="saving_"))
    write_inputs(work, small=options.small, steps=options.steps or (20 if options.small else 220))
    every = options.every_minutes or (0.02 if options.small else 1.0)
    cases: dict[str, Callable[[], dict]] = {
        "check": lambda: check(work),
        "saving": lambda: measure(work, every, options.stop_after),
    }
    failed = False
    for name in options.cases:
        try:
            row = {"case": name, "small": options.small, "folder": str(work)} | cases[name]()
        except Exception as problem:
            row, failed = {"case": name, "error": repr(problem)}, True
        with (options.out / "saving.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    shutil.rmtree(work, ignore_errors=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
