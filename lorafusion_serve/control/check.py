"""Checks a job as `lorafusion check` does. Runs in a child process."""

from __future__ import annotations

from typing import Any

from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.planning.checks import checked_data, layer_problems
from lorafusion_jax.planning.training_plan import train_jobs
from lorafusion_serve.control.spec import examine
from scheduling import PlanError
from scheduling.checks import check_jobs

Problem = dict[str, str]


def check(values: dict[str, Any], largest_rank: int) -> dict[str, Any]:
    """Returns `{"problems": [...]}`, with `steps`, `tokens` and `rank` if there are none."""
    try:
        config, errors = examine(values)
        more = [] if config is None else layer_problems(config)[1]
        config, prepared = checked_data(config, [*errors, *more])
        (job,) = train_jobs(config, prepared)
        check_jobs(
            [job],
            capacity_tokens=config.batch.sizes,
            num_stages=config.mesh.stages,
            data_parallel=config.mesh.replicas,
            tile_tokens=config.batch.tile_tokens,
        )
    except (LoraFusionError, PlanError) as problem:
        return {"problems": [describe(one) for one in getattr(problem, "errors", [problem])]}
    (spec,) = adapter_specs(config)
    if spec.kind != "lora":
        what, fix = f"a service trains adapters of kind lora, not {spec.kind}.", "lora.kind: lora"
        return {"problems": [{"code": "job.kind", "where": "lora.kind", "what": what, "why": "", "fix": fix}]}
    if spec.rank > largest_rank:
        what = f"rank {spec.rank} is above the largest place of the session, {largest_rank}."
        fix = f"lora.rank: {largest_rank} or less, or start the service with --places {spec.rank}:1"
        return {"problems": [{"code": "job.rank", "where": "lora.rank", "what": what, "why": "", "fix": fix}]}
    return {"problems": [], "steps": job.num_batches, "tokens": int(job.stream.sum()), "rank": spec.rank}


def describe(problem: Exception) -> Problem:
    """Returns an error as the API shows it."""
    return {key: str(getattr(problem, key, "")) for key in ("code", "where", "what", "why", "fix")} | (
        {} if hasattr(problem, "what") else {"what": str(problem).splitlines()[0]}
    )
