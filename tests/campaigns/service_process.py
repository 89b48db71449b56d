"""`lorafusion serve` as a process, with jobs small enough to end in seconds."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

from forked_commands import Command
from small_jobs import write_rows
from sqlalchemy import select

from lorafusion_jax.serve.control.launch import identity_of
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database
from lorafusion_jax.serve.store.keys import add_key

SETTINGS = ("base.dtype=float32", "batch.capacity_tokens=128", "batch.tile_tokens=16", "train.block_layers=1")
OWNERS = ("ana", "ben", "cleo")
PATIENCE_S = 900


class Server:
    """A service that listens at another port after each start.

    Args:
        save_s, lease_s: as the options of these names.
        forks: socket of a process that forks it and its workers; empty: they are new processes.

    Attributes:
        keys: owner → key.
        more: further options.
    """

    def __init__(
        self, home: Path, base: Path, *, save_s: float = 0.5, lease_s: float = 60.0, more: Sequence[str] = (),
        forks: str = "",
    ):  # fmt: skip
        self._forks = forks
        self.home, self._base, self._save_s, self._lease_s, self.more = home, base, save_s, lease_s, more
        self._process: subprocess.Popen | Command | None = None
        home.mkdir()
        with self.database().write() as connection:
            self.keys = {owner: add_key(connection, owner)[1] for owner in OWNERS}

    def start(self) -> None:
        self.begin()
        wait_for(self.is_up)

    def is_up(self) -> bool:
        return (self.home / "address").exists()

    def begin(self) -> None:
        """Starts it without waiting until it listens."""
        (self.home / "address").unlink(missing_ok=True)
        options = ["--home", str(self.home), "--base", f"tiny={self._base}", "--places", "4:3", "--port", "0"]
        options += ["--save-s", str(self._save_s), "--lease-s", str(self._lease_s)]
        options += ["--reproducible", *SETTINGS, *self.more]
        env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        with (self.home / "server.txt").open("ab") as log:
            if self._forks:
                words = ["-m", "campaigns.serve_forked", self._forks, *options]
                self._process = Command(words, env, log=log.fileno(), server=self._forks)
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lorafusion_jax", "serve", *options],
                stdout=log,
                stderr=log,
                env=env,
            )

    @property
    def url(self) -> str:
        return (self.home / "address").read_text()

    def end(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(120)

    def worker(self) -> int:
        """Returns the number of the worker's process."""
        db = self.database()

        def pid() -> int | None:
            with db.read() as connection:
                return connection.scalar(select(t.groups.c.pid))

        wait_for(lambda: pid() is not None)
        worker = pid()
        db.close()
        assert worker is not None
        return worker

    def database(self) -> Database:
        return Database(Settings(home=self.home, bases={}, places={}).database)


def wait_for(there: Callable[[], bool], every_s: float = 0.05) -> None:
    until = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < until
        time.sleep(every_s)


def workers_of(server: Server) -> list[int]:
    """Processes of workers of a server's home, whoever started them."""
    address = f"unix:{Settings(home=server.home, bases={}, places={}).socket}"
    processes = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    return [pid for pid in processes if (identity := identity_of(pid)) is not None and identity[0] == address]


def orphans_of(server: Server) -> list[str]:
    """Workers of a server that has ended, and folders of jobs that its database does not know, or knows as deleted."""
    with closing(server.database()) as db, db.read() as connection:
        query = select(t.jobs.c.id).where(t.jobs.c.state != "deleted")
        known = set(connection.execute(query).scalars())
    folders = {folder.name for folder in (server.home / "jobs").glob("job-*")}
    return [f"worker {pid}" for pid in workers_of(server)] + sorted(folders - known)


def specs(folder: Path, count: int, *, epochs: int = 12) -> Iterator[tuple[str, dict]]:
    """Yields owners and jobs; every third job learns preferences."""
    for number in range(count):
        rows = write_rows(folder, f"rows-{number}", 18 + number, longest=10)
        objective = {"name": "dpo", "beta": 0.2} if number % 3 == 2 else {}
        if objective:  # the same texts, each preferred to the next
            texts = [json.loads(line) for line in (folder / rows).read_text().splitlines()]
            pairs = [
                {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
                for row, other in pairwise(texts)
            ]
            (folder / rows).write_text("".join(json.dumps(row) + "\n" for row in pairs))
        yield (
            OWNERS[number % 3],
            {
                "name": f"job-{number}",
                "base": "tiny",
                "data": {"train": str(folder / rows), "max_length": 32, "on_long": "drop"},
                "lora": {"rank": 2 + number % 3, "dropout": 0.1 * (number % 2), "targets": ["q_proj", "down_proj"]},
                "optim": {"lr": 0.01, "schedule": "constant"},
                "objective": objective,
                "batch": {"global_samples": 3 + number % 2},
                "epochs": epochs,
                "seed": number,
            },
        )


def free_seed(shard: int) -> random.Random:
    """Returns the draws of a shard."""
    return random.Random(f"shard {shard}")
