"""Do jobs of a service end as if nothing had happened when nodes of its Ray cluster are lost?

    PYTHONPATH=tests python -m campaigns.node_kills --out benchmarks/results/node_kills_cpu_DATE --nodes 100 \\
        --shards 8 --seconds 1500       # 16 cores, 25 minutes; needs pip install "lorafusion-jax[ray]"

Each shard has a cluster of its own on this machine: a head without processors, and a node with one, on which the worker
runs. First two jobs alone, then the same two together again and again, while at random moments, once both train, the
node of the worker is killed (SIGKILL to all that Ray runs there) and another one is there instead. A kill counts if
the worker was alive before and is gone after it. Rows as those of `service_kills`: after each pair of jobs, whether
both adapters are bitwise those of the undisturbed jobs, with every step recorded once.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from campaigns.service_kills import LEASE_S, SLACK_S, is_same, share, state_of
from campaigns.service_process import Server, free_seed, specs, wait_for
from campaigns.tiny_run import write_base
from safetensors.numpy import load_file

from benchmarks.csv_rows import append_row
from benchmarks.measured_code import write_measured
from lorafusion_serve.client import Client, Job

EPOCHS = 60
WAITING = ("checking", "queued", "starting", "away")  # for a worker, which would be killed before it trains
FIRST_PORT = 17100  # where workers of the first shard connect


class Nodes:
    """A cluster of a head and a node."""

    def __init__(self) -> None:
        self._cluster: Any = import_module("ray.cluster_utils").Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0}
        )
        self._node = self._cluster.add_node(num_cpus=1)

    @property
    def address(self) -> str:
        return self._cluster.address

    def lose(self) -> None:
        """Kills the node; another one is there by then."""
        lost, self._node = self._node, self._cluster.add_node(num_cpus=1)
        self._cluster.remove_node(lost, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="folder of the services (default: a temporary one)")
    parser.add_argument("--nodes", type=int, default=10, help="kills of a node, in all shards together")
    parser.add_argument("--shards", type=int, default=1, help="side by side; each takes about two cores")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--shard", type=int, help="run this one only")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_measured(options.out)
    if options.shard is not None:
        return run_shard(options)
    if options.work is None:
        options.work = Path(tempfile.mkdtemp(prefix="node-kills-"))
    if not (options.work / "base").exists():
        write_base(options.work / "base")
    arguments = [sys.executable, "-m", "campaigns.node_kills", *sys.argv[1:], "--work", str(options.work)]
    shards = [subprocess.Popen([*arguments, "--shard", str(number)]) for number in range(options.shards)]
    failed = sum(shard.wait() != 0 for shard in shards)
    print(f"{options.shards - failed} of {options.shards} shards without a failure", flush=True)
    return int(bool(failed))


def run_shard(options: argparse.Namespace) -> int:
    until = time.monotonic() + options.seconds
    draw, work = free_seed(options.shard), Path(tempfile.mkdtemp(prefix=f"shard-{options.shard}-", dir=options.work))
    file, todo, failures = options.out / f"shard-{options.shard:02}.csv", share(options.nodes, options), 0
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of workers, which the nodes start
    nodes = Nodes()
    cluster = ("--ray", nodes.address, "--workers-at", f"127.0.0.1:{FIRST_PORT + options.shard}", "--gpus", "0")
    server = Server(work / "home", options.work / "base", save_s=0.3, lease_s=LEASE_S, more=cluster)
    server.start()
    try:
        asked = list(specs(work, 2, epochs=EPOCHS))
        alone = []
        for number, (owner, spec) in enumerate(asked):
            job = Client(server.url, server.keys[owner]).submit(spec).wait(options.seconds, every_s=0.1)
            alone.append(load_file(job.adapter(work / f"alone-{number}") / "adapter_model.safetensors"))
        while todo and time.monotonic() < until - SLACK_S:
            made = 0
            jobs = [(owner, Client(server.url, server.keys[owner]).submit(spec).id) for owner, spec in asked]
            while any(state_of(server, *job) not in ("done", "failed") for job in jobs):
                if todo and time.monotonic() < until - SLACK_S:
                    wait_for(lambda asked=jobs: all(state_of(server, *job) not in WAITING for job in asked))
                    time.sleep(draw.uniform(0.1, 3.0))
                    hit = lose_worker(nodes, server)
                    made, todo = made + hit, todo - hit
                time.sleep(0.1)
            same = [is_same(server, *job, weights, work) for job, weights in zip(jobs, alone, strict=True)]
            failures += same.count(False)
            tries = sum(Job(Client(server.url, server.keys[owner]), job).show()["tries"] for owner, job in jobs)
            row = {"shard": options.shard, "node": made, "tries": tries, "adapters": len(same), "same": sum(same)}
            append_row(file, row)
            print(row, flush=True)
    finally:
        with suppress(ProcessLookupError):
            server.end(signal.SIGTERM)
        nodes.close()
    print(f"shard {options.shard}: {todo} kills left, {failures} failures", flush=True)
    return int(failures > 0 or todo > 0)


def lose_worker(nodes: Nodes, server: Server) -> bool:
    """Kills the node of the worker. Returns whether the worker was there."""
    worker = server.worker()
    if not lives(worker):
        return False
    nodes.lose()
    wait_for(lambda: not lives(worker))
    return True


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


if __name__ == "__main__":
    raise SystemExit(main())
