"""Claims of jobs: what a step of each is worth, and which jobs have waited long.

A GPU-second of isolated work is worth the seconds by which it brings forward all jobs that it delays. These are the job
itself, which needs all of its best mesh, and every job that comes after it, behind which all GPUs work:

    claim = 1 / GPUs of its best mesh + QUEUE · later jobs / GPUs of the cluster

With QUEUE = 1 this is the derivative of the sum of completion times, if no more jobs come. It prices order and sharing
alike: a group of two gains if it does so much more work than its first member alone that the delay of that one is made
up for. Urgent jobs claim more than all others. Priorities are ordered: the policy decides for one after the other, the
highest first, and what a job of a higher priority would lose outweighs all that others gain (`Claims.at`).

The shortest jobs come first, and those of users who received less than their share somewhat sooner. While some users
flood the cluster, jobs of users who ask for no more than their share, or have only one, go first as soon as they would
end late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from scheduling.errors import PlanError
from scheduling.online.patience import (
    PATIENCE,
    Columns,
    Floats,
    StepCosts,
    columns_of,
    fair_columns_s,
    owed_s,
    user_shares,
    users_above_share,
)
from scheduling.online.policies.ours.settings import Settings
from scheduling.online.state import ClusterState, JobState, UserState

QUEUE = 2.0  # for every job that waits, one more comes before the queue is gone
URGENT = 30.0  # claim of an urgent job, in multiples of the largest claim
ABOVE = 100.0  # claim of a higher priority, in multiples of the largest claim, while jobs of a lower one are placed
FLOOD = 3.0  # times that the jobs of users above their share would fill all GPUs; beyond it the others are protected
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
        step: value of a step.
        order: value of a GPU-second of work: the order of jobs of one priority.
        priority: of jobs with one that is not 0.
        urgent: waiting jobs to start as soon as possible, by arrival.
        patience_s: seconds after which these are urgent, unless a deadline or their user makes them so before.
        overdue: those of them that no later job of their weight may overtake.
        pressed: names of all jobs, waiting or not, that have waited long or would miss their deadline soon.
        least_rate: steps per second below which a job joins no group; above 0 for users within their share.
    """

    step: Mapping[str, float]
    order: Mapping[str, float]
    urgent: tuple[JobState, ...]
    patience_s: Mapping[str, float]
    overdue: tuple[JobState, ...]
    pressed: frozenset[str]
    least_rate: Mapping[str, float]
    priority: Mapping[str, int] = field(default_factory=dict[str, int])

    def rank(self, name: str) -> tuple[int, float]:
        """The order of all jobs: larger comes first."""
        return self.priority.get(name, 0), self.order[name]

    def outranks(self, name: str, other: str, margin: float) -> bool:
        """Whether a job comes before another one, of the same priority by a margin."""
        (priority, order), (others_priority, others_order) = self.rank(name), self.rank(other)
        return priority > others_priority or (priority == others_priority and order > (1 + margin) * others_order)

    def at(self, priority: int) -> Claims:
        """The claims while jobs of a priority are placed: steps of higher ones are worth far more, of lower ones less.

        Only three classes, so that sums over the members of a group keep what each of them adds.
        """
        if not self.priority:
            return self
        above = ABOVE * max(self.order.values())
        classes = {-1: 1 / above, 0: 1.0, 1: above}

        def scaled(name: str, value: float) -> float:
            other = self.priority.get(name, 0)
            return value * classes[(other > priority) - (other < priority)]

        return replace(self, step={name: scaled(name, value) for name, value in self.step.items()})


def weigh(state: ClusterState, now: float, settings: Settings, step_cost: StepCosts) -> Claims:
    """Computes the claims of all jobs.

    Raises:
        PlanError: `online.speed`.
    """
    jobs, shares, owed = _checked_columns(state, step_cost), user_shares(state), owed_s(state)
    left_s, waited_s = jobs.seconds * jobs.left_steps(now), jobs.waited_s(now)
    demand = _demand(jobs)
    within = users_within_share(shares, demand)
    order = _values(state, jobs, left_s, settings, within)
    fair_s = fair_columns_s(jobs, shares)
    patience_s = np.where(jobs.of(users_above_share(owed)), inf, PATIENCE * fair_s)
    late_s = _late_s(jobs, left_s, fair_s, owed, _protected_users(jobs, state, demand, within))
    largest, longest_s = float(order.max(initial=-inf)), np.minimum(settings.urgent * patience_s, late_s)
    pressed = _pressed(jobs, now, left_s, waited_s, longest_s) if settings.urgency else []
    pressed = [index for index in pressed if order[index]]
    order[pressed] = URGENT * largest
    urgent = [index for index in pressed if jobs.states[index].group is None]
    urgent.sort(key=lambda index: (jobs.states[index].job.arrival_s, jobs.names[index]))
    priorities = {job_state.job.name: job_state.job.priority for job_state in jobs.states if job_state.job.priority}
    return Claims(
        step=jobs.by_name(order * jobs.gpu_s),
        order=jobs.by_name(order),
        urgent=tuple(jobs.states[index] for index in urgent),
        patience_s={jobs.names[index]: settings.urgent * patience_s[index] for index in urgent},
        overdue=tuple(jobs.states[index] for index in urgent if waited_s[index] > SPENT * patience_s[index]),
        pressed=frozenset(jobs.names[index] for index in pressed),
        least_rate=jobs.by_name(_least_rates(jobs, within)),
        priority=priorities,
    )


