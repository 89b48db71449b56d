"""Do jobs of a service end as if nothing had happened, whatever is killed?

    PYTHONPATH=tests python -m campaigns.service_kills --out benchmarks/results/service_kills_cpu_DATE \\
        --shards 16 --seconds 1200       # 16 cores, 20 minutes: 200 kills and 20 stops

Each shard runs `lorafusion serve` with a tiny base: first two jobs alone, then the same two jobs together again and
again, while at random moments one of these happens; each kill is a SIGKILL, and the server is started again.

| strike | what is killed |
|---|---|
| `server`, `worker`, `both` | the server, its worker, or first the worker and then the server at once |
| `stop` | nothing: its worker is stopped (SIGSTOP) until its lease is over |
| `upgrade` | the server, while it brings the database of an earlier version up to date |
| `restore` | the server, as it begins with a database that was copied a while before, as the documentation says |
| `sweep` | the server, as it removes the files of a job that was deleted |

A row after each pair of jobs: which strikes, and whether both adapters are bitwise those of the undisturbed jobs, with
every step recorded once. The end of a shard counts strikes, losses (jobs that are not done, or with other weights),
doubles (with steps that are recorded twice or not at all) and orphans (workers, and folders of jobs, that nobody owns).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from campaigns.serve_forked import MODULES
from campaigns.service_process import Server, free_seed, wait_for, workers_of
from campaigns.service_trials import LEASE_S, Jobs, add_options, run_shards, share, train_while_struck
from forked_commands import start_server

from lorafusion_jax.serve.client import Client, Job
from lorafusion_jax.serve.store.jobs import MOST_TRIES, PROGRESS
from lorafusion_jax.serve.store.tables import MIGRATIONS, VERSION

STRIKES = {"server": 50, "worker": 50, "both": 50, "stop": 20, "upgrade": 17, "restore": 17, "sweep": 16}
HELP = {"stop": "workers that are stopped until their lease is over"}
EARLIER = 4  # version of the database, whose paths were absolute


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in STRIKES.items():
        text = HELP.get(name, f"kills of the kind {name}, in all shards together")
        parser.add_argument(f"--{name}", type=int, default=count, help=text)
    add_options(parser, seconds=1200.0, cores="a core")
    return run_shards("service_kills", parser.parse_args(), run_shard)


def run_shard(options: argparse.Namespace) -> int:
    draw, work = free_seed(options.shard), Path(tempfile.mkdtemp(prefix=f"shard-{options.shard}-", dir=options.work))
    todo = Counter({kind: share(getattr(options, kind), options) for kind in STRIKES})
    forks = start_server(*MODULES)
    server = Server(work / "home", options.work / "base", save_s=0.3, lease_s=LEASE_S, forks=forks)

    def strike(jobs: Jobs, todo: Counter[str]) -> str | None:
        time.sleep(draw.uniform(0.1, 3.0))
        spared = () if may_lose_its_worker(server, jobs) else ("worker", "both", "stop")
        kinds = [kind for kind in sorted(todo.elements()) if kind not in spared]
        if not kinds:
            return None
        kind = draw.choice(kinds)
        strikes = {"upgrade": kill_upgrade, "restore": kill_restore, "sweep": partial(kill_sweep, jobs=jobs)}
        hit = strikes[kind](server, draw) if kind in strikes else kill(server, kind)
        return kind if hit else None

    return train_while_struck(server, options, work, todo, strike)


def may_lose_its_worker(server: Server, jobs: Jobs) -> bool:
    """Whether no job fails, as it shall, if its worker is lost once more before it has made progress."""
    names = tuple(job for _, job in jobs)
    with closing(sqlite3.connect(server.home / "service.db", timeout=60)) as connection:
        query = f"SELECT tries, step - tries_step FROM jobs WHERE id IN ({','.join('?' * len(names))})"
        rows = connection.execute(query, names).fetchall()
    return all(tries < MOST_TRIES - 1 or steps >= PROGRESS for tries, steps in rows)


def kill(server: Server, kind: str) -> bool:
    """Kills the server and starts it again, or kills or stops its worker. Returns whether it was there."""
    hit = kind == "server" or signal_worker(server.worker(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    if kind in ("server", "both"):
        server.end(signal.SIGKILL)
        server.start()
    return hit


def signal_worker(pid: int, number: signal.Signals) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    if state in ("Z", "X", "T"):  # it has ended, or was stopped before
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def kill_upgrade(server: Server, draw: random.Random) -> bool:
    """Makes the database one of an earlier version, and kills the server once it has begun to copy it."""
    server.end(signal.SIGKILL)
    for file in server.home.glob("*.version-*"):
        file.unlink()
    with closing(sqlite3.connect(server.home / "service.db", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE jobs SET state_path = ? || '/' || state_path", (str(server.home),))
        connection.execute("UPDATE artifacts SET path = ? || '/' || path", (str(server.home),))
        for version in range(EARLIER, VERSION):
            for table, column in re.findall(r"ALTER TABLE (\w+) ADD COLUMN (\w+)", " ".join(MIGRATIONS[version])):
                connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.execute(f"UPDATE version SET number = {EARLIER}")
        connection.execute("COMMIT")
    server.begin()
    wait_for(lambda: any(server.home.glob("*.version-*")) or any(server.home.glob(".*.version-*")), every_s=0.001)
    time.sleep(draw.uniform(0.0, 0.05))
    return kill_before(server)


def kill_restore(server: Server, draw: random.Random) -> bool:
    """Stops the service, puts back a copy of its database of a while ago, and kills the server as it starts."""
    copy = server.home / "copy.db"
    with closing(server.database()) as db:
        db.copy(copy)
    time.sleep(draw.uniform(0.2, 2.0))
    server.end(signal.SIGTERM)
    wait_for(lambda: not workers_of(server))
    for file in server.home.glob("service.db*"):
        file.unlink()
    copy.rename(server.home / "service.db")
    server.begin()
    time.sleep(draw.uniform(0.5, 4.0))
    server.end(signal.SIGKILL)
    server.start()
    return True


def kill_before(server: Server) -> bool:
    """Kills the server and starts it again. Returns whether it did not listen yet."""
    listened = server.is_up()
    server.end(signal.SIGKILL)
    server.start()
    return not listened


def kill_sweep(server: Server, draw: random.Random, *, jobs: Jobs) -> bool:
    """Deletes a job with a state, and kills the server while its files are put aside."""
    owner, other = jobs[0]
    client = Client(server.url, server.keys[owner])
    spec = Job(client, other).show()["spec"]
    job = client.submit(spec | {"name": "swept"})
    job.cancel()
    wait_for(lambda: job.show()["state"] == "cancelled")
    (server.home / "jobs" / job.id / "state" / "e1-s1").mkdir(parents=True, exist_ok=True)
    client.request("DELETE", f"/v1/jobs/{job.id}")
    time.sleep(draw.uniform(0.0, 0.3))
    return kill(server, "server")


if __name__ == "__main__":
    raise SystemExit(main())
