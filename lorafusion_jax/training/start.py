"""Starts a run from a job: claims its folder, checks everything that can fail, then creates the run in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from operator import ne
from pathlib import Path

import jax

from lorafusion_jax.checkpoint.base_files import base_digests
from lorafusion_jax.checkpoint.base_model import base_directory, pin_base
from lorafusion_jax.checkpoint.base_weights import weight_problems
from lorafusion_jax.checkpoint.begun_folder import StartFile
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.new_run import SHOWN, must_hold_no_run, new_run_folder
from lorafusion_jax.checkpoint.warm_start import read_warm_starts, warm_start_digests
from lorafusion_jax.checkpoint.warm_start_base import check_start_bases
from lorafusion_jax.config.auto import MESH
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.errors import CheckpointError, first_few, raise_all
from lorafusion_jax.planning.auto import device_for_rates, resolve_auto
from lorafusion_jax.planning.network import network_of
from lorafusion_jax.planning.training_plan import plan_training, train_jobs
from lorafusion_jax.report.events import Listener, PhaseBegun, fan_out
from lorafusion_jax.report.format import exact
from lorafusion_jax.report.record import make_record
from lorafusion_jax.report.recorder import Recorder
from lorafusion_jax.session.base import check_mesh, device_bytes
from lorafusion_jax.session.processes import barrier, is_first
from lorafusion_jax.signals import stop_if_asked
from lorafusion_jax.training.agreement import check_agreement, job_facts
from lorafusion_jax.training.launch import fail_together, launch, local_listeners, record_phases
from lorafusion_jax.training.state import RunResult
from pallas_kernels.device import device_kind
from scheduling import AdapterJob, Plan, PlanError, verify_plan

PLANNED = {
    "num_batches": "steps (train.max_steps, epochs, rows of data.train)",
    "global_batch": "batch.global_samples",
    "weight": "weight",
}


def train(
    config: JobConfig,
    out: str | Path,
    *,
    plan: Plan | None = None,
    listeners: Sequence[Listener] = (),
    verify_base: bool = False,
    begun: StartFile | None = None,
) -> RunResult:
    """Trains all adapters of a job into a new run folder.

    Args:
        config: from `load_config`.
        out: new run folder.
        plan: plan to execute (None: plan the job here).
        listeners: called with every `RunEvent`.
        verify_base: record digests of every byte of the base model, even of a large one.
        begun: of `new_run_folder`, if this process holds the folder already.

    Raises:
        LoraFusionError: bad data, a plan for other data, a model that does not load, no space.
        Interrupted: stopped by a signal. The state is saved.
    """
    folder = RunFolder.of(out)
    with ExitStack() as start:
        with fail_together():
            if is_first():
                begun = begun or start.enter_context(new_run_folder(folder, config))
                listeners = (record_phases(begun), *listeners)
            else:
                must_hold_no_run(folder, config)
        return _start(config, folder, plan, listeners, verify_base)


def _start(
    config: JobConfig, folder: RunFolder, plan: Plan | None, listeners: Sequence[Listener], verify_base: bool
) -> RunResult:
    """Starts a run whose folder is this process's own."""
    emit = fan_out(listeners if is_first() else ())
    with fail_together():
        if MESH not in config.auto:
            check_mesh(config)
        read_warm_starts(config)
        raise_all(check_start_bases(config))
    with fail_together():  # a file may be missing on one host
        config = pin_base(config)
        prepared = prepare(config, progress=lambda text: emit(PhaseBegun(text=text)))
        stop_if_asked()
        config, choices = _with_choices(config, prepared, emit)
        raise_all(weight_problems(base_directory(config)))
        base_files = base_digests(base_directory(config), every_byte=verify_base)
    plan_facts = {"the given plan": "" if plan is None else plan.digest}
    check_agreement(job_facts(config, prepared, base_files) | plan_facts)
    with fail_together():
        if plan is None:
            emit(PhaseBegun(text="planning"))
            plan = plan_training(config, prepared)
        else:
            _check_plan(plan, config, prepared)
        folder.must_be_new(plan)
        record = make_record(config, prepared, plan, base_files, warm_start_digests(config))
        record |= {"auto": choices} if choices else {}
    barrier()  # all processes have checked the folder before the first writes the run
    return launch(config, prepared, plan, folder, record, local_listeners(listeners, lambda: Recorder(folder.path)))


def _with_choices(config: JobConfig, prepared: Prepared, emit: Listener) -> tuple[JobConfig, str]:
    """Sets what the job leaves to the planner, once: a run that is resumed keeps it."""
    if not config.auto:
        return config, ""
    device, memory = device_for_rates(device_kind()), device_bytes()
    network = network_of(device, jax.process_count())
    config, why = resolve_auto(
        config, prepared, device=device, gpus=jax.device_count(), memory_bytes=memory, network=network
    )
    check_mesh(config)
    emit(PhaseBegun(text=f"chosen {why}"))
    return config, why


def _check_plan(plan: Plan, config: JobConfig, prepared: Prepared) -> None:
    jobs = train_jobs(config, prepared)
    names_by_change: dict[str, list[str]] = {}  # the members of a sweep change together
    for name, change in _changed_jobs(plan, jobs):
        names_by_change.setdefault(change, []).append(name)
    changes = [f"{first_few(names, SHOWN)}: {change}" for change, names in names_by_change.items()]
    if changes:
        raise CheckpointError(
            "plan.mismatch",
            "the plan was made with other settings or data.",
            where=first_few(changes, SHOWN, "; "),
            fix="restore what the plan was made with, or make a new plan: lorafusion plan jobs.yaml -o plan.json",
        )
    try:
        verify_plan(plan, jobs)
    except PlanError as problem:
        raise CheckpointError(
            "plan.mismatch",
            "the plan does not fit this job file and its data.",
            why=str(problem).splitlines()[0],
            fix="make a new plan: lorafusion plan jobs.yaml -o plan.json",
        ) from None
    of_plan = (plan.sizes, plan.tile_tokens, *(layout[1:] for layout in plan.layouts))
    of_job = (config.batch.sizes, config.batch.tile_tokens, (config.mesh.stages, config.mesh.replicas))
    if of_plan != of_job:
        raise CheckpointError(
            "plan.mismatch",
            "the plan was made for another capacity, tile or mesh.",
            why=f"capacity, tile, (stages, replicas): {of_plan} in the plan, {of_job} in the job file",
            fix="train with the settings of the plan, or make a new plan: lorafusion plan jobs.yaml -o plan.json",
        )


def _changed_jobs(plan: Plan, jobs: Sequence[AdapterJob]) -> Iterator[tuple[str, str]]:
    """Yields names of adapters, each with what is not as it was when a plan was made, in the words of job files."""
    before, now = ({job.name: job for job in some} for some in (plan.jobs, jobs))
    for name in dict.fromkeys((*before, *now)):
        if name not in now or name not in before:
            yield name, f"only in the {'plan' if name in before else 'job file'}"
            continue
        old, new = before[name], now[name]
        changes = [
            (name, f"{key} was {getattr(old, field):g} and is {getattr(new, field):g}")
            for field, key in PLANNED.items()
            if getattr(old, field) != getattr(new, field)
        ]
        yield from changes
        if not changes and old != new:
            differ = sum(map(ne, old.sample_tokens, new.sample_tokens))
            yield name, f"{exact(differ)} of {exact(old.num_samples)} samples differ in length or place (data, seed)"
