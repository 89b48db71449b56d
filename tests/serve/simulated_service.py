"""A controller with simulated workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from campaigns.service_process import wait_for
from simulated_worker import SimulatedLauncher
from sqlalchemy import select

from lorafusion_jax.serve.control.controller import Controller
from lorafusion_jax.serve.control.policy_scheduler import PolicyScheduler
from lorafusion_jax.serve.control.scheduler import OneSession
from lorafusion_jax.serve.server import open_database
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.jobs import Jobs
from scheduling.online import ChangeCosts, Rates

ID = "sha256-" + "0" * 64


class Service:
    """A controller with simulated workers.

    Args:
        policy: None: one session has all jobs.
    """

    def __init__(self, home: Path, base: Path, policy: Any, *, gpus: int = 2, **more: Any):
        bases = {"red": base, "blue": base}
        options: dict[str, Any] = {"places": {4: 2}, "policy": "ours", "batch": {"tile_tokens": 16}} | more
        self.settings = Settings(home=home, bases=bases, gpus=gpus, memory_gib=4.0, **options)
        self.db = open_database(self.settings)
        self.jobs = Jobs(self.db)
        rates = Rates(ChangeCosts(start_s=0.1, change_s=0.01, compile_s=0.01, move_s=0.01))
        chosen = policy(rates) if callable(policy) else policy
        self.scheduler = (
            OneSession(self.settings) if policy is None else PolicyScheduler(self.settings, chosen, rates=rates)
        )
        SimulatedLauncher.made, SimulatedLauncher.plans = {}, {}
        self.controller = Controller(self.settings, self.db, scheduler=self.scheduler, launcher=SimulatedLauncher())
        self.controller.start()

    def submit(self, name: str, base: str, steps: int = 30, rank: int = 4, owner: str = "ana") -> str:
        spec = {
            "name": name, "base": base, "data": {"train": ID}, "lora": {"rank": rank}, "optim": {}, "objective": {},
            "batch": {"global_samples": 4}, "steps": steps, "epochs": 1, "seed": 0, "weight": 1.0,
        }  # fmt: skip
        with self.db.write() as connection:
            job = self.jobs.submit(connection, owner, spec)["id"]
            self.jobs.change(
                connection, job, "accept", actor="test", rank=rank, steps=steps, lengths=[60, 20, 90], tokens=1000
            )
        return job

    def show(self, job: str) -> dict:
        with self.db.read() as connection:
            return self.jobs.get(connection, job)

    def placed(self, job: str) -> list[dict]:
        """Its placements, in order."""
        with self.db.read() as connection:
            query = select(t.placements).where(t.placements.c.job == job).order_by(t.placements.c.epoch)
            return [dict(row) for row in connection.execute(query).mappings()]

    def decisions(self) -> list[dict]:
        with self.db.read() as connection:
            return [dict(row) for row in connection.execute(select(t.decisions)).mappings()]

    def wait(self, *jobs: str) -> None:
        wait_for(lambda: all(self.show(job)["state"] in ("done", "failed") for job in jobs))
        for job in jobs:
            found = self.show(job)
            assert (found["state"], found["step"]) == ("done", found["steps"])
            with self.db.read() as connection:
                steps = [row["step"] for row in self.jobs.metrics(connection, job, 0, 1)]
            assert steps == list(range(1, found["steps"] + 1))

    def close(self) -> None:
        self.controller.close()
        self.db.close()
