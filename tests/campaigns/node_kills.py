"""Do jobs of a service end as if nothing had happened when nodes of its Ray cluster are lost?

    PYTHONPATH=tests python -m campaigns.node_kills --out benchmarks/results/node_kills_cpu_DATE --nodes 100 \\
        --shards 8 --seconds 1500       # 16 cores, 25 minutes; needs the extra ray

Each shard has a cluster of its own on this machine: a head without processors, and a node with one, on which the worker
runs. First two jobs alone, then the same two together again and again, while at random moments, once both train, the
node of the worker is killed (SIGKILL to all that Ray runs there) and another one is there instead. A kill counts if
the worker was alive before and is gone after it. Rows as those of `service_kills`: after each pair of jobs, whether
both adapters are bitwise those of the undisturbed jobs, with every step recorded once. Ray gives a node 30 s to
start: a machine that is too busy for that ends the shard, and rows of whole pairs stay.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

from campaigns.service_process import Server, free_seed, wait_for
from campaigns.service_trials import LEASE_S, Jobs, add_options, run_shards, share, state_of, train_while_struck

WAITING = ("checking", "queued", "starting", "away")  # for a worker, which would be killed before it trains
FIRST_PORT = 17100  # where workers of the first shard connect


class Nodes:
    """A cluster of a head and a node.

    Args:
        port: of the head (None: any that is free).
    """

    def __init__(self, port: int | None = None):
        head = {"num_cpus": 0} | ({} if port is None else {"gcs_server_port": port})
        self._cluster: Any = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
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
    parser.add_argument("--nodes", type=int, default=10, help="kills of a node, in all shards together")
    add_options(parser, seconds=600.0, cores="two cores")
    return run_shards("node_kills", parser.parse_args(), run_shard)


def run_shard(options: argparse.Namespace) -> int:
    draw, work = free_seed(options.shard), Path(tempfile.mkdtemp(prefix=f"shard-{options.shard}-", dir=options.work))
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of workers, which the nodes start
    nodes = Nodes()
    cluster = ("--ray", nodes.address, "--workers-at", f"127.0.0.1:{FIRST_PORT + options.shard}", "--gpus", "0")
    server = Server(work / "home", options.work / "base", save_s=0.3, lease_s=LEASE_S, more=cluster)

    def strike(jobs: Jobs, todo: Counter[str]) -> str | None:
        wait_for(lambda: all(state_of(server, *job) not in WAITING for job in jobs))
        time.sleep(draw.uniform(0.1, 3.0))
        return "node" if lose_worker(nodes, server) else None

    try:
        return train_while_struck(server, options, work, Counter(node=share(options.nodes, options)), strike)
    finally:
        nodes.close()


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
