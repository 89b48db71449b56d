"""64 clients of sixteen users for minutes: is an event lost or repeated, a job lost, and does the server's memory grow?

    PYTHONPATH=tests:tests/serve python -m campaigns.many_clients --seconds 600 \\
        --out benchmarks/results/many_clients_cpu_DATE

A service without a worker, with 10 000 ended jobs in its store. Each client submits, lists, shows, cancels and deletes
jobs, and reads the events of its user on a stream that it leaves and takes up again all the time. At the end every
stream has to have each event of its user once and in order, every accepted job has to be deleted, and the memory of the
last third of the time may be at most `GROWN_MB` above that of the second.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from campaigns.strangers import resident_mb, serve
from campaigns.tiny_run import write_base
from sqlalchemy import select

from benchmarks.csv_rows import append_row
from benchmarks.measured_code import write_measured
from lorafusion_jax.serve.client import Client, ServiceError
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database

OWNERS, CLIENTS, GROWN_MB = tuple(f"user-{number}" for number in range(16)), 64, 32
STREAM_S, END_S = 5.0, 60.0  # of one stream; for the last events


class Caller:
    """One client, with its stream."""

    def __init__(self, url: str, owner: str, key: str, rows: Path):
        self.owner, self.client, self._rows = owner, Client(url, key), rows
        self.made: list[str] = []
        self.numbers: list[int] = []
        self.failed, self.last, self.ends = 0, -1, math.inf  # number of the last event, and until when it may come

    def work(self, until: float) -> None:
        data = {"train": self.client.upload(self._rows)["id"], "max_length": 64}
        spec = {"name": "law", "base": "tiny", "data": data, "lora": {"rank": 4}, "batch": {"global_samples": 4}}
        while time.monotonic() < until:
            job = self.client.submit(spec | {"seed": len(self.made)})
            self.made.append(job.id)
            self.client.request("GET", "/v1/jobs?limit=20")
            job.show()
            job.cancel()
            job.metrics()
            self.client.request("DELETE", f"/v1/jobs/{job.id}")

    def listen(self) -> None:
        while time.monotonic() < self.ends and self.numbers[-1:] != [self.last]:
            leaves, after = time.monotonic() + STREAM_S, {"Last-Event-ID": str(self.numbers[-1] if self.numbers else 0)}
            try:
                with self.client.stream("/v1/events", after) as stream:
                    for line in stream:  # a comment comes every few seconds
                        self.numbers += [int(line[4:])] if line.startswith(b"id: ") else []
                        if not line.strip() and (time.monotonic() > leaves or self.numbers[-1:] == [self.last]):
                            break
            except (OSError, ServiceError):
                self.failed += 1


def run_clients(url: str, keys: dict[str, str], folder: Path, seconds: float, link: Any) -> None:
    """The process of the clients. Is told the last event of each user, and sends what each client made and saw."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "word {n}", "completion": " other {n}"}}\n' for n in range(12)))
    until = time.monotonic() + seconds
    callers = [Caller(url, owner, keys[owner], rows) for owner in OWNERS for _ in range(CLIENTS // len(OWNERS))]
    workers = [threading.Thread(target=caller.work, args=(until,), daemon=True) for caller in callers]
    listeners = [threading.Thread(target=caller.listen, daemon=True) for caller in callers]
    for thread in (*workers, *listeners):
        thread.start()
    for thread in workers:
        thread.join()
    link.send("worked")
    last = link.recv()
    for caller in callers:
        caller.last, caller.ends = last[caller.owner], time.monotonic() + END_S
    for thread in listeners:
        thread.join(2 * END_S)
    link.send([(caller.owner, caller.made, caller.numbers, caller.failed) for caller in callers])


def events_of(db: Database) -> dict[str, list[int]]:
    with db.read() as connection:
        rows = connection.execute(select(t.events.c.owner, t.events.c.seq).order_by(t.events.c.seq)).all()
    events: dict[str, list[int]] = {owner: [] for owner in OWNERS}
    for owner, seq in rows:
        events.setdefault(owner, []).append(seq)
    return events


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=10_000, help="in the store")
    options = parser.parse_args()
    write_measured(options.out)
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="clients-") as name:
        folder = Path(name)
        base, (link, other) = write_base(folder / "base"), processes.Pipe()
        server = processes.Process(target=serve, args=(folder / "home", base, options.jobs, other, OWNERS))
        server.start()
        url, keys = link.recv()
        to_clients, of_clients = processes.Pipe()
        values = (url, keys, folder, options.seconds, of_clients)
        clients = processes.Process(target=run_clients, args=values)
        clients.start()
        sizes, seen, until = list[float](), psutil.Process(server.pid), time.monotonic() + options.seconds
        while time.monotonic() < until or not to_clients.poll():
            sizes.append(resident_mb(seen))
            time.sleep(1.0)
        to_clients.recv()
        time.sleep(5.0)  # checks that are under way
        db = Database(Settings(home=folder / "home", bases={}, places={}).database)
        events = events_of(db)
        to_clients.send({owner: numbers[-1] for owner, numbers in events.items() if numbers})
        told = to_clients.recv()
        with db.read() as connection:
            deleted = set(connection.execute(select(t.jobs.c.id).where(t.jobs.c.state == "deleted")).scalars())
        db.close()
        link.send("end")
        clients.join()
        server.join()
    row = {"clients": len(told), "seconds": options.seconds, "jobs": sum(len(made) for _, made, _, _ in told)}
    row["lost_jobs"] = sum(job not in deleted for _, made, _, _ in told for job in made)
    row["events"] = sum(len(numbers) for _, _, numbers, _ in told)
    row["streams_not_as_the_table"] = sum(numbers != events[owner] for owner, _, numbers, _ in told)
    row["streams_that_failed"] = sum(failed for *_, failed in told)
    third = max(1, len(sizes) // 3)
    row["grown_mb"] = round(max(sizes[-third:]) - max(sizes[third:-third] or sizes))
    row["peak_mb"] = round(max(sizes))
    append_row(options.out / "many_clients.csv", row)
    print(row, flush=True)
    return int(bool(row["lost_jobs"] or row["streams_not_as_the_table"] or row["grown_mb"] > GROWN_MB))


if __name__ == "__main__":
    sys.exit(main())
