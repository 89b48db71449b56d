"""Input of the online scheduler: jobs and how they end, workers, users and faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from scheduling.errors import PlanError
from scheduling.online.shapes import LINEARS, ModelShape, base_name, resolve_base


@dataclass(frozen=True, slots=True)
class Job:
    """One adapter to train, known from its arrival on.

    Args:
        name: unique among the jobs.
        user: owner; users share the cluster max–min fairly.
        base: an entry of `scheduling.online.SHAPES`, a `ModelShape`, or an object with its attributes.
        arrival_s: seconds since 0.
        lengths: token counts of some samples of its data, in training order.
        global_batch: samples per optimizer step.
        steps: optimizer steps to take.
        rank: rank of its LoRA matrices.
        weight: share of a group relative to its other members.
        deadline_s: deadline, in seconds since 0. Jobs that would miss theirs go first.
        max_slowdown: bound on the time in groups over the isolated time on its fair share of the same GPUs.
        targets: projections with LoRA.
        priority: jobs of a higher priority go first, whatever their size.
        eval_every: optimizer steps between evaluations (0: none), for which the whole group stops.
        eval_tokens: tokens of its held-out data.
        kind: of its adapter; `Facts` may know that a group with it takes more memory.

    Raises:
        PlanError: `online.job`, `online.unknown-base`; the message names job and field.

    >>> Job("law", "ann", "llama-3.1-8b", 0.0, [512, 700], global_batch=8, steps=100).tokens
    484800.0
    """

    name: str
    user: str
    base: Any
    arrival_s: float
    lengths: Sequence[int]
    global_batch: int
    steps: int
    rank: int = 16
    weight: float = 1.0
    deadline_s: float | None = None
    max_slowdown: float = 1.3
    targets: tuple[str, ...] = LINEARS
    priority: int = 0
    eval_every: int = 0
    eval_tokens: int = 0
    kind: str = "lora"
    shape: ModelShape = field(init=False, repr=False, compare=False)
    base_name: str = field(init=False, repr=False, compare=False)
    tokens: float = field(init=False, repr=False, compare=False)  # expected tokens of all steps

    def __post_init__(self):
        for name in ("name", "user", "kind"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise PlanError("online.job", f"a job's {name} must be a non-empty string, not {getattr(self, name)!r}")
        lengths = np.asarray(self.lengths)
        if lengths.ndim != 1 or not lengths.size or lengths.dtype.kind not in "iu" or lengths.min() < 1:
            raise PlanError(
                "online.job", f"{self.name}: lengths must be whole numbers of tokens, at least one, all positive"
            )
        for name, least in (("global_batch", 1), ("steps", 1), ("rank", 1), ("eval_every", 0), ("eval_tokens", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                raise PlanError(
                    "online.job", f"{self.name}: {name} must be a whole number of at least {least}, not {value!r}"
                )
        self._check_number("arrival_s", 0.0, "give times in seconds since the start of the trace")
        self._check_number("weight", 0.0, "weight: 1.0 (hold a job back instead of giving it no weight)", strict=True)
        self._check_number("max_slowdown", 1.0, "max_slowdown: 1.3")
        if self.deadline_s is not None:
            self._check_number("deadline_s", self.arrival_s, "a deadline lies after the arrival")
        unknown = [target for target in self.targets if target not in LINEARS]
        if unknown or not self.targets:
            raise PlanError(
                "online.job", f"{self.name}: unknown targets {unknown}", fix=f"some of {', '.join(LINEARS)}"
            )
        object.__setattr__(self, "lengths", tuple(lengths.tolist()))
        object.__setattr__(self, "shape", resolve_base(self.base))
        object.__setattr__(self, "base_name", base_name(self.base))
        object.__setattr__(self, "tokens", float(self.steps * self.global_batch * lengths.mean()))

    def _check_number(self, name: str, least: float, fix: str, *, strict: bool = False) -> None:
        value = getattr(self, name)
        good = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
        if not good or value < least or (strict and value == least):
            raise PlanError(
                "online.job",
                f"{self.name}: {name} must be {'above' if strict else 'at least'} {least:g}, not {value!r}",
                fix=fix,
            )


@dataclass(frozen=True, slots=True)
class Worker:
    """GPUs of one kind on one host; a group never spans two workers.

    Args:
        name: unique among the workers.
        gpus: number of GPUs.
        memory_gib: memory of each GPU.
        device: device whose rates predict times, as in `scheduling.rates`.
    """

    name: str
    gpus: int
    memory_gib: float = 140.0
    device: str = "h200"

    def __post_init__(self):
        if not self.name:
            raise PlanError("online.worker", f"a worker's name must be a non-empty string, not {self.name!r}")
        if isinstance(self.gpus, bool) or self.gpus != int(self.gpus) or self.gpus < 1:
            raise PlanError(
                "online.worker", f"{self.name}: gpus must be a whole number of at least 1, not {self.gpus!r}"
            )
        if not (math.isfinite(self.memory_gib) and self.memory_gib > 0):
            raise PlanError("online.worker", f"{self.name}: memory_gib must be positive, not {self.memory_gib!r}")

    @property
    def kind(self) -> tuple[str, float]:
        """Key of workers that run a group equally fast."""
        return self.device, float(self.memory_gib)


@dataclass(frozen=True, slots=True)
class User:
    """A user's claim on the cluster.

    Args:
        weight: share of the cluster relative to other users who have work.
        max_gpus: quota on the user's share of GPUs in groups (None: no quota).
    """

    name: str
    weight: float = 1.0
    max_gpus: float | None = None

    def __post_init__(self):
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise PlanError(
                "online.user", f"{self.name}: weight must be above 0, not {self.weight!r}", fix="weight: 1.0"
            )
        if self.max_gpus is not None and not self.max_gpus > 0:
            raise PlanError("online.user", f"{self.name}: max_gpus must be above 0, not {self.max_gpus!r}")


@dataclass(frozen=True, slots=True)
class Fault:
    """Failure of a worker, with all its groups, and its return.

    Args:
        worker: its name.
        start_s: seconds since 0.
        duration_s: seconds until it is up again.
    """

    worker: str
    start_s: float
    duration_s: float

    def __post_init__(self):
        if not (math.isfinite(self.start_s) and self.start_s >= 0 and math.isfinite(self.duration_s)):
            raise PlanError("online.fault", f"fault of {self.worker}: start_s must be at least 0, not {self.start_s!r}")
        if self.duration_s <= 0:
            raise PlanError(
                "online.fault", f"fault of {self.worker}: duration_s must be above 0, not {self.duration_s!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """An end of a job that its scheduler does not foresee.

    Args:
        job: its name.
        how: "early" if it stops with a result, for example because its loss grows; "failed"; "cancelled" by its user.
        step: optimizer step after which it stops early or fails.
        time_s: seconds since 0 at which it is cancelled, waiting or not.
    """

    job: str
    how: Literal["early", "failed", "cancelled"]
    step: int | None = None
    time_s: float | None = None

    def __post_init__(self):
        number, other = (self.time_s, self.step) if self.how == "cancelled" else (self.step, self.time_s)
        if self.how not in ("early", "failed", "cancelled") or number is None or other is not None:
            raise PlanError(
                "online.end",
                f"end of {self.job}: {self.how!r} with step {self.step!r} and time_s {self.time_s!r}",
                fix="early and failed have a step, cancelled has a time_s",
            )
        if not (math.isfinite(number) and number >= (0 if self.how == "cancelled" else 1)):
            raise PlanError("online.end", f"end of {self.job}: {number!r} is no step of at least 1 or time from 0 on")


def check_input(
    jobs: Sequence[Job], workers: Sequence[Worker], faults: Sequence[Fault] = (), ends: Sequence[End] = ()
) -> None:
    """Checks that names are unique, that there is a worker, and that faults and ends name known workers and jobs.

    Raises:
        PlanError: `online.duplicate-name`, `online.no-workers`, `online.fault`, `online.end`.
    """
    for noun, names in (("jobs", [job.name for job in jobs]), ("workers", [worker.name for worker in workers])):
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise PlanError("online.duplicate-name", f"two {noun} have the name {twice!r}", fix="rename one of them")
    if not workers:
        raise PlanError("online.no-workers", "a cluster needs at least one worker", fix='[Worker("host0", 8)]')
    unknown = [fault.worker for fault in faults if fault.worker not in {worker.name for worker in workers}]
    if unknown:
        raise PlanError("online.fault", f"a fault of {unknown[0]!r}, which is no worker")
    of = {job.name: job for job in jobs}
    for end in ends:
        if end.job not in of:
            raise PlanError("online.end", f"an end of {end.job!r}, which is no job")
        if end.time_s is not None and end.time_s < of[end.job].arrival_s:
            raise PlanError("online.end", f"{end.job} is cancelled at {end.time_s!r} s, before it arrives")
    if len({end.job for end in ends}) < len(ends):
        raise PlanError("online.end", "a job has two ends")
