"""The folder of a run: where everything lies, and what must be there before a run goes on.

config.yaml  plan.json  run.json       resolved configuration, plan, versions and digests; all as of now: a run may move
metrics.jsonl  events.jsonl            numbers and changes of state
run.lock                               which process trains it
state/<slot>/                          checkpoints
adapters/<name>/step-000250/           PEFT folders; `latest` points to the newest
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from lorafusion_jax.checkpoint.run_lock import run_lock
from lorafusion_jax.config.load import dump_config, read_resolved
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.errors import CheckpointError
from scheduling import Plan


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def record_file(self) -> Path:
        return self.path / "run.json"

    def adapter_step(self, name: str, step: int) -> Path:
        return self.path / "adapters" / name / f"step-{step:06d}"

    def latest(self, name: str) -> Path | None:
        """Newest exported folder of an adapter."""
        steps = sorted((self.path / "adapters" / name).glob("step-*"))
        return steps[-1] if steps else None

    def must_be_new(self, plan: Plan) -> None:
        """Makes sure that no run would be overwritten.

        Raises:
            CheckpointError: the folder already holds a run (`run.exists`), also one of another plan (`run.other-plan`).
        """
        if self.plan_file.exists():
            other = self.read_plan().digest
            if other != plan.digest:
                raise CheckpointError(
                    "run.other-plan",
                    f"{self.path} holds a run of another plan.",
                    why=f"its plan is {other}, this one is {plan.digest}",
                    fix="choose another --out, or lorafusion resume to go on with that run",
                )
            raise CheckpointError(
                "run.exists",
                f"{self.path} already holds this run.",
                fix=f"lorafusion resume {self.path}   or another --out",
            )

    def create(self, config: JobConfig, plan: Plan, record: dict) -> None:
        """Starts a run folder; see `must_be_new`."""
        self.must_be_new(plan)
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(config)
        self.write_record(record)
        _write(self.plan_file, plan.to_json())  # last: its presence means that the folder is complete

    def lock(self) -> AbstractContextManager[None]:
        """Keeps other processes from training this run; see `run_lock`."""
        self._need("plan.json")  # else the lock would begin a folder
        return run_lock(self.path)

    def read_config(self) -> JobConfig:
        self._need("config.yaml")
        return read_resolved(self.path / "config.yaml")

    def write_config(self, config: JobConfig) -> None:
        """Notes the settings that a run goes on with."""
        _write(self.path / "config.yaml", dump_config(config))

    def write_move(self, plan: Plan, slot: int) -> None:
        """Replaces the plan of a run that goes on elsewhere from its checkpoint at `slot`.

        The checkpoints up to `slot` belong to both plans, which are equal until there. run.json knows the new plan
        before it is there, so the run can go on wherever this ends; without the new plan, it plans again.
        """
        record = self.read_record()
        move = {"slot": slot, "stages": plan.num_stages, "replicas": plan.data_parallel, "plan": plan.digest}
        self.write_record(record | {"moves": [*record.get("moves", ()), move]})
        (self.path / "timeline.json").unlink(missing_ok=True)  # its slots may be others in the new plan
        _write(self.plan_file, plan.to_json())

    def read_plan(self) -> Plan:
        """Reads the plan.

        Raises:
            CheckpointError: it is missing or was changed.
        """
        self._need("plan.json")
        try:
            return Plan.from_json(self.plan_file.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise CheckpointError("run.plan", f"{self.plan_file} is damaged.", why=str(problem)) from None

    def read_record(self) -> dict:
        self._need("run.json")
        try:
            return json.loads(self.record_file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as problem:
            raise CheckpointError("run.record", f"{self.record_file} is damaged.", why=str(problem)) from None

    def write_record(self, record: dict) -> None:
        _write(self.record_file, json.dumps(record, indent=1))

    def mark_latest(self, name: str, keep: int) -> None:
        """Points `latest` to the newest exported folder and removes all but the newest few."""
        home = self.path / "adapters" / name
        steps = sorted(home.glob("step-*"))
        for old in steps[:-keep]:
            shutil.rmtree(old)
        link = home / "latest.part"
        link.unlink(missing_ok=True)
        os.symlink(steps[-1].name, link)
        link.replace(home / "latest")

    def _need(self, file: str) -> None:
        if not (self.path / file).is_file():
            raise CheckpointError(
                "run.missing",
                f"{self.path} is no run folder: {file} is not there.",
                fix="lorafusion train jobs.yaml --out runs/NAME starts one",
            )


def _write(path: Path, text: str) -> None:
    """Writes a whole file or nothing; what is written later comes after it on the disk, too."""
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
