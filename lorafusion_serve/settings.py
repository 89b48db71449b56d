"""Settings of a service and the places of its files."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ONE_SESSION = "one-session"  # instead of a policy: one session of one base for all jobs
LONGEST_SOCKET = 100  # bytes of a path that every system takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of `lorafusion serve`.

    Args:
        home: folder of the database, data sets, jobs and logs. It is resolved, so that it has one name however it is
            written.
        bases: name → folder of a base model.
        places: class → number of places of a session.
        hosts: number of equal hosts, for a policy.
        gpus, memory_gib, device: of each host, for a policy; the device's rates are those of `scheduling.rates`.
        policy: "one-session", or the policy that decides which sessions there are and who trains in which.
        base, mesh, batch, train: settings of every session, as the sections of a job file.
        reproducible: batches are split in one way, so that an adapter does not depend on its company by a single bit.
        ray: address of a Ray cluster on which workers run (None: on this machine).
        workers_at: host and port where workers of other machines reach the server (None: they are on this machine).
        mlora_compat: mount mLoRA's routes, which have no users.
        artifacts: URL of fsspec below which finished adapters are published, too.
        save_s: seconds between two saves of the state of a job.
        lease_s: seconds without a sign of a worker after which its jobs go back to the queue.
        most_upload, most_jobs: bytes of a data set, and live jobs of an owner.
        child_memory: bytes that the processes which read data may take together.
    """

    home: Path
    bases: Mapping[str, Path]
    places: Mapping[Any, int]
    hosts: int = 1
    gpus: int = 1
    memory_gib: float = 140.0
    device: str = "h200"
    policy: str = ONE_SESSION
    base: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    reproducible: bool = False
    ray: str | None = None
    workers_at: tuple[str, int] | None = None
    mlora_compat: bool = False
    artifacts: str | None = None
    save_s: float = 60.0
    lease_s: float = 30.0
    most_upload: int = 2 << 30
    most_jobs: int = 1000
    child_memory: int = 2 << 30

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", self.home.resolve())

    @property
    def database(self) -> Path:
        return self.home / "service.db"

    @property
    def datasets(self) -> Path:
        return self.home / "datasets"

    def path(self, stored: str) -> Path:
        """The file or folder of a path of the database, which is relative to the home."""
        return self.home / stored

    def job(self, job: str) -> Path:
        return self.home / "jobs" / job

    def log(self, group: str) -> Path:
        return self.home / "workers" / group / "log.txt"

    @property
    def socket(self) -> Path:
        """Socket of the workers; a short path elsewhere if that of the home is too long for the system."""
        direct = self.home / "control.sock"
        if len(str(direct).encode()) <= LONGEST_SOCKET:
            return direct
        name = hashlib.sha256(str(self.home).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"lorafusion-{name}.sock"
