"""Starts a run from a job, or resumes a run folder from its last checkpoint."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from lorafusion_jax.checkpoint.base_files import base_digests, check_base
from lorafusion_jax.checkpoint.base_model import base_directory, pin_base
from lorafusion_jax.checkpoint.base_weights import weight_problems
from lorafusion_jax.checkpoint.digests import Damage
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.new_run import must_be_writable, must_hold_no_run
from lorafusion_jax.checkpoint.requests import request_files
from lorafusion_jax.checkpoint.run_lock import run_lock
from lorafusion_jax.checkpoint.saved_states import Found, find_checkpoint
from lorafusion_jax.checkpoint.store import StateStore
from lorafusion_jax.checkpoint.warm_start import check_warm_starts, read_warm_starts, warm_start_digests
from lorafusion_jax.checkpoint.warm_start_base import check_start_bases
from lorafusion_jax.config.join import in_force, only
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.errors import CheckpointError, RunError, raise_all
from lorafusion_jax.pipeline.base import check_mesh
from lorafusion_jax.pipeline.batches import Batches
from lorafusion_jax.pipeline.compiles import CompileCounter
from lorafusion_jax.pipeline.processes import any_process, barrier, is_alone, is_first
from lorafusion_jax.pipeline.reading import BASE
from lorafusion_jax.pipeline.session import Session
from lorafusion_jax.planning.training_plan import plan_training, train_jobs
from lorafusion_jax.report.events import (
    CheckSkipped,
    FilesDamaged,
    Listener,
    PhaseBegun,
    ProgramCompiled,
    RunEvent,
    RunMoved,
    StartedUp,
)
from lorafusion_jax.report.record import check_record, eval_digests, make_record, other_table, other_versions, unchecked
from lorafusion_jax.report.recorder import Recorder, read_rows
from lorafusion_jax.signals import stop_if_asked
from lorafusion_jax.training.changes import Change, apply, recorded_changes, stopped_otherwise
from lorafusion_jax.training.exclusive import exclusive_run, fail_together
from lorafusion_jax.training.job import Job, first_steps
from lorafusion_jax.training.relayout import apply_resume_overrides, check_drop, check_settings, plan_for_mesh
from lorafusion_jax.training.run import Run, RunResult, StartUp
from lorafusion_jax.training.state import Progress, is_padded
from pallas_kernels import config_store
from pallas_kernels.device import device_kind
from scheduling import Plan, PlanError, verify_plan

SHOWN = 4  # damaged files that a message names


def train(
    config: JobConfig,
    out: str | Path,
    *,
    plan: Plan | None = None,
    listeners: Sequence[Listener] = (),
    verify_base: bool = False,
) -> RunResult:
    """Trains all adapters of a job into a new run folder.

    Args:
        config: from `load_config`.
        out: new run folder.
        plan: plan to execute (None: plan the job here).
        listeners: called with every `RunEvent`.
        verify_base: record digests of every byte of the base model, even of a large one.

    Raises:
        LoraFusionError: bad data, a plan for other data, a model that does not load, no space.
        Interrupted: stopped by a signal. The state is saved.
    """
    folder = RunFolder(Path(out))
    _check_start(config, folder)
    tell = _fan_out(listeners if is_first() else ())
    with fail_together():  # a file may be missing on one host
        config = pin_base(config)
        prepared = prepare(config, progress=lambda text: tell(PhaseBegun(text=text)))
        stop_if_asked()
        if plan is None:
            tell(PhaseBegun(text="planning"))
            plan = plan_training(config, prepared)
        else:
            _check_plan(plan, config, prepared)
        folder.must_be_new(plan)
        raise_all(weight_problems(base_directory(config)))
        base_files = base_digests(base_directory(config), every_byte=verify_base)
        record = make_record(config, prepared, plan, base_files, warm_start_digests(config))
    barrier("no folder yet")  # all processes have checked the folder before the first creates it
    return _execute(config, prepared, plan, folder, record, _heard(listeners, lambda: Recorder(folder.path)))


def resume(
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    drop: Sequence[str] = (),
    listeners: Sequence[Listener] = (),
    verify_base: bool = False,
) -> RunResult:
    """Continues a run from its newest checkpoint, or from its start. Results are bitwise those of an unbroken run.

    Args:
        out: run folder.
        overrides: `key=value` settings that may change, e.g. `mesh.stages=2`; see `relayout`. On another layout the
            rest is planned again and sums have another order, so results are equal up to rounding.
        drop: adapters to drop from the rest, e.g. failed ones. The rest is planned again without them, so the results
            of the others are equal up to rounding. An adapter that still trained counts as failed.
        listeners: called with every `RunEvent`.
        verify_base: compare every byte of the base model, even of a large one.

    Raises:
        CheckpointError: there is no run folder, another process trains it, or its plan, data or base model changed.
        ConfigError: a setting cannot change, or an adapter cannot be dropped.
    """
    folder = RunFolder(Path(out))
    with exclusive_run(folder):
        return _go_on(folder, overrides, drop, listeners, verify_base)


def _go_on(
    folder: RunFolder,
    overrides: Sequence[str],
    drop: Sequence[str],
    listeners: Sequence[Listener],
    verify_base: bool,
) -> RunResult:
    before, record = folder.read_plan(), folder.read_record()  # in this order: another process may be writing them
    written = in_force(folder.read_config(), before)
    config = apply_resume_overrides(written, overrides)
    found = find_checkpoint(folder.state, any_process)
    status = {adapter.name: "to join" for adapter in config.adapters}
    status |= dict.fromkeys(_present(config, found, recorded_changes(folder)), "running")
    status |= {name: row["status"] for name, row in found.position.get("adapters", {}).items()}
    check_drop(drop, status)
    spoilt = folder.damaged_adapters({n: row["step"] for n, row in found.position.get("adapters", {}).items()})
    asked = any_process(bool(request_files(folder.path) or spoilt))
    nothing_left = found.slot == before.num_slots and not asked
    if nothing_left and not (progress := Progress.of(found.position)).unwritten:
        changes = recorded_changes(folder)
        for change in changes:
            if change.slot >= progress.slot:  # changes may be newer than the checkpoint
                apply(change, progress)
        progress.drop(stopped_otherwise(before, changes))
        return _finished(folder, before, progress, listeners)
    with fail_together():
        check_mesh(config)
        prepared = prepare(config)
        stop_if_asked()
        check_record(record, prepared, before, found.position.get("plan"))
        recorded = folder.recorded_config()
        check_settings(None if recorded is None else in_force(recorded, before), written)
        base_files = checked_base(record, config, verify_base)
        if found.slot is None:
            read_warm_starts(config)  # reports a missing folder
            check_warm_starts(record.get("warm_starts", {}), config)
        folder.check_record_file()
        failed = [name for name, what in status.items() if what == "failed"]
        plan = plan_for_mesh(before, config, found.slot or 0, drop=drop, failed=failed)
    after = -1 if found.slot is None else found.slot  # -1: keep no rows, not even those before the first slot
    heard = _heard(listeners, lambda: Recorder(folder.path, resume_slot=after))
    for notice in _notices(folder, found, record, spoilt):
        _fan_out(heard)(notice)
    record |= {"base_files": base_files, "eval": eval_digests(prepared)}  # earlier versions did not record them
    return _execute(config, prepared, plan, folder, record, heard, found=found, before=before)


def checked_base(record: dict, config: JobConfig, every_byte: bool) -> dict:
    """Compares the base model with that of the run. Returns all known digests."""
    directory, before = base_directory(config), record.get("base_files")
    now = base_digests(directory, every_byte=every_byte)
    if before is not None:
        check_base(before, now, directory)
    return (before or {}) | now


def _notices(folder: RunFolder, found: Found, record: dict, spoilt: Sequence[Damage]) -> list[RunEvent]:
    """What a user should know of the folder that the run goes on from."""
    notices, slot = [], found.slot or 0
    if spoilt:
        files = ", ".join(str(damage) for damage in spoilt[:SHOWN])
        text = f"damaged: {files}. These folders are written again from the checkpoint"
        notices.append(FilesDamaged(slot=slot, text=text))
    if found.damaged:
        files = ", ".join(str(damage) for damage in found.damaged[:SHOWN])
        text = f"damaged: {files}. The run goes on from the checkpoint before, {folder.state / str(found.slot)}"
        notices.append(FilesDamaged(slot=slot, text=text))
    lacking = unchecked(record)
    if found.unchecked:
        own = f"the checkpoint {folder.state / str(found.slot)}"
        lacking = f"{own}, {lacking}" if lacking else f"{own}: an earlier version wrote it without digests"
    if lacking:
        notices.append(CheckSkipped(slot=slot, text=f"not checked: {lacking}"))
    if (versions := other_versions(record)) is not None:
        notices.append(CheckSkipped(slot=slot, text=f"other versions: {versions}"))
    if (table := other_table(record, config_store.used_digest(device_kind()))) is not None:
        notices.append(CheckSkipped(slot=slot, text=table))
    return notices


def _finished(folder: RunFolder, plan: Plan, progress: Progress, listeners: Sequence[Listener]) -> RunResult:
    """Returns the result of a run that is complete. Reads neither data nor model."""
    result = RunResult(folder=folder.path, adapters=progress.adapters, seconds=progress.seconds, plan=plan)
    told = [row["kind"] for row in read_rows(folder.path / "events.jsonl")][-1:]
    if told != ["finished"]:  # it was killed between its last checkpoint and this event
        _fan_out(_heard(listeners, lambda: Recorder(folder.path)))(result.event())
    return result


def _check_start(config: JobConfig, folder: RunFolder) -> None:
    """Checks all that can be checked before data is read."""
    with fail_together():
        must_hold_no_run(folder, config)
        if is_first():
            must_be_writable(folder.path)
        check_mesh(config)
        read_warm_starts(config)
        raise_all(check_start_bases(config))


def _check_plan(plan: Plan, config: JobConfig, prepared: Prepared) -> None:
    try:
        verify_plan(plan, train_jobs(config, prepared))
    except PlanError as problem:
        raise CheckpointError(
            "plan.mismatch",
            "the plan is not a plan of this job file and its data.",
            why=str(problem).splitlines()[0],
            fix="lorafusion plan jobs.yaml -o plan.json",
        ) from None
    of_plan = (plan.sizes, plan.tile_tokens, *(layout[1:] for layout in plan.layouts))
    of_job = (config.batch.sizes, config.batch.tile_tokens, (config.mesh.stages, config.mesh.replicas))
    if of_plan != of_job:
        raise CheckpointError(
            "plan.mismatch",
            "the plan was made for another capacity, tile or mesh.",
            why=f"capacity, tile, (stages, replicas) are {of_plan} in the plan, {of_job} in the job file",
            fix="train with the settings that it was planned with, or lorafusion plan jobs.yaml -o plan.json again",
        )


def _heard(listeners: Sequence[Listener], recorder: Callable[[], Listener]) -> list[Listener]:
    """Returns the listeners of this process: only the first process records and shows events."""
    return [recorder(), *listeners] if is_first() else []


def _fan_out(listeners: Sequence[Listener]) -> Listener:
    def tell(event: RunEvent) -> None:
        for listener in listeners:
            listener(event)

    return tell


def _execute(
    config: JobConfig,
    prepared: Prepared,
    plan: Plan,
    folder: RunFolder,
    record: dict,
    listeners: Sequence[Listener],
    *,
    found: Found | None = None,
    before: Plan | None = None,
) -> RunResult:
    """Runs to the end, from the checkpoint found. `before` is the plan in the folder, if there is one."""
    slot, tell = None if found is None else found.slot, _fan_out(listeners)
    store = StateStore(folder.state, config.save.keep, slot)
    now = only(config, _present(config, found, [] if before is None else recorded_changes(folder)))
    weights = {} if slot is not None else read_warm_starts(now)  # a checkpoint holds later weights
    tell(PhaseBegun(text=f"loading {Path(config.base.model).name}"))
    with ExitStack() as held:
        began = time.perf_counter()
        session = Session.open(now, prepared, later=config)
        held.callback(session.close)
        session.start(weights)
        progress = Progress.first(_steps(now, prepared), replicas=config.mesh.replicas, plan=plan.digest)
        if found is not None and slot is not None:
            saved = Progress.of(found.position)
            session.load_state(store.restore, saved.replicas, padded=is_padded(found.position))
            progress = dataclasses.replace(saved, replicas=config.mesh.replicas, plan=plan.digest)
        stop_if_asked()
        rows: list[Microbatch] = []
        if progress.slot < plan.num_slots:
            rows = Batches(config, prepared, plan, session.executor.local_replicas).empty(progress.slot)
        start_up = _finish_loading(session, rows, began, progress.slot, tell)
        stop_if_asked()
        if is_first():  # after the model has loaded, so that a failed start changes nothing
            if before is None:
                folder.path.mkdir(parents=True, exist_ok=True)
                held.enter_context(run_lock(folder.path))
            _write(folder, config, record, plan, before, progress.slot, tell)
        barrier("folder is there")
        if not is_first():
            plan = folder.read_plan()  # a search with a time limit may have found another plan here
        run = Run(
            Job(config=config, prepared=prepared, plan=plan),
            folder,
            store=store,
            session=session,
            progress=progress,
            listener=tell,
            resumed=slot is not None,
            start_up=start_up,
        )
        return run.execute()


def _finish_loading(session: Session, rows: Sequence[Microbatch], began: float, slot: int, tell: Listener) -> StartUp:
    """Reads and compiles. A stage that fails ends the run once its folder is there; a model that is broken, at once."""
    try:
        with CompileCounter() as programs:
            times = session.finish_loading(rows, lambda text: tell(PhaseBegun(text=text)))
    except RunError as problem:
        if not is_alone():  # other processes are blocked in a program that needs this one
            raise
        return StartUp(failure=problem)
    parts = {name: tuple(round(at - began, 3) for at in each) for name, each in times.items()}
    started = StartedUp(
        slot=slot,
        seconds=round(time.perf_counter() - began, 3),
        parts=parts,
        compiled=programs.compiled,
        from_cache=programs.from_cache,
    )
    compiled = [each for name, each in parts.items() if name != BASE]
    if not compiled:
        return StartUp(news=(started,))
    seconds = max(end for _, end in compiled) - min(begin for begin, _ in compiled)
    return StartUp(news=(started, ProgramCompiled(slot=slot, program="training step", seconds=round(seconds, 3))))


def _steps(config: JobConfig, prepared: Prepared) -> dict[str, int]:
    """Returns the number of optimizer steps of each adapter before extensions."""
    return {adapter.name: first_steps(adapter, prepared.adapters[adapter.name]) for adapter in config.adapters}


def _present(config: JobConfig, found: Found | None, changes: Sequence[Change]) -> list[str]:
    """Returns the adapters present at the start of this process; others may join later."""
    if found is not None and found.slot is not None:
        return list(found.position["adapters"])
    added = {change.adapter for change in changes if change.action == "add"}
    return [adapter.name for adapter in config.adapters if adapter.name not in added]


def _write(
    folder: RunFolder, config: JobConfig, record: dict, plan: Plan, before: Plan | None, slot: int, tell: Listener
) -> None:
    """Creates the run folder, or records the current settings and plan in it."""
    if before is None:
        folder.create(config, plan, record)
        return
    folder.write_config(config, record)
    if plan is before:
        return
    folder.write_move(plan, slot)
    tell(
        RunMoved(
            slot=slot,
            stages=plan.num_stages,
            replicas=plan.data_parallel,
            slots_left=plan.num_slots - slot,
            slots_left_before=before.num_slots - slot,
            plan=plan.digest,
        )
    )