def _pressed(jobs: Columns, now: float, left_s: Floats, waited_s: Floats, longest_s: Floats) -> list[int]:
    """Jobs that have waited long, or would miss their deadline soon."""
    candidates = (waited_s > longest_s) | jobs.due
    return [
        index
        for index in np.flatnonzero(candidates).tolist()
        if is_urgent(jobs.states[index], now, left_s[index], longest_s[index])
    ]


def is_urgent(job_state: JobState, now: float, left_s: float, longest_wait_s: float) -> bool:
    """Whether a job has waited long, or would miss its deadline soon."""
    deadline_s = job_state.job.deadline_s
    if deadline_s is not None and now < deadline_s < now + SLACK * left_s + SLACK_S:
        return True
    return job_state.waited(now) > longest_wait_s


def _values(state: ClusterState, jobs: Columns, left_s: Floats, settings: Settings, within: frozenset[str]) -> Floats:
    """The value of a GPU-second of each job's work; 0 if the job fits on no worker that is up."""
    gpus = sum(worker.gpus for worker in state.workers.values())
    values, fitting = np.zeros(len(jobs.names)), np.flatnonzero(jobs.gpu_s)
    if settings.short_first:
        scaled_work = _scaled_work(state, jobs, left_s, within, settings.fairness)
        fitting = fitting[np.argsort(scaled_work[fitting], kind="stable")]
    later = np.arange(len(fitting) - 1, -1, -1)
    values[fitting] = jobs.seconds[fitting] / jobs.gpu_s[fitting] + QUEUE * later / gpus
    return values


def _scaled_work(state: ClusterState, jobs: Columns, left_s: Floats, within: frozenset[str], fairness: float) -> Floats:
    """work / (what their user was entitled to / what it got)^(2 · fairness) of every job, and 0.8 of it for some.

    Work is the GPU-seconds that a job has left. Users who ask for no more than their share come first among users with
    jobs of similar size.
    """
    factors = [user_factor(state.users[name]) ** (2 * fairness) if name in state.users else 1.0 for name in jobs.users]
    similar = np.where(jobs.of(within), SIMILAR if fairness else 1.0, 1.0)
    return jobs.quotient(left_s * jobs.gpu_s) / np.array(factors)[jobs.user] * similar


def user_factor(user: UserState) -> float:
    """Above 1 for a user that received less than its max–min fair share of the cluster."""
    return min(MOST, max(LEAST, (user.entitled + OWED_S) / (max(0.0, user.got) + OWED_S)))


def users_within_share(shares: Mapping[str, float], demand: Mapping[str, float]) -> frozenset[str]:
    """Users whose jobs ask for no more GPUs than their share."""
    if len(shares) < 2:
        return frozenset()  # one user has nobody to be protected from
    return frozenset(user for user in shares if demand[user] <= shares[user])


def _protected_users(
    jobs: Columns, state: ClusterState, demand: Mapping[str, float], within: frozenset[str]
) -> frozenset[str]:
    """Users within their share or with a single job, which cannot ask for less, while the others flood the cluster."""
    count = np.bincount(jobs.user, minlength=len(jobs.users))
    modest = within | frozenset(user for user, number in zip(jobs.users, count.tolist(), strict=True) if number == 1)
    gpus = sum(worker.gpus for worker in state.workers.values())
    others = sum(of_user for user, of_user in demand.items() if user not in modest)
    return modest if others > FLOOD * gpus else frozenset()


def _demand(jobs: Columns) -> dict[str, float]:
    """GPUs that the jobs of every user would take at once, each on its best mesh."""
    gpus = np.bincount(jobs.user, weights=jobs.quotient(jobs.gpu_s), minlength=len(jobs.users))
    return dict(zip(jobs.users, gpus.tolist(), strict=True))


def _late_s(jobs: Columns, left_s: Floats, fair_s: Floats, owed: Mapping[str, float], modest: frozenset[str]) -> Floats:
    """Seconds after which a job of a modest user goes first, or stays, if its user is owed a part of its work.

    Infinite for all others.
    """
    owed_work_s = np.array([owed.get(user, 0.0) for user in jobs.users])[jobs.user]
    stays = ~jobs.waits | (owed_work_s >= OWED * jobs.quotient(left_s * jobs.gpu_s))
    protected = jobs.of(modest) & (jobs.seconds > 0) & stays
    return np.where(protected, LATE * fair_s - jobs.seconds * jobs.steps, inf)


def _least_rates(jobs: Columns, within: frozenset[str]) -> Floats:
    """Steps per second, from those of an isolated job; 0 for users who ask for more than their share."""
    bounds = np.array([job_state.job.max_slowdown for job_state in jobs.states], np.float64)
    return np.where(jobs.of(within), jobs.quotient(np.ones(len(bounds))) / bounds, 0.0)


def _checked_columns(state: ClusterState, step_cost: StepCosts) -> Columns:
    for job_state in state.jobs.values():
        if not 0 < job_state.speed < inf:
            raise PlanError(
                "online.speed",
                f"{job_state.job.name}: speed must be above 0, not {job_state.speed!r}",
                fix="speed: 1.0",
            )
    return columns_of(state, step_cost)
