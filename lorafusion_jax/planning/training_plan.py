"""Makes the plan of a run from configuration and data."""

from __future__ import annotations

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.planning.turns import compared, turns
from scheduling import AdapterJob, Plan, make_plan, replan


def train_jobs(config: JobConfig, prepared: Prepared) -> list[AdapterJob]:
    """Builds the planner's jobs; sample i of a job is position i of the adapter's stream, which holds all epochs."""
    return [
        AdapterJob(
            name=adapter.name,
            sample_tokens=prepared.adapters[adapter.name].stream_tokens().tolist(),
            global_batch=adapter.global_samples,
            weight=adapter.weight,
            cuts=prepared.adapters[adapter.name].cuts,
        )
        for adapter in config.adapters
    ]


def plan_training(config: JobConfig, prepared: Prepared) -> Plan:
    """Plans the run. The planner verifies the plan."""
    jobs = train_jobs(config, prepared)
    return make_plan(
        jobs,
        capacity_tokens=config.batch.sizes,
        num_stages=config.mesh.stages,
        data_parallel=config.mesh.replicas,
        tile_tokens=config.batch.tile_tokens,
        seed=0,
        time_limit_s=config.train.plan_seconds,
        **turns(config, prepared, jobs),
    )


def plan_halved(config: JobConfig, prepared: Prepared, plan: Plan) -> Plan:
    """Returns a plan with the early ends of halving, if one of `factor` adapters goes on at each comparison.

    Which ones go on is not known before. Taken are the first, the one after the next `factor`, and so on.
    """
    halving, steps = config.halving, {job.name: job.num_batches for job in plan.jobs}
    groups, shape = compared(config, prepared, steps), turns(config, prepared, plan.jobs)
    for mark in halving.marks(max(steps.values())):
        ends = {(name, batch): slot for slot, name, batch in plan.batches_ending()}
        at = {name: ends.get((name, halving.step_of(mark, steps[name]) - 1), -1) for group in groups for name in group}
        ended = [name for group in groups for number, name in enumerate(group) if number % halving.factor]
        groups = [group[:: halving.factor] for group in groups]
        if ended:
            plan = replan(plan, at_slot=1 + max(at.values()), finish=ended, seed=plan.seed, time_limit_s=0.0, **shape)
    return plan


def slots_of_sizes(plan: Plan) -> dict[str, int]:
    """Microbatches of each capacity, for events and `--json`; empty for plans of one capacity."""
    return {str(size): count for size, count in plan.slots_of_size.items()} if plan.smaller else {}
