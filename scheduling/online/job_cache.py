"""A cache of what is known of single jobs. A service runs for months, so jobs seen long ago are forgotten."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, islice
from typing import Any

from scheduling.online.types import Job

MOST_JOBS = 20_000


class JobCache:
    """Results that depend on one job, kept by its content: equal jobs share them."""

    def __init__(self):
        self._next = count()
        self._keys: dict[str, tuple[Job, int]] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._results: dict[int, dict[tuple[Any, ...], Any]] = {}

    def key(self, job: Job) -> int:
        """A key of everything that a job's rates depend on; jobs with equal keys are interchangeable."""
        entry = self._keys.get(job.name)
        if entry is None or entry[0] is not job:
            of = (job.shape, job.lengths, job.global_batch, job.rank, job.targets, job.weight, job.max_slowdown)
            of += (job.eval_every, job.eval_tokens)
            if max(len(self._keys), len(self._numbers)) >= MOST_JOBS:
                self._forget_oldest()
            if of not in self._numbers:
                self._numbers[of] = next(self._next)
            entry = self._keys[job.name] = (job, self._numbers[of])
        return entry[1]

    def once(self, job: Job, question: tuple[Any, ...], search: Callable[[], Any]) -> Any:
        """The result of `search`, which is called once for a job and a question."""
        results = self.results(job)
        if question not in results:
            results[question] = search()
        return results[question]

    def results(self, job: Job) -> dict[tuple[Any, ...], Any]:
        """What is known of a job, by question."""
        key = self.key(job)
        results = self._results.get(key)
        if results is None:
            results = self._results[key] = {}
        return results

    def _forget_oldest(self) -> None:
        """Forgets half of the jobs, those seen first. Keys are not used again, for caches of groups have them."""
        self._keys = dict(islice(self._keys.items(), len(self._keys) // 2, None))
        live = {key for _, key in self._keys.values()}
        self._numbers = {of: key for of, key in self._numbers.items() if key in live}
        self._results = {key: results for key, results in self._results.items() if key in live}
