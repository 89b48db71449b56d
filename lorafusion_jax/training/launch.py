"""Opens a session for a job, loads and compiles, and runs the rest of the plan in the run folder."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lorafusion_jax.checkpoint.begun_folder import StartFile
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.requests import remove_parts
from lorafusion_jax.checkpoint.saved_states import FoundCheckpoint
from lorafusion_jax.checkpoint.store import StateStore
from lorafusion_jax.checkpoint.warm_start import read_warm_starts, reread_warm_starts
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.references import adapters_with_references
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.stack import residents
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.references import with_references
from lorafusion_jax.errors import CheckpointError, LoraFusionError, RunError
from lorafusion_jax.report.events import (
    Listener,
    PhaseBegun,
    ProgramCompiled,
    RunEvent,
    RunMoved,
    RunStarted,
    StartedUp,
    fan_out,
)
from lorafusion_jax.session.ahead import Ahead, compile_ahead
from lorafusion_jax.session.assembler import Batches
from lorafusion_jax.session.compiles import CompileCounter
from lorafusion_jax.session.processes import any_process, barrier, is_alone, is_first
from lorafusion_jax.session.reading import BASE
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.task import first_steps
from lorafusion_jax.signals import stop_if_asked
from lorafusion_jax.training.agreement import check_agreement
from lorafusion_jax.training.changes import Change, recorded_changes
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.references import compute_references, store_references
from lorafusion_jax.training.run import Run, StartUp
from lorafusion_jax.training.saver import read_states
from lorafusion_jax.training.state import Progress, RunResult
from scheduling import Plan


def launch(
    config: JobConfig,
    prepared: Prepared,
    plan: Plan,
    folder: RunFolder,
    record: dict,
    listeners: Sequence[Listener],
    *,
    checkpoint: FoundCheckpoint | None = None,
    before: Plan | None = None,
) -> RunResult:
    """Runs to the end, from the checkpoint found. `before` is the plan in the folder, if there is one."""
    slot, emit = None if checkpoint is None else checkpoint.slot, fan_out(listeners)
    store = StateStore(folder.state, config.save.keep, slot)
    initial = select_adapters(
        config, initial_adapters(config, checkpoint, [] if before is None else recorded_changes(folder))
    )
    # A checkpoint holds later weights, but for adapters that have not been in a place yet.
    weights = read_warm_starts(initial) if slot is None else {}
    if slot is not None and residents(config) is not None:
        weights = reread_warm_starts(record.get("warm_starts", {}), initial)
    emit(PhaseBegun(text=f"loading {Path(config.base.model).name}"))
    with ExitStack() as resources:
        began = time.perf_counter()
        starting = resources.enter_context(ExitStack())
        ahead = starting.enter_context(compile_ahead(initial))
        session = Session.open(initial, prepared, later=config, base_files=record["base_files"])
        resources.callback(session.close)
        session.start_all(weights)
        progress = Progress.first(
            _initial_steps(initial, prepared), stage_devices=config.mesh.stage_devices, plan=plan.digest
        )
        if checkpoint is not None and slot is not None:
            saved = Progress.of(checkpoint.position)
            session.load_states(read_states(store, session, saved))
            progress = dataclasses.replace(saved, stage_devices=config.mesh.stage_devices, plan=plan.digest)
        stop_if_asked()
        rows: list[Microbatch] = []
        if progress.slot < plan.num_slots:
            rows = Batches(config, prepared, plan, session.assembler, session.tasks).empty(progress.slot)
        start_up = _finish_loading(session, rows, began, progress.slot, emit, ahead)
        starting.close()
        stop_if_asked()
        references = {}
        if before is None and start_up.failure is None:
            names = adapters_with_references(initial)
            references, events = compute_references(session, prepared, names, emit)
            prepared = with_references(prepared, references)
            start_up = dataclasses.replace(start_up, events=(*start_up.events, *events))
        session.take_data(initial, prepared, progress.adapters)
        if is_first():  # after the model has loaded, so that a failed start changes nothing
            record = store_references(folder.path, record, references, config)
            _write_folder(folder, config, record, plan, before, progress.slot, emit)
        barrier()
        with fail_together():  # the folder may be on a disk of another host
            plan = plan if is_first() else folder.read_plan()  # a search may have found another plan here
        check_agreement({"plan.json": plan.digest})
        run = Run(
            Job(config=config, prepared=prepared, plan=plan),
            folder,
            store=store,
            session=session,
            progress=progress,
            listener=emit,
            resumed=slot is not None,
            start_up=start_up,
        )
        return run.execute()


def _finish_loading(
    session: Session, rows: Sequence[Microbatch], began: float, slot: int, emit: Listener, ahead: Ahead
) -> StartUp:
    """Reads and compiles. A stage that fails ends the run once its folder is there; a model that is broken, at once."""
    try:
        with CompileCounter() as programs:
            times = session.finish_loading(rows, lambda text: emit(PhaseBegun(text=text)), ahead)
    except RunError as problem:
        if not is_alone():  # other processes are blocked in a program that needs this one
            raise
        return StartUp(failure=problem)
    parts = {name: tuple(round(at - began, 3) for at in interval) for name, interval in times.items()}
    started = StartedUp(
        slot=slot,
        seconds=round(time.perf_counter() - began, 3),
        parts=parts,
        compiled=programs.compiled,
        from_cache=programs.from_cache,
        lowering_s=round(programs.lowering_s, 3),
        compiling_s=round(programs.compiling_s, 3),
        base_from_cache=session.reading.from_cache,
        ahead_failures=ahead.failures,
    )
    notices = [dataclasses.replace(notice, slot=slot) for notice in session.reading.take_notices()]
    compile_intervals = [interval for name, interval in parts.items() if name != BASE]
    if not compile_intervals:
        return StartUp(events=(*notices, started))
    seconds = max(end for _, end in compile_intervals) - min(begin for begin, _ in compile_intervals)
    return StartUp(
        events=(*notices, started, ProgramCompiled(slot=slot, program="training step", seconds=round(seconds, 3)))
    )


def local_listeners(listeners: Sequence[Listener], recorder: Callable[[], Listener]) -> list[Listener]:
    """Returns the listeners of this process: only the first process records and shows events."""
    return [recorder(), *listeners] if is_first() else []


def record_phases(file: StartFile) -> Listener:
    """Returns a listener that keeps the phases of a start in its file, until the run has started."""

    def listen(event: RunEvent) -> None:
        if isinstance(event, RunStarted):
            file.remove()
        elif isinstance(event, PhaseBegun):
            file.record(event.text)

    return listen


def _initial_steps(config: JobConfig, prepared: Prepared) -> dict[str, int]:
    """Returns the number of optimizer steps of each adapter before extensions."""
    return {adapter.name: first_steps(adapter, prepared.adapters[adapter.name]) for adapter in config.adapters}


def initial_adapters(config: JobConfig, checkpoint: FoundCheckpoint | None, changes: Sequence[Change]) -> list[str]:
    """Returns the adapters present at the start of this process; others may join later."""
    if checkpoint is not None and checkpoint.slot is not None:
        return list(checkpoint.position["adapters"])
    added = {change.adapter for change in changes if change.action == "add"}
    return [adapter.name for adapter in config.adapters if adapter.name not in added]


def _write_folder(
    folder: RunFolder, config: JobConfig, record: dict, plan: Plan, before: Plan | None, slot: int, emit: Listener
) -> None:
    """Creates the run folder, or records the current settings and plan in it."""
    if before is None:
        folder.create(config, plan, record)
        return
    if plan is before:
        folder.write_config(config, record)
        return
    folder.write_move(plan, slot, record=record, config=config)
    emit(
        RunMoved(
            slot=slot,
            stages=plan.num_stages,
            replicas=plan.data_parallel,
            slots_left=plan.num_slots - slot,
            slots_left_before=before.num_slots - slot,
            plan=plan.digest,
        )
    )


@contextmanager
def fail_together() -> Iterator[None]:
    """Raises on every process if the body raises on any. Collective: every process must enter it equally often.

    Raises:
        LoraFusionError: the error of this process.
        CheckpointError: `run.refused`, if another process raised.
    """
    error: LoraFusionError | None = None
    try:
        yield
    except LoraFusionError as problem:
        error = problem
    if any_process(error is not None) and error is None:
        error = CheckpointError("run.refused", "another process of this run failed; see its message.")
    if error is not None:
        raise error


@contextmanager
def exclusive_run(folder: RunFolder) -> Iterator[None]:
    """Prevents other processes from training this run, and removes temporary files of killed processes.

    Raises:
        CheckpointError: `run.in-use` or `run.missing` (there is no run), on all processes of this run.
    """
    with ExitStack() as resources:
        with fail_together():
            if is_first():
                resources.enter_context(folder.lock())
                folder.complete_change()
                folder.remove_leftovers()  # before any process of this run looks at checkpoints
                remove_parts(folder.path)
        yield
