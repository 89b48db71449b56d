"""Decides which sessions there are and which job trains in which: one session for all, or a policy of the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lorafusion_jax.config.places import Places
from lorafusion_jax.serve.control.session import LOCAL, SessionPlan
from lorafusion_jax.serve.control.shares import Shares
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.states import ON_WORKER
from lorafusion_jax.serve.store.jobs import Job as Row
from lorafusion_jax.serve.store.jobs import is_suspect
from lorafusion_jax.serve.store.keys import Limits

GROUP = "g0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What shall be.

    Args:
        sessions: by name.
        group: job → its session; other jobs wait.
        decisions: text of what was decided since the last round.
        refused: (policy, why) of decisions that did not take effect.
    """

    sessions: Mapping[str, SessionPlan]
    group: Mapping[str, str]
    decisions: Sequence[str] = ()
    refused: Sequence[tuple[str, str]] = ()


class Scheduler(Protocol):
    """Called every round."""

    def count_hosts(self, hosts: Callable[[int], int | None]) -> None:
        """Looks which hosts are lost.

        Args:
            hosts: (GPUs of a host) → how many of them are up; see `Launcher.hosts`.
        """
        ...

    def decide(
        self, rows: Sequence[Row], ready: Mapping[str, bool], limits: Mapping[str, Limits] = {}
    ) -> Configuration:
        """Returns what shall be.

        Args:
            rows: jobs that may run, by priority and then arrival.
            ready: session → whether it trains.
            limits: of users that have other ones than the default.
        """
        ...

    def order(self, rows: Sequence[Row], limits: Mapping[str, Limits]) -> list[Row]:
        """Returns the jobs that wait, in the order in which they are expected to start."""
        ...

    def full(self, row: Row, rows: Sequence[Row], limits: Limits) -> str:
        """Says what a job that waits is waiting for."""
        ...

    def refuses(self, row: Row) -> str:
        """Says why a job can never run; empty if it can."""
        ...

    def adopt(self, rows: Sequence[Mapping[str, Any]], jobs: Sequence[Row]) -> None:
        """Goes on with the sessions of an earlier server, rows of `groups`, and the jobs in them."""
        ...


class OneSession:
    """One session of the only base, on all devices. Users share its places.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic):
        self._plan = SessionPlan(base=next(iter(settings.bases), ""), places=dict(settings.places))
        self._shares = Shares(Places.of(self._plan.places), settle_s=settings.yield_s)
        self._clock = clock

    def count_hosts(self, hosts: Callable[[int], int | None]) -> None:
        del hosts

    def decide(
        self, rows: Sequence[Row], ready: Mapping[str, bool], limits: Mapping[str, Limits] = {}
    ) -> Configuration:
        del ready
        candidates = [row for row in rows if row["base"] == self._plan.base]
        jobs = self._shares.choose(candidates, limits, self._clock())
        return Configuration(sessions={GROUP: self._plan}, group=dict.fromkeys(jobs, GROUP))

    def order(self, rows: Sequence[Row], limits: Mapping[str, Limits]) -> list[Row]:
        return self._shares.order(rows, limits)

    def full(self, row: Row, rows: Sequence[Row], limits: Limits) -> str:
        return no_base(row["base"], [self._plan.base]) or self._shares.full(row, rows, limits)

    def refuses(self, row: Row) -> str:
        del row
        return ""

    def adopt(self, rows: Sequence[Mapping[str, Any]], jobs: Sequence[Row]) -> None:
        del rows, jobs


def no_base(base: str, served: Collection[str]) -> str:
    """What a job waits for whose base a later server does not have; empty if it has."""
    return "" if base in served else f"this service has no base {base}: add --base {base}=FOLDER to its start"


def plan_of_row(row: Mapping[str, Any]) -> SessionPlan:
    """Returns the session of a row of `groups`."""
    return SessionPlan(
        base=row["base"],
        places=row["places"],
        gpus=tuple(row["gpus"]),
        mesh=row["mesh"],
        capacity_tokens=row["capacity"],
        host=row["host"] or LOCAL,
    )


def jobs_tried_alone(rows: Sequence[Row], group: Mapping[str, str]) -> dict[str, str]:
    """Session → the job that has it for itself now.

    The worker of several jobs was lost twice, and one of them may be the reason. Each of them trains alone until it has
    made some progress, so that only the one that ends its worker fails.

    Args:
        group: job → its session.
    """
    job_by_session: dict[str, Row] = {}
    for job in filter(is_suspect, rows):
        name = group.get(job["id"], "")
        if name not in job_by_session or (job["state"] in ON_WORKER and job_by_session[name]["state"] not in ON_WORKER):
            job_by_session[name] = job
    return {name: job["id"] for name, job in job_by_session.items() if name}
