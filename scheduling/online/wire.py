"""States and decisions as JSON, for callers in another process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from scheduling.errors import PlanError
from scheduling.online.shapes import ModelShape, resolve_base
from scheduling.online.sharing import Mesh
from scheduling.online.state import ClusterState, Decision, GroupState, JobState, UserState
from scheduling.online.types import Job, User, Worker

SCHEMA = "lorafusion.cluster/1"
JOB_FIELDS = tuple(field.name for field in fields(Job) if field.init)


def state_to_json(state: ClusterState) -> str:
    """Writes a state; `state_from_json` reads it back exactly."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "time_s": state.time_s,
            "workers": [asdict(worker) for worker in state.workers.values()],
            "jobs": [_job_state(job) for job in state.jobs.values()],
            "groups": [asdict(group) for group in state.groups.values()],
            "users": [asdict(user) for user in state.users.values()],
        },
        allow_nan=False,
    )


def state_from_json(text: str) -> ClusterState:
    """Reads the output of `state_to_json`.

    Raises:
        PlanError: `online.format`, or the error of an invalid job or worker.
    """
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}")
        workers = [Worker(**worker) for worker in data["workers"]]
        jobs = [JobState(**(job | {"job": job_from_dict(job["job"])})) for job in data["jobs"]]
        groups = [
            GroupState(
                **(group | {name: tuple(group[name]) for name in ("gpus", "members")} | {"mesh": Mesh(*group["mesh"])})
            )
            for group in data["groups"]
        ]
        users = [UserState(**(user | {"user": User(**user["user"])})) for user in data["users"]]
        return ClusterState(
            time_s=data["time_s"],
            workers={worker.name: worker for worker in workers},
            jobs={job.job.name: job for job in jobs},
            groups={group.name: group for group in groups},
            users={user.user.name: user for user in users},
        )
    except PlanError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError("online.format", "this is not the state of a cluster", why=repr(error)) from None


def decisions_to_json(decisions: Sequence[Decision]) -> str:
    """Writes decisions; `decisions_from_json` reads them back exactly."""
    return json.dumps({"schema": SCHEMA, "decisions": [asdict(decision) for decision in decisions]}, allow_nan=False)


def decisions_from_json(text: str) -> list[Decision]:
    """Reads the output of `decisions_to_json`.

    Raises:
        PlanError: `online.format`.
    """
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}")
        return [
            Decision(
                **(
                    decision
                    | {name: tuple(decision[name]) for name in ("gpus", "members")}
                    | {"mesh": None if decision["mesh"] is None else Mesh(*decision["mesh"])}
                )
            )
            for decision in data["decisions"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError("online.format", "these are not decisions", why=repr(error)) from None


def job_to_dict(job: Job) -> dict[str, Any]:
    """Arguments of a job as plain values."""
    data = {name: getattr(job, name) for name in JOB_FIELDS}
    data["base"] = job.base if isinstance(job.base, str) else asdict(resolve_base(job.base))
    return data | {"lengths": list(job.lengths), "targets": list(job.targets)}


def job_from_dict(data: dict[str, Any]) -> Job:
    """Reads the output of `job_to_dict`."""
    base: Any = data["base"]
    return Job(
        **(
            data
            | {
                "base": base if isinstance(base, str) else ModelShape(**base),
                "targets": tuple(data.get("targets") or Job.__dataclass_fields__["targets"].default),
            }
        )
    )


def _job_state(state: JobState) -> dict[str, Any]:
    data = {field.name: getattr(state, field.name) for field in fields(JobState)}
    return data | {"job": job_to_dict(state.job)}
