"""The service as a whole: jobs of three users survive pauses, weights, a killed worker and a killed server.

Every adapter equals the one that the service trains when nothing else runs, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from more_cases import nightly
from safetensors.numpy import load_file
from small_jobs import write_rows
from sqlalchemy import select

from lorafusion_serve.client import Client, Job
from lorafusion_serve.settings import Settings
from lorafusion_serve.store import tables as t
from lorafusion_serve.store.database import Database
from lorafusion_serve.store.keys import add_key

SETTINGS = ("base.dtype=float32", "batch.capacity_tokens=128", "batch.tile_tokens=16", "train.block_layers=1")
PATIENCE_S = 900


class Server:
    """`lorafusion serve` as a process."""

    def __init__(self, home: Path, base: Path):
        self.home, self._base = home, base
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        (self.home / "address").unlink(missing_ok=True)
        options = ["--home", str(self.home), "--base", f"tiny={self._base}", "--places", "4:3", "--port", "0"]
        options += ["--reproducible", "--save-s", "0.5", "--lease-s", "60", *SETTINGS]
        with (self.home / "server.txt").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lorafusion_jax", "serve", *options],
                stdout=log,
                stderr=log,
                env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
            )
        wait_for(lambda: (self.home / "address").exists())

    @property
    def url(self) -> str:
        return (self.home / "address").read_text()

    def end(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(120)

    def worker(self) -> int:
        db = Database(Settings(home=self.home, bases={}, places={}).database)

        def pid() -> int | None:
            with db.read() as connection:
                return connection.scalar(select(t.groups.c.pid))

        wait_for(lambda: pid() is not None)
        worker = pid()
        db.close()
        assert worker is not None
        return worker


def wait_for(there: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def served(home: Path, base: Path) -> Iterator[tuple[Server, dict[str, str]]]:
    home.mkdir()
    db = Database(Settings(home=home, bases={}, places={}).database)
    with db.write() as connection:
        keys = {owner: add_key(connection, owner)[1] for owner in ("ana", "ben", "cleo")}
    db.close()
    server = Server(home, base)
    server.start()
    try:
        yield server, keys
    finally:
        server.end(signal.SIGTERM)


def specs(folder: Path, count: int) -> Iterator[tuple[str, dict]]:
    owners = ("ana", "ben", "cleo")
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
            owners[number % 3],
            {
                "name": f"job-{number}",
                "base": "tiny",
                "data": {"train": str(folder / rows), "max_length": 32, "on_long": "drop"},
                "lora": {"rank": 2 + number % 3, "dropout": 0.1 * (number % 2), "targets": ["q_proj", "down_proj"]},
                "optim": {"lr": 0.01, "schedule": "constant"},
                "objective": objective,
                "batch": {"global_samples": 3 + number % 2},
                "epochs": 12,
                "seed": number,
            },
        )


def step(job: Job) -> int:
    shown = job.show()
    assert shown["state"] not in ("rejected", "failed", "done"), json.dumps(shown)
    return shown["step"]


@pytest.mark.parametrize("count", [3, nightly(12)])
def test_jobs_end_as_if_nothing_had_happened(quick_compiles, tiny_base, tmp_path, count):
    asked = list(specs(tmp_path, count))
    with served(tmp_path / "home", tiny_base) as (server, keys):

        def client(owner: str) -> Client:
            return Client(server.url, keys[owner])

        jobs = [client(owner).submit(spec) for owner, spec in asked]

        def again(number: int) -> Job:  # the server listens elsewhere after each start
            return Job(client(asked[number][0]), jobs[number].id)

        wait_for(lambda: step(again(0)) >= 2)
        again(0).pause()
        again(1).set_weight(3.0)
        wait_for(lambda: again(0).show()["state"] == "paused")
        os.kill(server.worker(), signal.SIGKILL)
        again(0).resume()
        wait_for(lambda: step(again(1)) >= 3)
        server.end(signal.SIGKILL)
        server.start()
        last = count - 1
        if count > 3:
            again(last).cancel()
        kept = range(last if count > 3 else count)
        adapters = [again(number).wait(PATIENCE_S).adapter(tmp_path / f"joint-{number}") for number in kept]
        if count > 3:
            wait_for(lambda: again(last).show()["state"] == "cancelled")
        events = [row["event"] for row in again(1).show()["transitions"]]
        assert "lost" in events
        assert again(1).show()["tries"] >= 1
        for number, joint in enumerate(adapters):
            owner, spec = asked[number]
            alone = client(owner).submit(spec).wait(PATIENCE_S).adapter(tmp_path / f"alone-{number}")
            ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (joint, alone))
            assert ours.keys() == theirs.keys()
            assert [key for key in ours if not (ours[key] == theirs[key]).all()] == []
            steps = [row["step"] for row in again(number).metrics() if row["kind"] == "step"]
            assert steps == list(range(1, again(number).show()["steps"] + 1))  # each once, whatever ran twice
