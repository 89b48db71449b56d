"""Do jobs of a service end as if nothing had happened, whatever is killed?

    PYTHONPATH=tests python -m campaigns.service_kills --out benchmarks/results/service_kills_cpu_DATE \\
        --server 100 --worker 100 --stop 20 --shards 16 --seconds 400       # 16 cores, six minutes

Each shard runs `lorafusion serve` with a tiny base: first two jobs alone, then the same two jobs together again and
again, while at random moments the server is killed (SIGKILL, and started again), its worker is killed, or its worker is
stopped (SIGSTOP) until its lease is over. A row after each pair of jobs: which kills, and whether both adapters are
bitwise those of the undisturbed jobs, with every step recorded once. A last row counts kills and failures.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from campaigns.service_process import Server, free_seed, specs
from campaigns.tiny_run import write_base
from safetensors.numpy import load_file

from benchmarks.csv_rows import append_row
from benchmarks.measured_code import write_measured
from lorafusion_serve.client import Client, Job, ServiceError

KINDS = ("server", "worker", "stop")
LEASE_S = 4.0
EPOCHS = 60
SLACK_S = 45.0  # before the end: no more jobs are started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="folder of the services (default: a temporary one)")
    parser.add_argument("--server", type=int, default=40, help="kills of the server, in all shards together")
    parser.add_argument("--worker", type=int, default=40, help="kills of the worker")
    parser.add_argument("--stop", type=int, default=20, help="workers that are stopped until their lease is over")
    parser.add_argument("--shards", type=int, default=1, help="side by side; each takes about a core")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--shard", type=int, help="run this one only")
    options = parser.parse_args()
    write_measured(options.out)
    if options.shard is not None:
        return run_shard(options)
    if options.work is None:
        options.work = Path(tempfile.mkdtemp(prefix="service-kills-"))
    if not (options.work / "base").exists():
        write_base(options.work / "base")
    arguments = [sys.executable, "-m", "campaigns.service_kills", *sys.argv[1:], "--work", str(options.work)]
    shards = [subprocess.Popen([*arguments, "--shard", str(number)]) for number in range(options.shards)]
    failed = sum(shard.wait() != 0 for shard in shards)
    print(f"{options.shards - failed} of {options.shards} shards without a failure", flush=True)
    return int(bool(failed))


def run_shard(options: argparse.Namespace) -> int:
    until = time.monotonic() + options.seconds
    draw, work = free_seed(options.shard), Path(tempfile.mkdtemp(prefix=f"shard-{options.shard}-", dir=options.work))
    file, kills, failures = options.out / f"shard-{options.shard:02}.csv", Counter[str](), 0
    todo = Counter({kind: share(getattr(options, kind), options) for kind in KINDS})
    server = Server(work / "home", options.work / "base", save_s=0.3, lease_s=LEASE_S)
    server.start()
    try:
        asked = list(specs(work, 2, epochs=EPOCHS))
        alone = []
        for number, (owner, spec) in enumerate(asked):
            job = Client(server.url, server.keys[owner]).submit(spec).wait(options.seconds, every_s=0.1)
            alone.append(load_file(job.adapter(work / f"alone-{number}") / "adapter_model.safetensors"))
        while todo.total() and time.monotonic() < until - SLACK_S:
            made = Counter[str]()
            jobs = [(owner, Client(server.url, server.keys[owner]).submit(spec).id) for owner, spec in asked]
            while any(state_of(server, *job) not in ("done", "failed") for job in jobs):
                if todo.total() and time.monotonic() < until - SLACK_S:
                    time.sleep(draw.uniform(0.1, 3.0))
                    kind = draw.choice(sorted(todo.elements()))
                    if kill(server, kind):
                        made[kind] += 1
                        todo[kind] -= 1
                time.sleep(0.1)
            same = [is_same(server, *job, weights, work) for job, weights in zip(jobs, alone, strict=True)]
            kills, failures = kills + made, failures + same.count(False)
            tries = sum(Job(Client(server.url, server.keys[owner]), job).show()["tries"] for owner, job in jobs)
            row = {"shard": options.shard, **{kind: made[kind] for kind in KINDS}, "tries": tries}
            append_row(file, row | {"adapters": len(same), "same": sum(same)})
            print(row | {"same": sum(same), "of": len(same)}, flush=True)
    finally:
        with suppress(ProcessLookupError):
            server.end(signal.SIGTERM)
    print(f"shard {options.shard}: {dict(kills)}, {failures} failures", flush=True)
    return int(failures > 0 or todo.total() > 0)


def share(count: int, options: argparse.Namespace) -> int:
    """Returns how many of all kills a shard makes."""
    return count // options.shards + (options.shard < count % options.shards)


def kill(server: Server, kind: str) -> bool:
    """Kills the server and starts it again, or kills or stops its worker. Returns whether it was there."""
    if kind == "server":
        server.end(signal.SIGKILL)
        server.start()
        return True
    pid = server.worker()
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    if state in ("Z", "X", "T"):  # it has ended, or was stopped before
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        return True
    return False


def state_of(server: Server, owner: str, job: str) -> str:
    try:
        return Job(Client(server.url, server.keys[owner]), job).show()["state"]
    except (ServiceError, OSError):
        return "away"


def is_same(server: Server, owner: str, name: str, weights: dict, work: Path) -> bool:
    """Whether a job has the weights of the undisturbed one, and each of its steps once."""
    job = Job(Client(server.url, server.keys[owner]), name)
    shown = job.show()
    if shown["state"] != "done":
        print(f"{name}: {shown['state']}, {shown['reason']}", flush=True)
        return False
    adapter = load_file(job.adapter(work / name) / "adapter_model.safetensors")
    steps = [row["step"] for row in job.metrics() if row["kind"] == "step"]
    same = adapter.keys() == weights.keys() and all((adapter[key] == weights[key]).all() for key in weights)
    return bool(same) and steps == list(range(1, shown["steps"] + 1))


if __name__ == "__main__":
    raise SystemExit(main())
