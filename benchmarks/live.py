"""How do jobs of several clients fare that come over five minutes, against an offline plan of the same rows?

    python -m benchmarks.live --out results/live --work /dev/shm --over 30 --most 280   # an H100 or H200, four minutes
    python -m benchmarks.live --out results/live --work /dev/shm --rows 320                  # five minutes of jobs
    python -m benchmarks.live --out /tmp/try --small                 # in miniature on a CPU, a minute

Writes a model of Llama-3.1-8B's shape with random weights and starts `lorafusion serve` with it: 49 GiB of a GPU by the
memory model, and 0.7 more for each place beyond eight. 8 clients submit 32 jobs at times drawn from one seed. Checks
that every job ends with all its steps, each once. 96 rows of each job are 2.2 million tokens, 274 slots of an offline
plan, which an H200 trains in 117 s: to compare tokens per second, jobs must come faster than they end. `jobs.json` has
what the service said of the jobs, and `live.jsonl` a row with

* seconds from submission to the first step: of all jobs, and of those for which a place was free;
* seconds from the decision for a free place to the start in it, and the programs compiled since the service was ready;
* tokens per slot and per second while jobs trained, beside those of an offline plan of all rows at the same seconds per
  slot, which come from the slots and times of the steps;
* completion times over those of the simulator, which gets the same seconds per slot and the same arrivals, once as jobs
  were submitted, and once later by the median of the seconds that it took from there to a start in a free place.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.conditions import conditions
from benchmarks.harness import command_line
from benchmarks.live_simulated import Arrival, simulated_ends
from benchmarks.random_base import add_base_option, random_base
from benchmarks.random_job import SHAPE, SMALL, write_data
from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import source_of
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.planning.training_plan import train_jobs
from lorafusion_jax.serve.client import Client, Job
from scheduling import AdapterJob, Plan, make_plan

CLIENTS = 8
FREE_S = 1.0  # between two transitions of a job that waits for nobody
START_S = 300.0


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--work", type=Path, help="where files are written; default: the system's folder")
    parser.add_argument("--over", type=float, help="seconds over which jobs come (default: 300, or 15 with --small)")
    parser.add_argument("--most", type=float, default=1800.0, help="seconds after which the script gives up")
    parser.add_argument("--rows", type=int, help="samples of a job (default: 96, or 24 with --small)")
    parser.add_argument("--places", type=int, help="of the session (default: 16, or 4 with --small)")
    parser.add_argument("--small", action="store_true")
    add_base_option(parser)
    options = parser.parse_args()
    until = time.monotonic() + options.most
    options.out.mkdir(parents=True, exist_ok=True)
    small = options.small
    with tempfile.TemporaryDirectory(prefix="live_", dir=options.work) as folder:
        work = Path(folder)
        base = random_base(options.base or work / "base", small=small)
        rows = options.rows or (24 if small else 96)
        specs = [make_spec(work, base, number, rows, small) for number in range(6 if small else 32)]
        over_s = options.over or (15.0 if small else 300.0)
        places = options.places or (4 if small else 16)
        row = run(work, base, specs, options.out, places, over_s=over_s, until=until, small=small)
        row |= {"over_s": over_s, "rows": rows, "places": places}
    print(json.dumps(row, indent=1))
    with (options.out / "live.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row | {"small": small} | conditions()) + "\n")
    return 0


def make_spec(work: Path, base: Path, number: int, rows: int, small: bool) -> dict:
    """A job with its own data."""
    mean, spread, longest = (40, 20, 100) if small else (500, 400, 2000)
    file = work / f"rows-{number}.jsonl"
    write_data(file, mean, spread, rows, base / "tokenizer.json", longest)
    return {
        "name": f"job-{number}",
        "base": "base",
        "data": {"train": str(file), "max_length": 256 if small else 4096},
        "lora": {"rank": 4 if small else 16, "dropout": 0.0},
        "batch": {"global_samples": (4, 8, 16)[number % 3]},
        "seed": number,
    }


def run(
    work: Path, base: Path, specs: list[dict], out: Path, places: int, *, over_s: float, until: float, small: bool
) -> dict[str, object]:
    """Serves the jobs and returns the measurements.

    Raises:
        TimeoutError: the jobs have not ended by a time of the monotonic clock.
    """
    rank = 4 if small else 16
    began = time.monotonic()
    with served(work, base, out, ["--places", f"{rank}:{places}"], warm=True, small=small) as client:
        home = work / "home"
        ready_s, programs = time.monotonic() - began, len(compiled(home))
        print(f"ready after {ready_s:.1f} s, {programs} programs", flush=True)
        jobs = submit_over(client, specs, over_s)
        capacity, tile = microbatch(small)
        planned = [planner_job(base, spec, small) for spec in specs]
        offline = make_plan(planned, capacity_tokens=capacity, num_stages=1, tile_tokens=tile)
        told = wait_all(jobs, out, until)
        row = measure(told, planned, offline, SMALL if small else SHAPE, rank=rank, places=places)
        return row | {"ready_s": round(ready_s, 1), "compiled_since_ready": compiled(home)[programs:]}


def microbatch(small: bool) -> tuple[int, int]:
    """Tokens of a microbatch and of a tile."""
    return (256, 16) if small else (8192, 128)


@contextmanager
def served(work: Path, base: Path, out: Path, options: Sequence[str], *, warm: bool, small: bool) -> Iterator[Client]:
    """A service with that base, which ends afterwards and leaves its logs in `out`; `warm`: its session is ready."""
    capacity, tile = microbatch(small)
    settings = [f"batch.capacity_tokens={capacity}", f"batch.tile_tokens={tile}"]
    settings += ["base.dtype=float32", "train.block_layers=1"] if small else []
    home = work / "home"
    command = [sys.executable, "-m", "lorafusion_jax", "serve", "--home", str(home), "--base", f"base={base}"]
    with (work / "server.txt").open("wb") as log:
        server = subprocess.Popen(
            [*command, *options, "--port", "0", *settings],
            stdout=log,
            stderr=log,
            env=os.environ | {"JAX_LOG_COMPILES": "1"},
        )
    try:
        yield wait_ready(home, server, warm)
    finally:
        server.terminate()
        server.wait(120)
        for log in (work / "server.txt", *(home / "workers").glob("*/log.txt")):  # they say why, where it failed
            shutil.copyfile(log, out / f"{log.parent.name}-{log.name}")


def wait_all(jobs: Sequence[Job], out: Path, until: float) -> list[dict]:
    """What the service says of the jobs when all have ended."""
    try:
        for job in jobs:
            job.wait(max(1.0, until - time.monotonic()))
    finally:
        told = [{"job": job.show(), "rows": list(job.metrics())} for job in jobs]
        (out / "jobs.json").write_text(json.dumps(told), encoding="utf-8")
    return told


def wait_ready(home: Path, server: subprocess.Popen, warm: bool) -> Client:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        time.sleep(0.5)
        if (home / "address").is_file():
            client = Client((home / "address").read_text())
            if not warm or client.request("GET", "/v1/bases")["items"][0]["warm"]:
                return client
    raise RuntimeError("the service ended, or was not ready in time: see its logs in the folder of the results")


def compiled(home: Path) -> list[str]:
    """Programs that the worker has asked a compiler or a cache for."""
    logs = (home / "workers").glob("*/log.txt")
    return [name for log in logs for name in re.findall(r"Compiling (\S+) with", log.read_text(errors="replace"))]


def submit_over(client: Client, specs: list[dict], over_s: float) -> list[Job]:
    """Submits the jobs from threads of their clients, spread over some time."""
    draw, began = random.Random(0), time.monotonic()
    times = [0.0, *sorted(draw.uniform(0, over_s) for _ in specs[1:])]
    jobs: dict[int, Job] = {}

    def submit(client_number: int) -> None:
        for number in range(client_number, len(specs), CLIENTS):
            time.sleep(max(0.0, began + times[number] - time.monotonic()))
            jobs[number] = client.submit(specs[number])

    threads = [threading.Thread(target=submit, args=(client_number,)) for client_number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [jobs[number] for number in range(len(specs))]


def measure(
    told: list[dict], planned: list[AdapterJob], offline: Plan, sizes: dict, *, rank: int, places: int
) -> dict[str, object]:
    waits, free_waits, starts, delays, points, arrivals = [], [], [], [], [], []
    first = min(entry["job"]["created"] for entry in told)
    for entry, planned_job in zip(told, planned, strict=True):
        row, steps = entry["job"], [step for step in entry["rows"] if step["kind"] == "step"]
        assert [step["step"] for step in steps] == list(range(1, row["steps"] + 1)), row
        at = {transition["after"]: transition["at"] for transition in row["transitions"]}
        waits.append(steps[0]["time"] - row["created"])
        starts.append(at["running"] - at["starting"])
        if at["starting"] - at["queued"] < FREE_S:
            free_waits.append(waits[-1])
            delays.append(at["running"] - row["created"])
        points += [(step["slot"], step["time"]) for step in steps]
        arrivals.append(
            Arrival(job=planned_job, came_s=row["created"] - first, ended_s=steps[-1]["time"] - first, rank=rank)
        )
    tokens = sum(sum(job.sample_tokens) for job in planned)
    slots, seconds, slot_s = slot_seconds(points)

    def over_simulated(delay_s: float) -> dict[str, float]:
        later = [replace(arrival, came_s=arrival.came_s + delay_s) for arrival in arrivals]
        ends = simulated_ends(later, sizes, offline, slot_s=slot_s, places=places)
        ratios = [(a.ended_s - a.came_s) / (ends[a.job.name] - a.came_s) for a in arrivals]
        return summary(ratios) | {"mean": round(statistics.mean(ratios), 3), "end_s": round(max(ends.values()), 2)}

    delay_s = statistics.median(delays) if delays else 0.0
    return {
        "what": "live",
        "jobs": len(told),
        "first_step_s": summary(waits),
        "free": len(free_waits),
        "first_step_free_s": summary(free_waits or waits),
        "start_s": summary(starts),
        "tokens": tokens,
        "slots": slots,
        "offline_slots": len(offline.slots),
        "slot_s": round(slot_s, 4),
        "tokens_per_s": round(tokens / seconds, 1),
        "offline_tokens_per_s": round(tokens / (len(offline.slots) * slot_s), 1),
        "share_of_offline": round(len(offline.slots) * slot_s / seconds, 4),
        "slots_of_offline": round(len(offline.slots) / slots, 4),
        "end_s": round(max(a.ended_s for a in arrivals), 2),
        "over_simulated": over_simulated(0.0),
        "delay_s": round(delay_s, 2),
        "over_simulated_delayed": over_simulated(delay_s),
    }


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    named = {"p50": statistics.median(ordered), "p90": ordered[int(0.9 * (len(ordered) - 1))], "most": ordered[-1]}
    return {name: round(value, 3) for name, value in named.items()}


def planner_job(base: Path, spec: dict, small: bool) -> AdapterJob:
    capacity, tile = microbatch(small)
    batch = {"capacity_tokens": capacity, "tile_tokens": tile}
    adapter = {key: spec[key] for key in ("name", "data", "lora", "batch", "seed")}
    config = parse_config(source_of({"base": {"model": str(base)}, "batch": batch, "adapters": [adapter]}))
    (job,) = train_jobs(config, prepare(config))
    return job


def slot_seconds(points: list[tuple[int, float]]) -> tuple[int, float, float]:
    """Returns slots, seconds in which jobs trained, and the median of seconds per slot.

    A pause longer than ten slots is no training: no job was there, or a place was empty.
    """
    points = sorted(set(points))
    pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(points) if b[0] > a[0]]
    slot_s = statistics.median(seconds / slots for slots, seconds in pairs)
    seconds = sum(min(seconds, 10 * slots * slot_s) for slots, seconds in pairs)
    return points[-1][0], seconds, slot_s


if __name__ == "__main__":
    raise SystemExit(main())
