"""Adds adapters, or samples of an adapter, to the job of a run.

All new data is read and checked before the run changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lorafusion_jax.checkpoint.requests import Request
from lorafusion_jax.checkpoint.warm_start import read_warm_starts, warm_start_digests
from lorafusion_jax.checkpoint.warm_start_base import check_start_bases
from lorafusion_jax.config.join import add_adapters, check_names, select_adapters
from lorafusion_jax.config.schema import AdapterConfig, Extension, JobConfig
from lorafusion_jax.data.prepare import Prepared, in_order, prepare
from lorafusion_jax.errors import RunError, raise_all
from lorafusion_jax.planning.training_plan import train_jobs
from lorafusion_jax.report.record import compared_by, eval_digests, scored_by
from lorafusion_jax.session.base import check_adapters
from lorafusion_jax.training.job import Job
from scheduling.checks import check_jobs

LacksMemory = Callable[[JobConfig], str | None]  # `Session.lacks_memory`


def with_request(job: Job, request: Request, lacks_memory: LacksMemory) -> Job:
    """Returns the job with what a request adds, and with its old plan.

    Raises:
        LoraFusionError, PlanError: the request cannot be fulfilled.
    """
    if request.action == "add":
        return with_adapters(job, request.settings, lacks_memory)
    if request.action == "extend":
        return extended(job, request.adapters[0], epochs=request.epochs, steps=request.steps)
    return job


def with_adapters(job: Job, adapters: Sequence[AdapterConfig], lacks_memory: LacksMemory) -> Job:
    """Returns the job with additional adapters.

    Raises:
        LoraFusionError: a name is taken, data or a warm start cannot be read, samples are too long for the base, or
            memory does not suffice (`add.memory`).
        PlanError: a sample does not fit into a microbatch.
    """
    check_names(adapters, job.config)
    addition = job.config.model_copy(update={"adapters": tuple(adapters)})
    prepared = prepare(addition)
    read_warm_starts(addition)
    raise_all(check_start_bases(addition))
    check_adapters(addition, prepared)
    check_jobs(
        train_jobs(addition, prepared),
        capacity_tokens=job.plan.sizes,
        num_stages=job.plan.num_stages,
        data_parallel=job.plan.data_parallel,
        tile_tokens=job.plan.tile_tokens,
    )
    config = add_adapters(job.config, adapters)
    if (lacking := lacks_memory(config)) is not None:
        raise RunError("add.memory", "the devices lack the memory for more adapters.", why=lacking)
    return replace(job, config=config, prepared=_with_data(job.prepared, prepared))


def extended(job: Job, name: str, *, epochs: int | None, steps: int | None) -> Job:
    """Returns the job with more samples of an adapter, after the current end of its stream.

    Raises:
        ConfigError: `config.too-many-samples`.
    """
    adapter, data = job.config.adapter(name), job.prepared.adapters[name]
    more = data.epoch_samples * epochs if epochs is not None else adapter.global_samples * (steps or 0)
    part = Extension(after=job.plan.job_of[name].num_samples, samples=more)
    longer = adapter.model_copy(update={"extended": (*adapter.extended, part)})
    adapters = tuple(longer if other.name == name else other for other in job.config.adapters)
    data_in_order = in_order(longer, data.train, data.eval, job.config.train.max_steps, data.weights, data.rollout)
    return replace(
        job,
        config=job.config.model_copy(update={"adapters": adapters}),
        prepared=replace(job.prepared, adapters=job.prepared.adapters | {name: data_in_order}),
    )


def reread(config: JobConfig, prepared: Prepared) -> Prepared:
    """Returns the data of a configuration that the first process has extended.

    Raises:
        LoraFusionError: this process cannot read the data of a new adapter.
    """
    names = [adapter.name for adapter in config.adapters if adapter.name not in prepared.adapters]
    all_data = _with_data(prepared, prepare(select_adapters(config, names))) if names else prepared
    data_by_name = {
        adapter.name: in_order(adapter, data.train, data.eval, config.train.max_steps, data.weights, data.rollout)
        for adapter in config.adapters
        for data in [all_data.adapters[adapter.name]]
    }
    return replace(prepared, adapters=data_by_name)


def new_record_entries(job: Job, record: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of run.json about adapters that the job's plan does not have yet."""
    addition = select_adapters(
        job.config, [adapter.name for adapter in job.config.adapters if adapter.name not in job.plan.job_of]
    )
    names = {adapter.name for adapter in addition.adapters}
    entries = {
        "data": job.prepared.digests(),
        "eval": eval_digests(job.prepared),
        "compared_by": compared_by(addition),
        "scored_by": scored_by(job.config),
        "seeds": {adapter.name: adapter.seed for adapter in addition.adapters},
        "warm_starts": warm_start_digests(addition),
    }
    addition_entries = {
        key: {name: value for name, value in by_name.items() if name in names} for key, by_name in entries.items()
    }
    return {key: record.get(key, {}) | by_name for key, by_name in addition_entries.items()}


def _with_data(prepared: Prepared, more: Prepared) -> Prepared:
    return replace(prepared, adapters=prepared.adapters | more.adapters)
