"""Claims of jobs: what a step of each is worth, and which jobs have waited long.

A job's claim per GPU-second of isolated work is  user / (left + START)^α.  It is larger for urgent jobs and higher
priorities. Sorted by it, short jobs come first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from scheduling.errors import PlanError
from scheduling.online.check import PATIENCE
from scheduling.online.policies.ours.settings import Settings
from scheduling.online.state import ClusterState, JobState, UserState
from scheduling.online.types import Job

URGENT = 30.0  # factor on the claim of an urgent job
PRIORITY = 100.0  # factor on the claim per level of priority
OWED_S = 1800.0  # difference between users, in GPU-seconds, below which they count as equal
LEAST, MOST = 0.05, 20.0  # bounds on a user's factor
SPENT = 0.98  # share of the patience after which no later job may start first


class StepCost(NamedTuple):
    """An isolated step on the best mesh; zeros if the job fits on no worker that is up."""

    gpu_s: float
    seconds: float

    def at_speed(self, speed: float) -> StepCost:
        """The cost of a job that trains at `speed` times its predicted rate."""
        return StepCost(self.gpu_s / speed, self.seconds / speed)


StepCosts = Callable[[Job], StepCost]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Claims of all jobs at one time.

    Args:
        work: GPU-seconds of an isolated step.
        step: utility of a step per second.
        order: utility of a GPU-second of work per second: the order of jobs.
        urgent: waiting jobs to start as soon as possible, by arrival.
        overdue: those of them that no later job of their weight may overtake.
        pressed: names of all jobs, waiting or not, that have waited long or would miss their deadline soon.
    """

    work: Mapping[str, float]
    step: Mapping[str, float]
    order: Mapping[str, float]
    urgent: tuple[JobState, ...]
    overdue: tuple[JobState, ...]
    pressed: frozenset[str]


def weigh(state: ClusterState, now: float, settings: Settings, step_cost: StepCosts) -> Claims:
    """Computes the claims of all jobs.

    Raises:
        PlanError: `online.speed`.
    """
    users = {name: user_factor(user, settings.fairness) for name, user in state.users.items()}
    work: dict[str, float] = {}
    step: dict[str, float] = {}
    order: dict[str, float] = {}
    urgent: list[tuple[JobState, float]] = []  # with their patience
    pressed: set[str] = set()
    for name, one in state.jobs.items():
        if not 0 < one.speed < inf:
            raise PlanError("online.speed", f"{name}: speed must be above 0, not {one.speed!r}", fix="speed: 1.0")
        cost = step_cost(one.job)
        if one.speed != 1.0:
            cost = cost.at_speed(one.speed)
        work[name], step[name], order[name] = cost.gpu_s, 0.0, 0.0
        if not cost.gpu_s:
            continue
        left = one.left_steps(now)
        claim = users.get(one.job.user, 1.0) / (left * cost.gpu_s + settings.start_work_s) ** settings.sharpness
        if one.job.priority:
            claim *= PRIORITY**one.job.priority
        if settings.urgency and is_urgent(one, now, left * cost.seconds, settings.urgent * patience_s(one.job, cost)):
            claim *= URGENT
            pressed.add(name)
            if one.group is None:
                urgent.append((one, patience_s(one.job, cost)))
        order[name], step[name] = claim, claim * cost.gpu_s
    urgent.sort(key=lambda each: (each[0].job.arrival_s, each[0].job.name))
    overdue = tuple(one for one, longest_s in urgent if one.waited(now) > SPENT * longest_s)
    return Claims(
        work=work,
        step=step,
        order=order,
        urgent=tuple(one for one, _ in urgent),
        overdue=overdue,
        pressed=frozenset(pressed),
    )


def user_factor(user: UserState, fairness: float) -> float:
    """Raises the claims of a user that received less than its max–min fair share of the cluster."""
    owed = (user.entitled + OWED_S) / (max(0.0, user.got) + OWED_S)
    return min(MOST, max(LEAST, owed**fairness))


def is_urgent(one: JobState, now: float, left_s: float, longest_wait_s: float) -> bool:
    """Whether a job has waited long, or would miss its deadline soon."""
    deadline_s = one.job.deadline_s
    late = deadline_s is not None and now < deadline_s < now + 1.5 * left_s + 120.0
    return late or one.waited(now) > longest_wait_s


def patience_s(job: Job, cost: StepCost) -> float:
    """Seconds that a job may wait while later jobs of its weight start."""
    return PATIENCE * cost.seconds * job.steps
