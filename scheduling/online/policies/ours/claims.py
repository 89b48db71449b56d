"""Claims of jobs: what a step of each is worth, and which jobs have waited long.

A GPU-second of isolated work is worth the seconds by which it brings forward all jobs that it delays. These are the job
itself, which needs all of its best mesh, and every job that comes after it, behind which all GPUs work:

    claim = 1 / GPUs of its best mesh + QUEUE · later jobs / GPUs of the cluster

With QUEUE = 1 this is the derivative of the sum of completion times, if no more jobs come. It prices order and sharing
alike: a group of two gains if it does so much more work than its first member alone that the delay of that one is made
up for. Urgent jobs and higher priorities claim more than all others.

The shortest jobs come first, and those of users who received less than their share somewhat sooner. While one user
floods the cluster, jobs of users who ask for no more than their share go first as soon as they would end late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from scheduling.errors import PlanError
from scheduling.online.patience import (
    PATIENCE,
    StepCost,
    StepCosts,
    fair_times_s,
    owed_s,
    user_shares,
    users_above_share,
)
from scheduling.online.policies.ours.settings import Settings
from scheduling.online.state import ClusterState, JobState, UserState

QUEUE = 2.0  # for every job that waits, one more comes before the queue is gone
URGENT = 30.0  # claim of an urgent job, in multiples of the largest claim
PRIORITY = 100.0  # the same per level of priority
FLOOD = 4.0  # times that the jobs of one user would fill all GPUs, beyond which the others are protected
LATE = 1.25  # a protected job goes first if it would end after this multiple of its fair time
SIMILAR = 0.8  # ratio of sizes within which jobs of users within their share come first
OWED = 0.5  # share of a job's work that its user has to be owed
OWED_S = 1800.0  # difference between users, in GPU-seconds, below which they count as equal
LEAST, MOST = 0.05, 20.0  # bounds on a user's factor
SPENT = 0.98  # share of the patience after which no later job may start first
SLACK, SLACK_S = 1.5, 120.0  # a deadline is near if it is less than this multiple of the remaining time away, and this


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Claims of all jobs at one time.

    Args:
        work: GPU-seconds of an isolated step.
        step: value of a step.
        order: value of a GPU-second of work: the order of jobs.
        urgent: waiting jobs to start as soon as possible, by arrival.
        overdue: those of them that no later job of their weight may overtake.
        pressed: names of all jobs, waiting or not, that have waited long or would miss their deadline soon.
        least_rate: steps per second below which a job of a user within its share joins no group.
    """

    work: Mapping[str, float]
    step: Mapping[str, float]
    order: Mapping[str, float]
    urgent: tuple[JobState, ...]
    overdue: tuple[JobState, ...]
    pressed: frozenset[str]
    least_rate: Mapping[str, float]


def weigh(state: ClusterState, now: float, settings: Settings, step_cost: StepCosts) -> Claims:
    """Computes the claims of all jobs.

    Raises:
        PlanError: `online.speed`.
    """
    costs = {name: _checked_cost(job_state, step_cost) for name, job_state in state.jobs.items()}
    left_s = {name: costs[name].seconds * job_state.left_steps(now) for name, job_state in state.jobs.items()}
    fair_s, demand = fair_times_s(state, costs), _demand(state, costs)
    patience_s = _patience_s(state, fair_s)
    within = users_within_share(state, demand)
    order = _values(state, left_s, costs, settings, within)
    late_s = _late_s(state, costs, left_s, fair_s, _protected_users(state, demand, within))
    largest = max(order.values(), default=1.0)
    urgent: list[JobState] = []
    pressed: set[str] = set()
    for name, job_state in state.jobs.items():
        longest_s = min(settings.urgent * patience_s[name], late_s.get(name, inf))
        if settings.urgency and order[name] and is_urgent(job_state, now, left_s[name], longest_s):
            order[name] = URGENT * largest
            pressed.add(name)
            if job_state.group is None:
                urgent.append(job_state)
        if job_state.job.priority:
            order[name] *= (PRIORITY * largest) ** job_state.job.priority
    urgent.sort(key=lambda job_state: (job_state.job.arrival_s, job_state.job.name))
    return Claims(
        work={name: cost.gpu_s for name, cost in costs.items()},
        step={name: order[name] * cost.gpu_s for name, cost in costs.items()},
        order=order,
        urgent=tuple(urgent),
        overdue=tuple(
            job_state for job_state in urgent if job_state.waited(now) > SPENT * patience_s[job_state.job.name]
        ),
        pressed=frozenset(pressed),
        least_rate={
            name: 1 / costs[name].seconds / job_state.job.max_slowdown
            for name, job_state in state.jobs.items()
            if job_state.job.user in within and costs[name].seconds
        },
    )


