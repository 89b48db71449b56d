"""How long jobs may wait: a promise that is measured against a fair share of the cluster.

Every user has a share of the GPUs by weight, among the users with unfinished jobs. A job's fair time is what it takes
on that share after the work that its user had left when it arrived:

    fair = max(isolated time, (work ahead + work) / share)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from scheduling.online.rates import Kind, Rates
from scheduling.online.state import ClusterState
from scheduling.online.types import Job

PATIENCE = 4.0  # longest wait while later jobs of equal weight start, in multiples of the job's fair time
ABOVE_S = 600.0  # GPU-seconds by which a user is above its share
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


def fair_times_s(state: ClusterState, costs: Mapping[str, StepCost]) -> dict[str, float]:
    """The fair time of every unfinished job, from its arrival to its end; infinite if it fits on no worker."""
    share, fair = user_shares(state), dict[str, float]()
    for name, job_state in state.jobs.items():
        cost, steps = costs[name], job_state.job.steps
        work_s = job_state.ahead_s + cost.gpu_s * steps
        fair[name] = max(cost.seconds * steps, work_s / share[job_state.job.user]) if cost.gpu_s else float("inf")
    return fair


def work_ahead_s(state: ClusterState, user: str, now: float, rates: Rates) -> float:
    """GPU-seconds of isolated work that a user's jobs have left: `JobState.ahead_s` of a job that arrives now."""
    sizes = worker_sizes(state)
    mine = (job_state for job_state in state.jobs.values() if job_state.job.user == user)
    return sum(
        job_state.left_steps(now) * step_cost(rates, job_state.job, sizes).at_speed(job_state.speed).gpu_s
        for job_state in mine
    )


def owed_s(state: ClusterState) -> dict[str, float]:
    """GPU-seconds that each user received less than its share, compared with all users who have work.

    Groups do more work than isolated jobs, so a user alone is owed nothing whatever it received.
    """
    present = {job_state.job.user for job_state in state.jobs.values()}
    users = [user for name, user in state.users.items() if name in present]
    entitled = sum(user.entitled for user in users)
    ratio = sum(user.got for user in users) / entitled if entitled else 1.0
    return {user.user.name: ratio * user.entitled - user.got for user in users}


def users_above_share(state: ClusterState) -> frozenset[str]:
    """Users that received more than their share."""
    return frozenset(name for name, seconds in owed_s(state).items() if seconds < -ABOVE_S)


def user_shares(state: ClusterState) -> dict[str, float]:
    """The GPUs of every user with unfinished jobs, by weight."""
    present = dict.fromkeys(job_state.job.user for job_state in state.jobs.values())
    weights = {name: state.users[name].user.weight if name in state.users else 1.0 for name in present}
    gpus, total = sum(worker.gpus for worker in state.workers.values()), sum(weights.values())
    return {name: gpus * weight / total for name, weight in weights.items()}
