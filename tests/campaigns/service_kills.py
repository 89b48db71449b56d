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
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from campaigns.service_process import Server, free_seed
from campaigns.service_trials import LEASE_S, Jobs, add_options, run_shards, share, train_while_struck

KINDS = ("server", "worker", "stop")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=int, default=40, help="kills of the server, in all shards together")
    parser.add_argument("--worker", type=int, default=40, help="kills of the worker")
    parser.add_argument("--stop", type=int, default=20, help="workers that are stopped until their lease is over")
    add_options(parser, seconds=300.0, cores="a core")
    return run_shards("service_kills", parser.parse_args(), run_shard)


def run_shard(options: argparse.Namespace) -> int:
    draw, work = free_seed(options.shard), Path(tempfile.mkdtemp(prefix=f"shard-{options.shard}-", dir=options.work))
    todo = Counter({kind: share(getattr(options, kind), options) for kind in KINDS})
    server = Server(work / "home", options.work / "base", save_s=0.3, lease_s=LEASE_S)

    def strike(jobs: Jobs, todo: Counter[str]) -> str | None:
        time.sleep(draw.uniform(0.1, 3.0))
        kind = draw.choice(sorted(todo.elements()))
        return kind if kill(server, kind) else None

    return train_while_struck(server, options, work, todo, strike)


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


if __name__ == "__main__":
    raise SystemExit(main())
