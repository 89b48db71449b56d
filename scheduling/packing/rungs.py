"""Jobs that are compared come to each comparison together: the rungs of successive halving."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import numpy as np

from scheduling.packing.problem import Filling, Problem, make_problem


def rung_ends(problem: Problem) -> list[list[int]]:
    """Returns per rung how many batches of each job lie in it or below. The last rung ends with all.

    A job that has rests comes to its n-th one in rung n. One without fills the microbatches of the others: each rung
    has as large a share of its batches as of their tokens. So does one that has come later: nobody waits for it.
    """
    counts = [len(batches) for batches in problem.batches]
    rests_by_job = {number: ends for number, ends in enumerate(_rests(problem)) if ends}
    if len(rests_by_job) < 2:
        return [counts] if any(counts) else []  # nobody waits for another
    sums = {job: [0, *accumulate(batch.total for batch in problem.batches[job])] for job in rests_by_job}
    tokens = sum(below[-1] for below in sums.values())
    rungs = [[0] * len(counts)]
    for rung in range(max(map(len, rests_by_job.values()))):
        ends = {job: rests[rung] if rung < len(rests) else counts[job] for job, rests in rests_by_job.items()}
        share = sum(sums[job][end] for job, end in ends.items()) / tokens
        rungs.append([ends.get(job, round(share * count)) for job, count in enumerate(counts)])
    return [ends for below, ends in pairwise([*rungs, counts]) if ends != below]


def _rests(problem: Problem) -> list[list[int]]:
    """Returns per job the batches left before each of its rests; none if another has gone on from a rest before it."""
    reached, passed = [0] * len(problem.jobs), 0
    rests_left: list[list[int]] = [[] for _ in problem.jobs]
    for number, (job, batches, rests) in enumerate(zip(problem.jobs, problem.batches, problem.rests, strict=True)):
        if rests and batches:
            first = job.batch_of(batches[0].positions[0])
            has_begun = len(batches[0].positions) < len(job.batch_positions(first))
            reached[number] = sum(rest <= first for rest in rests)
            passed = max(passed, sum(rest < first + has_begun for rest in rests))
            rests_left[number] = [min(max(rest - first, 0), len(batches)) for rest in rests]
    return [rests if count >= passed else [] for rests, count in zip(rests_left, reached, strict=True)]


class Rungs:
    """Puts the filling of a problem together, one rung after another.

    >>> from scheduling.types import AdapterJob, Limits
    >>> limits = Limits(capacity_tokens=128, num_stages=1, data_parallel=1, tile_tokens=64)
    >>> jobs = [AdapterJob(name, [64] * 3, 1) for name in "ab"]
    >>> rungs = Rungs(make_problem(jobs, limits, rests={"a": [2], "b": [1]}))
    >>> for rung, positions in rungs:
    ...     print([some.tolist() for some in positions])
    ...     rungs.add([])
    [[0, 1], [0]]
    [[2], [1, 2]]
    """

    def __init__(self, problem: Problem):
        self._problem, self._ends = problem, rung_ends(problem)
        self._begins, self._ready = [0] * len(problem.jobs), list(problem.ready)
        self._resting = [job for job, rests in enumerate(_rests(problem)) if rests]
        self.filling: Filling = []

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[tuple[Problem, list[np.ndarray]]]:
        """Yields the problem of a rung and the positions of its samples. Its filling must be added before the next."""
        problem = self._problem
        for ends in self._ends:
            batches = [some[first:end] for some, first, end in zip(problem.batches, self._begins, ends, strict=True)]
            positions = [np.array(sorted(at for batch in some for at in batch.positions), np.int64) for some in batches]
            left = [some.tolist() for some in positions]
            most_open = problem.most_open
            rung = make_problem(problem.jobs, problem.limits, left=left, ready=self._ready, most_open=most_open)
            yield rung, positions
            self._begins = ends

    def add(self, filling: Filling) -> None:
        """Adds the slots of the rung. Jobs go on from a rest when all have left the pipeline, and who ends is known."""
        last_slot = {job: slot for slot, replicas in enumerate(filling) for parts in replicas for job, *_ in parts}
        earliest = [
            last_slot[job] + self._problem.num_stages if job in last_slot else ready
            for job, ready in enumerate(self._ready)
        ]
        all_left = max((earliest[job] for job in self._resting), default=0)
        for job in self._resting:
            earliest[job] = all_left
        self._ready = [max(0, slot - len(filling)) for slot in earliest]
        self.filling += [
            tuple(tuple((job, self._begins[job] + batch, mask) for job, batch, mask in parts) for parts in replicas)
            for replicas in filling
        ]
