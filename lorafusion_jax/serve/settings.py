"""Settings of a service and the places of its files."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafusion_jax.errors import ConfigError

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
        training_api: mount the routes of the training API.
        jobs_share: weight of all jobs together beside each owner of models of the training API.
        yield_s: seconds in its place after which a job leaves it to a model, or to a job of equal priority.
        sampling_share: of the devices' time for samples while slots wait, too.
        sampler_places: adapters that are sampled from at a time.
        artifacts: URL of fsspec below which finished adapters are published, too.
        handover: "vllm=URL" or "sglang=URL" of a server that finished adapters are loaded into, too.
        handover_key: of that server.
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
    training_api: bool = False
    jobs_share: float = 0.5
    yield_s: float = 60.0
    sampling_share: float = 0.5
    sampler_places: int = 16
    artifacts: str | None = None
    handover: str | None = None
    handover_key: str | None = field(default=None, repr=False)
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
        """Socket of the workers; in a folder of this user if the path of the home is too long for the system."""
        direct = self.home / "control.sock"
        if len(str(direct).encode()) <= LONGEST_SOCKET:
            return direct
        name = hashlib.sha256(str(self.home).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"lorafusion-{os.getuid()}" / f"{name}.sock"

    def make_socket_folder(self) -> None:
        """Makes the folder of a socket that is not in the home. All users may write beside it.

        Raises:
            ConfigError: `serve.socket`, somebody else made it, or can use it.
        """
        folder = self.socket.parent
        if folder == self.home or self.workers_at is not None:
            return
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(
                "serve.socket",
                f"{folder} is not a folder that only this user can use.",
                where=f"the path of the home {self.home} is too long for a socket",
                why="whoever can replace the socket could answer in place of the server",
                fix=f"choose a --home with a shorter path, or remove {folder}",
            )