def is_urgent(job_state: JobState, now: float, left_s: float, longest_wait_s: float) -> bool:
    """Whether a job has waited long, or would miss its deadline soon."""
    deadline_s = job_state.job.deadline_s
    if deadline_s is not None and now < deadline_s < now + SLACK * left_s + SLACK_S:
        return True
    return job_state.waited(now) > longest_wait_s


def _values(
    state: ClusterState,
    left_s: Mapping[str, float],
    costs: Mapping[str, StepCost],
    settings: Settings,
    within: frozenset[str],
) -> dict[str, float]:
    """The value of a GPU-second of each job's work; 0 if the job fits on no worker that is up."""
    gpus = sum(worker.gpus for worker in state.workers.values())
    values, fitting = dict.fromkeys(state.jobs, 0.0), [name for name in state.jobs if costs[name].gpu_s]
    if settings.short_first:
        work_s = {name: left_s[name] * costs[name].gpu_s / costs[name].seconds for name in fitting}
        fitting = order_of(state, work_s, within, settings.fairness)
    for position, name in enumerate(fitting):
        later = len(fitting) - 1 - position
        values[name] = costs[name].seconds / costs[name].gpu_s + QUEUE * later / gpus
    return values


def order_of(state: ClusterState, work_s: Mapping[str, float], within: frozenset[str], fairness: float) -> list[str]:
    """Jobs by  work / (what their user was entitled to / what it got)^(2 · fairness), and by 0.8 of it for some.

    Args:
        work_s: GPU-seconds that each job has left.
        within: users who ask for no more than their share. They come first among users with jobs of similar size.
    """
    factor = {name: user_factor(user) ** (2 * fairness) for name, user in state.users.items()}
    scaled_work: dict[str, float] = {}
    for name, work in work_s.items():
        user = state.jobs[name].job.user
        scaled_work[name] = work / factor.get(user, 1.0) * (SIMILAR if user in within and fairness else 1.0)
    return sorted(scaled_work, key=scaled_work.__getitem__)


def user_factor(user: UserState) -> float:
    """Above 1 for a user that received less than its max–min fair share of the cluster."""
    return min(MOST, max(LEAST, (user.entitled + OWED_S) / (max(0.0, user.got) + OWED_S)))


def _patience_s(state: ClusterState, fair_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds that each job may wait while later jobs of its weight start; infinite for users above their share."""
    above = users_above_share(state)
    return {
        name: inf if job_state.job.user in above else PATIENCE * fair_s[name] for name, job_state in state.jobs.items()
    }


def users_within_share(state: ClusterState, demand: Mapping[str, float]) -> frozenset[str]:
    """Users whose jobs ask for no more GPUs than their share."""
    share = user_shares(state)
    if len(share) < 2:
        return frozenset()  # one user has nobody to be protected from
    return frozenset(user for user in share if demand[user] <= share[user])


def _protected_users(state: ClusterState, demand: Mapping[str, float], within: frozenset[str]) -> frozenset[str]:
    """Users within their share, while another one floods the cluster."""
    gpus = sum(worker.gpus for worker in state.workers.values())
    return within if max(demand.values(), default=0.0) > FLOOD * gpus else frozenset()


def _demand(state: ClusterState, costs: Mapping[str, StepCost]) -> dict[str, float]:
    """GPUs that the jobs of every user would take at once, each on its best mesh."""
    demand: dict[str, float] = {}
    for name, job_state in state.jobs.items():
        gpus = costs[name].gpu_s / costs[name].seconds if costs[name].seconds else 0.0
        demand[job_state.job.user] = demand.get(job_state.job.user, 0.0) + gpus
    return demand


def _late_s(
    state: ClusterState,
    costs: Mapping[str, StepCost],
    left_s: Mapping[str, float],
    fair_s: Mapping[str, float],
    modest: frozenset[str],
) -> dict[str, float]:
    """Seconds after which a job of a modest user goes first, or stays, if its user is owed a part of its work."""
    owed, late_s = owed_s(state), dict[str, float]()
    for name, job_state in state.jobs.items():
        cost = costs[name]
        if job_state.job.user in modest and cost.seconds:
            work_s = left_s[name] * cost.gpu_s / cost.seconds
            if job_state.group is not None or owed.get(job_state.job.user, 0.0) >= OWED * work_s:
                late_s[name] = LATE * fair_s[name] - cost.seconds * job_state.job.steps
    return late_s


def _checked_cost(job_state: JobState, step_cost: StepCosts) -> StepCost:
    if not 0 < job_state.speed < inf:
        raise PlanError(
            "online.speed", f"{job_state.job.name}: speed must be above 0, not {job_state.speed!r}", fix="speed: 1.0"
        )
    cost = step_cost(job_state.job)
    return cost if job_state.speed == 1.0 else cost.at_speed(job_state.speed)
