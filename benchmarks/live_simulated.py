"""Simulates jobs that arrive at a service with one session, at the seconds per slot that were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduling import AdapterJob, Plan, simulate
from scheduling.online import ChangeCosts, Job, Rates, Worker, simulate_cluster
from scheduling.online.facts import ShapeFacts
from scheduling.online.policies.baselines import Packing
from scheduling.online.shapes import ModelShape

DEVICE, MEMORY_GIB = "h200", 140.0  # of the simulator: times are scaled to those measured, and memory is no limit
NO_BOUND = 1e6


class OneGroup(Packing):
    """One session with so many places; later jobs wait in order of arrival."""

    def __init__(self, rates: Rates, places: int):
        super().__init__(rates)
        self.members = places


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A job of the run.

    Args:
        came_s, ended_s: seconds since the first job came.
    """

    job: AdapterJob
    came_s: float
    ended_s: float
    rank: int


def simulated_ends(
    arrivals: Sequence[Arrival], sizes: Mapping[str, Any], offline: Plan, *, slot_s: float, places: int
) -> dict[str, float]:
    """Returns when the simulator says that each job ends, seconds since the first came.

    The simulator counts in the seconds of its own device, so arrivals are scaled to them, and ends back.

    Args:
        sizes: of the base.
        offline: a plan, for the simulator's seconds per slot.
    """
    shape = ModelShape(**{name: sizes[name] for name in ModelShape.__dataclass_fields__ if name in sizes})
    first = arrivals[0].job
    changes = ChangeCosts(start_s=0, load_bytes_per_s=1e18, change_s=0, compile_s=0, move_s=0, save_s=0)
    rates = Rates(changes, capacities=[offline.capacity_tokens])
    jobs = [_job(arrival, shape) for arrival in arrivals]
    probe = next(job for job in jobs if job.name == first.name)
    costs = ShapeFacts().stage_costs(probe, DEVICE, 1, False)
    scale = simulate(offline, costs).duration_s / len(offline.slots) / slot_s
    scaled = [_job(arrival, shape, scale) for arrival in arrivals]
    worker = Worker("host", 1, MEMORY_GIB, DEVICE)
    result = simulate_cluster(scaled, [worker], policy=OneGroup(rates, places), rates=rates)
    return {name: end / scale for name, end in result.finish_s.items()}


def _job(arrival: Arrival, shape: ModelShape, scale: float = 1.0) -> Job:
    return Job(
        arrival.job.name,
        "client",
        shape,
        arrival.came_s * scale,
        list(arrival.job.sample_tokens),
        arrival.job.global_batch,
        arrival.job.num_batches,
        rank=arrival.rank,
        max_slowdown=NO_BOUND,
    )
