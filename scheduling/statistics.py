"""Statistics of a plan, and what limits its speed."""

from __future__ import annotations

from dataclasses import dataclass

from scheduling.cost_model import CostModel
from scheduling.plan import Plan
from scheduling.simulate import simulate
from scheduling.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatistics:
    """Statistics of one adapter. `finish_s` and `finish_slot` are the end of its last batch."""

    name: str
    samples: int
    tokens: int
    longest: int
    steps: int
    finish_slot: int
    finish_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatistics:
    """Statistics of a plan.

    Args:
        microbatches: slots that are not no-ops.
        density: real tokens / room of all slots.
        tile_share: share of the room that pads adapters to whole tiles.
        gap: slots / lower bound - 1.
        duration_s: predicted by the cost model, as are the times below.
        bubble_share: idle share between fill and drain.
        fill_drain_s: idle time at both ends of the run, mean over stages.
        limits: causes of lost time, largest first.
    """

    slots: int
    microbatches: int
    noops: int
    tokens: int
    density: float
    tile_share: float
    lower_bound: int
    gap: float
    duration_s: float
    tokens_per_s: float
    bubble_share: float
    fill_drain_s: float
    adapters: tuple[AdapterStatistics, ...]
    limits: tuple[Limit, ...]

    @property
    def hint(self) -> str:
        """The largest limit, in one sentence."""
        return str(self.limits[0]) if self.limits else "nothing: the plan is full and has no bubbles"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A cause of lost time.

    Args:
        share: lost share of the devices' time.
    """

    share: float
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} % of the time: {self.what}; {self.fix}"


def plan_statistics(plan: Plan, cost_model: CostModel) -> PlanStatistics:
    """Computes the statistics of a plan, with the times of a cost model."""
    timeline = simulate(plan, cost_model)
    padding = int((-plan.parts.tokens % plan.tile_tokens).sum())
    return PlanStatistics(
        slots=plan.num_slots,
        microbatches=plan.num_slots - plan.num_noops,
        noops=plan.num_noops,
        tokens=plan.tokens,
        density=plan.density,
        tile_share=padding / plan.room if plan.room else 0.0,
        lower_bound=plan.lower_bound,
        gap=plan.gap,
        duration_s=timeline.duration_s,
        tokens_per_s=timeline.tokens_per_s,
        bubble_share=timeline.bubble_share,
        fill_drain_s=timeline.fill_drain_s,
        adapters=_adapters(plan, timeline),
        limits=_limits(plan, timeline, padding),
    )


def _adapters(plan: Plan, timeline: Timeline) -> tuple[AdapterStatistics, ...]:
    last = {adapter: slot for slot, adapter, _ in plan.batches_ending()}
    return tuple(
        AdapterStatistics(
            name=job.name,
            samples=job.num_samples,
            tokens=int(stream.sum()),
            longest=int(stream.max()),
            steps=job.num_batches,
            finish_slot=last.get(job.name, 0),
            finish_s=timeline.finish_s.get(job.name, 0.0),
        )
        for job, stream in ((job, job.stream) for job in plan.jobs)
    )


def _limits(plan: Plan, timeline: Timeline, padding: int) -> tuple[Limit, ...]:
    """Shares of stages · duration that do no useful work, largest first; shares below half a percent are dropped."""
    stage_seconds = plan.num_stages * timeline.duration_s
    if not stage_seconds:
        return ()
    busy = sum(timeline.busy_s) / stage_seconds
    capacities = [capacity for slot, capacity in zip(plan.slots, plan.slot_capacities, strict=True) if not slot.is_noop]
    room = max(1, sum(capacities)) * plan.data_parallel
    tiles = padding / room
    empty = 1 - plan.tokens / room - tiles
    slowest = max(timeline.busy_s)
    uneven = sum(slowest - stage for stage in timeline.busy_s) / stage_seconds
    bubbles = max(0.0, sum(timeline.bubble_s) / stage_seconds - uneven)
    longest = max(plan.jobs, key=lambda job: (max(job.sample_tokens), job.name))
    limits = [
        Limit(
            share=busy * empty,
            what="room in the microbatches that no sample fits",
            fix=f"longest sample: {max(longest.sample_tokens)} tokens ({longest.name}); try another capacity_tokens",
        ),
        Limit(
            share=busy * tiles,
            what=f"padding of adapters to tiles of {plan.tile_tokens} tokens",
            fix="fewer adapters in a microbatch, or a larger global batch",
        ),
        Limit(
            share=bubbles,
            what=_why_bubbles(plan),
            fix="more adapters, a larger global batch, or fewer stages",
        ),
        Limit(
            share=plan.num_stages * timeline.fill_drain_s / stage_seconds,
            what="filling and draining the pipeline once",
            fix="a longer run, or fewer stages",
        ),
        Limit(share=uneven, what="stages of unequal cost", fix="move layers away from the slowest stage"),
    ]
    return tuple(sorted((limit for limit in limits if limit.share >= 0.005), key=lambda limit: -limit.share))


def _why_bubbles(plan: Plan) -> str:
    chain = {adapter: slot for slot, adapter, _ in plan.batches_ending()}
    last = max(chain, key=lambda name: (chain[name], name), default="")
    others = max((slot for name, slot in chain.items() if name != last), default=0)
    alone = chain.get(last, 0) - others
    if alone > plan.num_stages:
        return f"waiting for updates: {last} runs alone in the last {alone} slots"
    return f"waiting for updates and uneven microbatches ({plan.num_noops} no-ops)"
