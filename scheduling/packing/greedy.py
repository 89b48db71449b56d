"""One pass over the slots: begun batches first, then the longest way to go, each slot filled to the brim."""

from __future__ import annotations

from scheduling.packing.fill import chooser, fill_microbatch
from scheduling.packing.problem import Filling, Microbatch, Problem


def greedy(problem: Problem) -> Filling:
    """Fills slot after slot until nothing is left; never breaks a rule, takes about 15 µs per sample."""
    state = _State(problem)
    filling: Filling = []
    while state.left:
        filling.append(_fill_slot(problem, state, len(filling)))
    return filling


class _State:
    """Where each job stands; changed in place."""

    def __init__(self, problem: Problem):
        self.choose = chooser(problem)
        self.batch = [0] * len(problem.jobs)
        self.mask = [batches[0].full_mask if batches else 0 for batches in problem.batches]
        self.tokens = [batches[0].total if batches else 0 for batches in problem.batches]
        self.ready = list(problem.ready)
        # Order of service, smallest first: what is left to do in slots; with weights, what was served per weight.
        wait = problem.num_stages - 1
        left = [sum(batch.total / problem.slot_tokens + wait for batch in batches) for batches in problem.batches]
        self.rank = [0.0 if problem.weighted else -slots for slots in left]
        self.left = {job for job, batches in enumerate(problem.batches) if batches}


def _fill_slot(problem: Problem, state: _State, slot: int) -> tuple[Microbatch, ...]:
    order = sorted((job for job in state.left if state.ready[job] <= slot), key=lambda job: (state.rank[job], job))
    if not problem.weighted:
        order.sort(key=lambda job: state.mask[job] == problem.batches[job][state.batch[job]].full_mask)
    before = [state.tokens[job] for job in order]
    replicas = tuple(
        fill_microbatch(problem, order, state.batch, state.mask, state.tokens, state.choose)
        for _ in range(problem.data_parallel)
    )
    for job, tokens in zip(order, before, strict=True):
        served = (tokens - state.tokens[job]) / problem.slot_tokens
        state.rank[job] += served / problem.jobs[job].weight if problem.weighted else served
        if not state.mask[job]:
            _next_batch(problem, state, job, slot)
    return replicas


def _next_batch(problem: Problem, state: _State, job: int, slot: int) -> None:
    state.batch[job] += 1
    state.ready[job] = slot + problem.num_stages
    if not problem.weighted:
        state.rank[job] += problem.num_stages - 1
    if state.batch[job] == len(problem.batches[job]):
        state.left.discard(job)
        return
    batch = problem.batches[job][state.batch[job]]
    state.mask[job], state.tokens[job] = batch.full_mask, batch.total
