"""How fast jobs train, and when they are expected to end or to start."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

from lorafusion_jax.serve.store.jobs import Job


class Pace:
    """Steps per second of the jobs that train, from their steps since each was last placed."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], tuple[float, int]] = {}  # (job, epoch) → when its first new step was seen
        self._last: dict[tuple[str, int], tuple[float, int]] = {}

    def note(self, jobs: Sequence[Job]) -> None:
        """Notes the steps of all jobs that may run."""
        now, training = time.monotonic(), [job for job in jobs if job["state"] == "running"]
        for job in training:
            key = job["id"], job["epoch"]
            first = self._first.setdefault(key, (now, job["step"]))
            if job["step"] != self._last.get(key, first)[1]:
                self._last[key] = now, job["step"]
        present = {(job["id"], job["epoch"]) for job in training}
        self._first = {key: first for key, first in self._first.items() if key in present}
        self._last = {key: last for key, last in self._last.items() if key in present}

    def rate(self, job: Job) -> float | None:
        """Steps per second; None until it has taken some."""
        key = job["id"], job["epoch"]
        if key not in self._last:
            return None
        (since, before), (at, step) = self._first[key], self._last[key]
        return (step - before) / (at - since) if step > before and at > since else None

    def end(self, job: Job) -> float | None:
        """When a job ends, in seconds since 1970; None if that is not known."""
        rate = self.rate(job)
        return None if rate is None or job["steps"] is None else time.time() + _left(job) / rate

    def start(self, ahead: Sequence[Job], training: Sequence[Job]) -> float | None:
        """When the job after these gets the place of one that trains; None if too little is known.

        Jobs that wait are expected to train as fast as those that do, in the mean.
        """
        ends = [end for job in training if (end := self.end(job)) is not None]
        rates = [rate for job in training if (rate := self.rate(job)) is not None]
        if not ends or any(job["steps"] is None for job in ahead):
            return None
        mean = sum(rates) / len(rates)
        heapq.heapify(ends)
        for job in ahead:
            heapq.heapreplace(ends, ends[0] + _left(job) / mean)
        return ends[0]


def _left(job: Job) -> int:
    return max(1, job["steps"] - job["step"])
