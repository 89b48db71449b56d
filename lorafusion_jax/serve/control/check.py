"""Checks a job as `lorafusion check` does. Runs in a child process."""

from __future__ import annotations

from typing import Any

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.places import ON_EXPERTS, Places, class_name, place_kind
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.planning.checks import checked_data, layer_problems
from lorafusion_jax.planning.training_plan import train_jobs
from lorafusion_jax.serve.control.spec import examine
from lorafusion_jax.serve.refusals import describe
from scheduling import PlanError
from scheduling.checks import check_jobs

Problem = dict[str, str]
MOST_LENGTHS = 256  # of a job's samples, for predictions


def check(values: dict[str, Any], places: dict[str, int]) -> dict[str, Any]:
    """Returns `{"problems": [...]}`, with `steps`, `tokens`, `eval_tokens`, `rank` and `lengths` if there are none."""
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
        return {"problems": [describe(error) for error in getattr(problem, "errors", [problem])]}
    (spec,) = adapter_specs(config)
    layout = Places.of(places)
    if why := layout.refuses(spec):
        return {"problems": [_place_problem(layout, spec, why)]}
    lengths = job.stream[:: max(1, len(job.stream) // MOST_LENGTHS)][:MOST_LENGTHS].tolist()
    held_out = prepared.adapters[spec.name].eval
    sizes = {"steps": job.num_batches, "tokens": int(job.stream.sum()), "rank": spec.rank}
    sizes["eval_tokens"] = 0 if held_out is None else int(held_out.lengths.sum())
    return {"problems": []} | sizes | {"lengths": lengths}


def _place_problem(layout: Places, spec: AdapterSpec, why: str) -> Problem:
    """Says why no place can hold an adapter. Other places may be large enough; some adapters need a run."""
    kind = place_kind(spec)
    larger = f"start the service with --places {class_name(kind, spec.rank)}:1"
    if kind == ON_EXPERTS and kind not in layout.kinds:
        code, where, fix = "job.kind", "lora.targets", f"other lora.targets, or {larger}"
    elif kind not in layout.kinds:
        code, where, fix = "job.kind", "lora.kind", f"another lora.kind, or {larger}"
    elif not layout.holds(kind, spec.rank):
        code, where, fix = "job.rank", "lora.rank", f"a smaller lora.rank, or {larger}"
    elif layout.lacks_head(spec):
        code, where, fix = "job.objective", "objective", "its default options, or train it in a run: lorafusion train"
    else:
        code, where, fix = "job.not-served", "lora", "train it in a run: lorafusion train"
    return {"code": code, "where": where, "what": f"{why}.", "why": "", "fix": fix}
