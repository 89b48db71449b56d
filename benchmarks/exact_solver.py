"""Exact solution of small instances: a mixed-integer program, solved by HiGHS through scipy.

For a given number of slots: x[i, t, r] = sample i runs in slot t, replica r; k[a, t, r] = tiles of adapter a there;
d[b, t] = batch b is complete after slot t.

    Σ_{t,r} x = 1;   tile·k[a,t,r] ≥ Σ_{i of a} n_i x[i,t,r];   Σ_a k[a,t,r] ≤ tiles of a microbatch
    d[b,t] ≤ Σ_{u≤t,r} x[i,u,r] for i in b;   Σ_r x[i',t',r] ≤ d[b, t'-S] for i' in the batch after b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduling.packing.problem import Filling, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Result of the solver.

    Args:
        filling: the best plan known.
        proven: the solver proved that no plan has fewer slots.
    """

    filling: Filling
    proven: bool


def solve_exactly(problem: Problem, *, incumbent: Filling, bound: int, time_limit_s: float) -> Exact:
    """Solves for one slot less repeatedly, until that is infeasible, the bound is reached, or time is up."""
    best = incumbent
    while len(best) > bound:
        filling, decided = _with_slots(problem, len(best) - 1, time_limit_s)
        if filling is None:
            return Exact(filling=best, proven=decided)
        best = filling
    return Exact(filling=best, proven=True)


class _Rows:
    """Sparse constraints lower ≤ A x ≤ upper, added one by one."""

    def __init__(self):
        self.data, self.row, self.column, self.lower, self.upper = [], [], [], [], []

    def add(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        for column, value in terms:
            self.row.append(len(self.lower))
            self.column.append(column)
            self.data.append(value)
        self.lower.append(lower)
        self.upper.append(upper)


def _with_slots(problem: Problem, slots: int, time_limit_s: float) -> tuple[Filling | None, bool]:
    """A filling with that many slots (None if not found), and whether None is proven."""
    from scipy.optimize import milp  # imported late: few runs use the exact solver
    from scipy.sparse import csr_array

    replicas = problem.data_parallel
    samples = [
        (job, number, bit)
        for job, batches in enumerate(problem.batches)
        for number, batch in enumerate(batches)
        for bit in range(len(batch.tokens))
    ]
    batches = [(job, number) for job, numbers in enumerate(problem.batches) for number in range(len(numbers))]
    x = np.arange(len(samples) * slots * replicas).reshape(len(samples), slots, replicas)
    k = x.size + np.arange(len(problem.jobs) * slots * replicas).reshape(len(problem.jobs), slots, replicas)
    d = x.size + k.size + np.arange(len(batches) * slots).reshape(len(batches), slots)
    upper = np.ones(x.size + k.size + d.size)
    upper[k] = problem.tiles
    _close_windows(problem, samples, x, upper, slots)
    rows = _Rows()
    _fill_rows(problem, rows, samples, x, k)
    _order_rows(problem, rows, samples, batches, x, d)
    shape = (len(rows.lower), upper.size)
    answer = milp(
        np.zeros(upper.size),
        integrality=np.ones(upper.size),
        bounds=(np.zeros(upper.size), upper),
        constraints=[
            (csr_array((rows.data, (rows.row, rows.column)), shape), np.array(rows.lower), np.array(rows.upper))
        ],
        options={"time_limit": time_limit_s},
    )
    if answer.x is None:
        return None, answer.status == 2  # status 2: infeasible; otherwise out of time
    return _filling(problem, samples, np.round(answer.x)[x].astype(bool)), True


def _close_windows(problem: Problem, samples: list, x: np.ndarray, upper: np.ndarray, slots: int) -> None:
    """Limits each batch to the slots that leave room for its predecessors and successors."""
    heads: dict[tuple[int, int], int] = {}
    for job, batches in enumerate(problem.batches):
        head = problem.ready[job]
        for number, batch in enumerate(batches):
            heads[job, number] = head
            head += batch.slots + problem.num_stages - 1
    for index, (job, number, _) in enumerate(samples):
        upper[x[index, : heads[job, number]]] = 0
        upper[x[index, max(0, slots - problem.batches[job][number].tail) :]] = 0


def _fill_rows(problem: Problem, rows: _Rows, samples: list, x: np.ndarray, k: np.ndarray) -> None:
    for index in range(len(samples)):
        rows.add([(column, 1) for column in x[index].flat], 1, 1)
    of_job = [[i for i, sample in enumerate(samples) if sample[0] == job] for job in range(len(problem.jobs))]
    for slot in range(x.shape[1]):
        for replica in range(x.shape[2]):
            for job, members in enumerate(of_job):
                lengths = [problem.batches[job][samples[i][1]].tokens[samples[i][2]] for i in members]
                terms = [(x[i, slot, replica], length) for i, length in zip(members, lengths, strict=True)]
                rows.add([*terms, (k[job, slot, replica], -problem.tile_tokens)], -np.inf, 0)
            rows.add([(column, 1) for column in k[:, slot, replica]], 0, problem.tiles)


def _order_rows(problem: Problem, rows: _Rows, samples: list, batches: list, x: np.ndarray, d: np.ndarray) -> None:
    number_of = {batch: index for index, batch in enumerate(batches)}
    for index, (job, number, _) in enumerate(samples):
        for slot in range(x.shape[1]):
            done = d[number_of[job, number], slot]
            rows.add([(done, 1)] + [(column, -1) for column in x[index, : slot + 1].flat], -np.inf, 0)
            if number:
                terms = [(column, 1) for column in x[index, slot]]
                if slot < problem.num_stages:
                    rows.add(terms, 0, 0)
                else:
                    before = d[number_of[job, number - 1], slot - problem.num_stages]
                    rows.add([*terms, (before, -1)], -np.inf, 0)


def _filling(problem: Problem, samples: list, chosen: np.ndarray) -> Filling:
    filling: Filling = []
    for slot in range(chosen.shape[1]):
        replicas = []
        for replica in range(chosen.shape[2]):
            masks: dict[tuple[int, int], int] = {}
            for index in np.flatnonzero(chosen[:, slot, replica]):
                job, number, bit = samples[index]
                masks[job, number] = masks.get((job, number), 0) | 1 << bit
            replicas.append(tuple((job, number, mask) for (job, number), mask in masks.items()))
        filling.append(tuple(replicas))
    return filling
