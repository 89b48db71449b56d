"""Fairness between users: Jain's index, and a fair cluster to compare completion times with."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from scheduling.online.sharing import IsolatedRate, fair_shares
from scheduling.online.types import Job, User


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index: (Σ x)² / (n Σ x²); 1 if all are equal, 1/n if one has everything.

    >>> jain([1.0, 1.0]), jain([1.0, 0.0])
    (1.0, 0.5)
    """
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


@dataclass(slots=True)
class _Left:
    """A job in the fair cluster, with the GPU-seconds that it still needs."""

    work_s: float
    job: Job
    gpus: int


def fair_finishes_s(
    jobs: Sequence[Job], isolated: Mapping[str, IsolatedRate], users: Mapping[str, User], gpus: int
) -> dict[str, float]:
    """When each job would end if every user had a fair share of its own at all times.

    The GPUs are shared max–min fairly by weight between the users with unfinished jobs. A user runs its shortest jobs
    first on its share, each on at most the GPUs of its best mesh. There are no groups, and nothing has to start.

    Args:
        jobs: in order of arrival.
        isolated: rate of every job on its best mesh.
    """
    coming, queues, finish_s, now = deque(jobs), dict[str, list[_Left]](), dict[str, float](), 0.0
    while coming or queues:
        served = _serve(queues, users, float(gpus))
        until = min([now + left.work_s / rate for left, rate in served] + [coming[0].arrival_s if coming else inf])
        for left, rate in served:
            left.work_s -= rate * (until - now)
            if left.work_s <= 1e-6 * rate:
                finish_s[left.job.name] = until
                queues[left.job.user].remove(left)
        now = until
        while coming and coming[0].arrival_s <= now:
            job = coming.popleft()
            rate = isolated[job.name]
            queue = queues.setdefault(job.user, [])
            queue.append(_Left(rate.gpu_s(job.steps), job, rate.mesh.gpus))
            queue.sort(key=lambda left: (left.work_s, left.job.name))
        queues = {user: queue for user, queue in queues.items() if queue}
    return finish_s


def _serve(queues: Mapping[str, Sequence[_Left]], users: Mapping[str, User], gpus: float) -> list[tuple[_Left, float]]:
    """The jobs that train now, with their GPUs."""
    demand = [min(sum(left.gpus for left in queue), users[user].max_gpus or inf) for user, queue in queues.items()]
    shares = fair_shares(demand, [users[user].weight for user in queues], gpus)
    served: list[tuple[_Left, float]] = []
    for share, queue in zip(shares, queues.values(), strict=True):
        for left in queue:
            taken = min(share, float(left.gpus))
            if taken <= 1e-9:
                break
            served.append((left, taken))
            share -= taken
    return served
