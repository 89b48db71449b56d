"""One pass over the slots: the most urgent adapters first, each slot filled to the brim."""

from __future__ import annotations

from scheduling.packing.problem import Filling, Microbatch, Problem
from scheduling.packing.subsets import fullest


def greedy(problem: Problem) -> Filling:
    """Fills slot after slot until nothing is left; never breaks a rule."""
    state = _State(problem)
    filling: Filling = []
    while state.left:
        filling.append(_fill_slot(problem, state, len(filling)))
    return filling


class _State:
    """Where each job stands; changed in place."""

    def __init__(self, problem: Problem):
        self.batch = [0] * len(problem.jobs)
        self.mask = [batches[0].full_mask if batches else 0 for batches in problem.batches]
        self.tokens = [batches[0].total if batches else 0 for batches in problem.batches]
        self.ready = list(problem.ready)
        room = problem.tiles * problem.tile_tokens * problem.data_parallel
        wait = problem.num_stages - 1
        self.chain = [sum(batch.total / room + wait for batch in batches) for batches in problem.batches]
        self.left = {index for index, batches in enumerate(problem.batches) if batches}


def _fill_slot(problem: Problem, state: _State, slot: int) -> tuple[Microbatch, ...]:
    ready = sorted((-state.chain[job], job) for job in state.left if state.ready[job] <= slot)
    order = [job for _, job in ready]
    order.sort(key=lambda job: state.mask[job] == problem.batches[job][state.batch[job]].full_mask)  # open ones first
    replicas = tuple(_fill_replica(problem, state, order) for _ in range(problem.data_parallel))
    for job in order:
        if not state.mask[job]:
            _next_batch(problem, state, job, slot)
    return replicas


def _fill_replica(problem: Problem, state: _State, order: list[int]) -> Microbatch:
    tile, tiles = problem.tile_tokens, problem.tiles
    parts = []
    for job in order:
        if tiles == 0:
            break
        if not (mask := state.mask[job]):
            continue
        batch = problem.batches[job][state.batch[job]]
        take, tokens = mask, state.tokens[job]
        if -(-tokens // tile) > tiles:
            take, tokens = fullest(batch.tokens, mask, tiles * tile)
        if take:
            parts.append((job, state.batch[job], take))
            tiles -= -(-tokens // tile)
            state.mask[job] ^= take
            state.tokens[job] -= tokens
            state.chain[job] -= tokens / (problem.tiles * tile * problem.data_parallel)
    return tuple(parts)


def _next_batch(problem: Problem, state: _State, job: int, slot: int) -> None:
    state.batch[job] += 1
    state.chain[job] -= problem.num_stages - 1
    state.ready[job] = slot + problem.num_stages
    if state.batch[job] == len(problem.batches[job]):
        state.left.discard(job)
        return
    batch = problem.batches[job][state.batch[job]]
    state.mask[job], state.tokens[job] = batch.full_mask, batch.total
