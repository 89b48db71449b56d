"""How long jobs may wait: a promise that is measured against a fair share of the cluster.

Every user has a share of the GPUs by weight, among the users with unfinished jobs. A job's fair time is what it takes
on that share after the work that its user had left when it arrived:

    fair = max(isolated time, (work ahead + work) / share)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.online.rates import Kind, Rates
from scheduling.online.state import ClusterState, JobState
from scheduling.online.types import Job

PATIENCE = 4.0  # longest wait while later jobs of equal weight start, in multiples of the job's fair time
ABOVE_S = 600.0  # GPU-seconds by which a user is above its share
Floats = NDArray[np.float64]
Sizes = tuple[tuple[Kind, int], ...]


class StepCost(NamedTuple):
    """An isolated step on the best mesh; zeros if the job fits on no worker that is up."""

    gpu_s: float
    seconds: float

    def at_speed(self, speed: float) -> StepCost:
        """The cost of a job that trains at `speed` times its predicted rate."""
        return StepCost(self.gpu_s / speed, self.seconds / speed)


StepCosts = Callable[[Job], StepCost]


def worker_sizes(state: ClusterState) -> Sizes:
    """Kinds and sizes of the workers that are up."""
    return tuple(dict.fromkeys((worker.kind, worker.gpus) for worker in state.workers.values()))


def step_cost(rates: Rates, job: Job, sizes: Sizes) -> StepCost:
    """The cost of a job's step on the first kind of worker that it fits on."""
    best = next((rate for kind, most in sizes if (rate := rates.best_isolated_rate(job, kind, most))), None)
    return StepCost(best.gpu_s(1), best.step_s) if best else StepCost(0.0, 0.0)


class Columns(NamedTuple):
    """Numbers of all jobs of a state, in its order: a decision asks the same of thousands of jobs.

    Attributes:
        gpu_s, seconds: of an isolated step at the job's speed; 0 if the job fits on no worker that is up.
        user: index in `users`, who come in the order of their first jobs.
        due: jobs with a deadline.
    """

    names: list[str]
    states: list[JobState]
    users: list[str]
    user: NDArray[np.int64]
    gpu_s: Floats
    seconds: Floats
    steps: Floats
    waits: NDArray[np.bool_]
    due: NDArray[np.bool_]
    at_s: Floats
    done_steps: Floats
    steps_per_s: Floats
    ahead_s: Floats
    waited_before_s: Floats

    def left_steps(self, now: float) -> Floats:
        """As `JobState.left_steps`."""
        since = now - self.at_s
        done_steps = np.where(since > 0.0, self.done_steps + self.steps_per_s * since, self.done_steps)
        return np.maximum(self.steps - done_steps, 1.0)

    def waited_s(self, now: float) -> Floats:
        """As `JobState.waited`."""
        return self.waited_before_s + np.where(self.waits, now - self.at_s, 0.0)

    def quotient(self, of: Floats) -> Floats:
        """of / seconds of a step; 0 for a job that fits nowhere."""
        return np.divide(of, self.seconds, out=np.zeros_like(of), where=self.seconds > 0)

    def of(self, users: Container[str]) -> NDArray[np.bool_]:
        """Which jobs belong to these users."""
        return np.array([name in users for name in self.users])[self.user]

    def by_name(self, values: Floats) -> dict[str, float]:
        return dict(zip(self.names, values.tolist(), strict=True))


def columns_of(state: ClusterState, step_cost: StepCosts) -> Columns:
    """The columns of a state's jobs, from the cost of a job's step at its predicted rate."""
    states = [*state.jobs.values()]
    owners = [job_state.job.user for job_state in states]
    index = {user: number for number, user in enumerate(dict.fromkeys(owners))}
    speed = np.array([job_state.speed for job_state in states], np.float64)
    gpu_s, seconds = np.array([*zip(*[step_cost(job_state.job) for job_state in states], strict=True)]) / speed
    return Columns(
        names=[*state.jobs],
        states=states,
        users=[*index],
        user=np.array([index[user] for user in owners]),
        gpu_s=gpu_s,
        seconds=seconds,
        steps=np.array([job_state.job.steps for job_state in states], np.float64),
        waits=np.array([job_state.group is None for job_state in states]),
        due=np.array([job_state.job.deadline_s is not None for job_state in states]),
        at_s=np.array([job_state.at_s for job_state in states], np.float64),
        done_steps=np.array([job_state.done_steps for job_state in states], np.float64),
        steps_per_s=np.array([job_state.steps_per_s for job_state in states], np.float64),
        ahead_s=np.array([job_state.ahead_s for job_state in states], np.float64),
        waited_before_s=np.array([job_state.waited_s for job_state in states], np.float64),
    )


def fair_columns_s(jobs: Columns, shares: Mapping[str, float]) -> Floats:
    """The fair time of every job, from its arrival to its end; infinite if it fits on no worker."""
    share = np.array([shares[user] for user in jobs.users])[jobs.user]
    fair_s = np.maximum(jobs.seconds * jobs.steps, (jobs.ahead_s + jobs.gpu_s * jobs.steps) / share)
    return np.where(jobs.gpu_s > 0, fair_s, np.inf)


def fair_times_s(state: ClusterState, step_cost: StepCosts) -> dict[str, float]:
    """The same by name."""
    jobs = columns_of(state, step_cost)
    return jobs.by_name(fair_columns_s(jobs, user_shares(state)))


def work_ahead_s(state: ClusterState, user: str, now: float, rates: Rates) -> float:
    """GPU-seconds of isolated work that a user's jobs have left: `JobState.ahead_s` of a job that arrives now."""
    sizes = worker_sizes(state)
    of_user = (job_state for job_state in state.jobs.values() if job_state.job.user == user)
    return sum(work_s(job_state, now, rates, sizes) for job_state in of_user)


def work_s(job_state: JobState, now: float, rates: Rates, sizes: Sizes) -> float:
    """GPU-seconds of isolated work that a job has left."""
    return job_state.left_steps(now) * step_cost(rates, job_state.job, sizes).at_speed(job_state.speed).gpu_s


def owed_s(state: ClusterState) -> dict[str, float]:
    """GPU-seconds that each user received less than its share, compared with all users who have work.

    Groups do more work than isolated jobs, so a user alone is owed nothing whatever it received.
    """
    present = {job_state.job.user for job_state in state.jobs.values()}
    users = [user for name, user in state.users.items() if name in present]
    entitled = sum(user.entitled for user in users)
    ratio = sum(user.got for user in users) / entitled if entitled else 1.0
    return {user.user.name: ratio * user.entitled - user.got for user in users}


def users_above_share(owed: Mapping[str, float]) -> frozenset[str]:
    """Users that received more than their share, from `owed_s`."""
    return frozenset(name for name, seconds in owed.items() if seconds < -ABOVE_S)


def user_shares(state: ClusterState) -> dict[str, float]:
    """The GPUs of every user with unfinished jobs, by weight."""
    present = dict.fromkeys(job_state.job.user for job_state in state.jobs.values())
    weights = {name: state.users[name].user.weight if name in state.users else 1.0 for name in present}
    gpus, total = sum(worker.gpus for worker in state.workers.values()), sum(weights.values())
    return {name: gpus * weight / total for name, weight in weights.items()}
