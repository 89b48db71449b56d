"""Jobs that come and go on one GPU, and the plan that the online policy's decisions make of them; no jax."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.workloads import LONGEST, sample_lengths
from scheduling import AdapterJob, CostModel, Plan, Timeline, make_plan, replan, simulate
from scheduling.online import ChangeCosts, ClusterResult, ClusterState, Decision, Job, Ours, Rates, ShapeFacts, Worker
from scheduling.online.costs import TYPICAL_SAMPLE
from scheduling.online.simulator import Simulator
from scheduling.online.state import after

# Jobs join a session whose programs are compiled, so a change costs only a drained pipeline.
CHANGES = ChangeCosts(start_s=0.0, load_bytes_per_s=inf, change_s=0.0, compile_s=0.0, move_s=0.0, save_s=0.0)


class SessionFacts(ShapeFacts):
    """The costs of a session of one stage, whatever the job."""

    def __init__(self, costs: CostModel):
        self._costs = costs

    def stage_costs(self, *_: Any) -> CostModel:
        return self._costs


class Coming(NamedTuple):
    """A job of a scenario, with the bounds that every job has.

    Args:
        arrival: in times of a full microbatch.
    """

    workload: str
    batch: int
    steps: int
    rank: int
    arrival: float
    priority: int = 0


# The ranks are the same in order, so both scenarios run the same programs.
SCENARIOS = {
    "joins": (  # jobs share the GPU as they come, and the shortest go first
        Coming("xsum", 8, 110, 16, 0),
        Coming("cnn", 4, 80, 64, 0),
        Coming("wiki", 8, 30, 8, 30),
        Coming("mix", 16, 22, 32, 70),
        Coming("xsum", 4, 45, 16, 110),
    ),
    "queue": (  # jobs that nearly fill the GPU take turns; the fourth displaces others, which go on later
        Coming("mix", 8, 65, 16, 0),
        Coming("cnn", 8, 70, 64, 0),
        Coming("wiki", 4, 45, 8, 25),
        Coming("xsum", 4, 40, 32, 60, priority=1),
        Coming("cnn", 12, 12, 16, 100),
    ),
}


class Move(NamedTuple):
    """Jobs that join and leave the group at one decision."""

    time_s: float
    joins: tuple[str, ...]
    leaves: tuple[str, ...]
    why: str


class Change(NamedTuple):
    """A change of one job at a slot of the plan."""

    slot: int
    job: str
    action: Literal["add", "pause", "continue"]


class Logged:
    """A policy that remembers who joined and left at its decisions."""

    def __init__(self, policy: Ours):
        self.policy, self.mixes, self.promises = policy, policy.mixes, policy.promises
        self.moves: list[Move] = []

    def decide(self, state: ClusterState, now: float) -> list[Decision]:
        decisions = self.policy.decide(state, now)
        before = {name for group in state.groups.values() for name in group.members}
        members = {name for group in after(state, decisions).values() for name in group.members}
        if members != before:
            joins, leaves = ([name for name in state.jobs if name in of] for of in (members - before, before - members))
            self.moves.append(Move(now, tuple(joins), tuple(leaves), "; ".join(decision.why for decision in decisions)))
        return decisions


def draw_jobs(
    scenario: str, model: Any, costs: CostModel, capacity_tokens: int, *, scale: float = 1.0, shorter: float = 1.0
) -> list[Job]:
    """The jobs of a scenario, with the lengths of all their samples.

    Args:
        model: the base model's sizes.
        costs: predict the time of a full microbatch.
        scale: of the lengths of samples.
        shorter: divides steps and arrivals.
    """
    stage, squares = costs.stage(0), capacity_tokens * TYPICAL_SAMPLE * scale
    slot_s = sum(direction.seconds(capacity_tokens, squares) for direction in (stage.forward, stage.backward))
    draw, longest = np.random.default_rng(0), round(LONGEST * scale)
    jobs = []
    for index, workload in enumerate(SCENARIOS[scenario]):
        steps = max(2, round(workload.steps / shorter))
        lengths = sample_lengths(draw, workload.workload, index, workload.batch * steps, scale, longest)
        job = Job(f"j{index}", f"j{index}", model, workload.arrival / shorter * slot_s, lengths, workload.batch, steps)
        jobs.append(replace(job, rank=workload.rank, priority=workload.priority))
    return jobs


def simulated(
    jobs: Sequence[Job], worker: Worker, costs: CostModel, capacity_tokens: int
) -> tuple[ClusterResult, list[Move]]:
    """What the online simulator predicts for one GPU, and who joined and left when."""
    rates = Rates(CHANGES, capacities=[capacity_tokens], facts=SessionFacts(costs))
    policy = Logged(Ours(rates))
    return Simulator(jobs, [worker], policy, rates).run(), policy.moves


def planned(
    jobs: Sequence[Job], moves: Sequence[Move], costs: CostModel, *, capacity_tokens: int, tile_tokens: int
) -> tuple[Plan, list[Change]]:
    """One plan of all moves: each takes effect at the slot that the plan has reached by then.

    The jobs' weights differ a little, because the planner keeps shares only if they do.
    """
    adapters = {
        job.name: AdapterJob(job.name, job.lengths, job.global_batch, weight=job.weight * (1 + 1e-6 * index))
        for index, job in enumerate(jobs)
    }
    first, *later = moves
    plan = make_plan(
        [adapters[name] for name in first.joins],
        capacity_tokens=capacity_tokens,
        num_stages=1,
        tile_tokens=tile_tokens,
        time_limit_s=0,
    )
    changes: list[Change] = []
    for move in later:
        slot = slot_at(simulate(plan, costs), move.time_s)
        back = [name for name in move.joins if name in plan.job_of]
        new = [name for name in move.joins if name not in plan.job_of]
        plan = replan(
            plan, at_slot=slot, add=[adapters[name] for name in new], pause=move.leaves, resume=back, time_limit_s=0
        )
        changes += [Change(slot, name, "pause") for name in move.leaves]
        changes += [Change(slot, name, "continue") for name in back]
        changes += [Change(slot, name, "add") for name in new]
    return plan, changes


def slot_at(timeline: Timeline, time_s: float) -> int:
    """The first slot that starts at this time of a run or later."""
    return bisect_left(_starts(timeline), time_s - 1e-9)


def time_of(timeline: Timeline, slot: int) -> float:
    """Seconds from the start of a run to the start of a slot."""
    return _starts(timeline)[slot]


def _starts(timeline: Timeline) -> list[float]:
    return sorted(span.start_s - timeline.start_s for span in timeline.spans if span.kind == "forward")
