"""Resumes a run folder from its last checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lorafusion_jax.checkpoint.base_files import base_digests, check_base
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.checkpoint.begun_folder import start_file
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.requests import request_files
from lorafusion_jax.checkpoint.saved_states import FoundCheckpoint, find_checkpoint, slots_of
from lorafusion_jax.checkpoint.warm_start import reread_warm_starts
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.references import adapters_with_references
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.digests import Damage
from lorafusion_jax.report.events import CheckSkipped, FilesDamaged, Listener, RunEvent, fan_out
from lorafusion_jax.report.record import check_record, other_scores, other_table, other_versions
from lorafusion_jax.report.recorder import Recorder, read_rows
from lorafusion_jax.session.base import check_mesh
from lorafusion_jax.session.processes import any_process, is_first
from lorafusion_jax.signals import stop_if_asked
from lorafusion_jax.training.agreement import check_agreement, job_facts, run_facts
from lorafusion_jax.training.changes import apply, recorded_changes, stopped_otherwise
from lorafusion_jax.training.launch import (
    exclusive_run,
    fail_together,
    initial_adapters,
    launch,
    local_listeners,
    record_phases,
)
from lorafusion_jax.training.references import read_references
from lorafusion_jax.training.relayout import apply_resume_overrides, check_drop, check_settings, plan_for_mesh
from lorafusion_jax.training.state import Progress, RunResult
from pallas_kernels import config_store
from pallas_kernels.device import device_kind
from scheduling import Plan

SHOWN = 4  # damaged files that a message names


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
    folder = RunFolder.of(out)
    with exclusive_run(folder), ExitStack() as start:
        if is_first():
            listeners = (record_phases(start.enter_context(start_file(folder.path))), *listeners)
        return _continue_run(folder, overrides, drop, listeners, verify_base)


def _continue_run(
    folder: RunFolder,
    overrides: Sequence[str],
    drop: Sequence[str],
    listeners: Sequence[Listener],
    verify_base: bool,
) -> RunResult:
    with fail_together():
        before, record, settings = folder.read_plan(), folder.read_record(), folder.read_config()
        config = apply_resume_overrides(settings, overrides)
    check_agreement(run_facts(record, before, slots_of(folder.state), drop))
    checkpoint = find_checkpoint(folder.state, any_process)
    status = _adapter_status(config, checkpoint, folder)
    check_drop(drop, status)
    damaged_exports = folder.damaged_adapters(
        {n: row["step"] for n, row in checkpoint.position.get("adapters", {}).items()}
    )
    has_requests = any_process(bool(request_files(folder.path) or damaged_exports))
    nothing_left = checkpoint.slot == before.num_slots and not has_requests
    if nothing_left and not (progress := Progress.of(checkpoint.position)).unwritten:
        folder.check_record_file()
        if is_first():  # a kill may have come before the links
            folder.mark_exports(config.save.keep)
        return _complete_result(folder, before, progress, listeners)
    with fail_together():
        with folder.naming_changed_settings():
            check_mesh(config)
            prepared = prepare(config)
        stop_if_asked()
        check_record(record, prepared, before, checkpoint.position.get("plan"))
        check_settings(folder.recorded_config(), settings)
        base_files = checked_base(record, config, verify_base)
        begun = checkpoint.position.get("adapters", {})  # of these the checkpoint holds later weights
        starting = select_adapters(config, [adapter.name for adapter in config.adapters if adapter.name not in begun])
        reread_warm_starts(record.get("warm_starts", {}), starting)
        folder.check_record_file()
        present = select_adapters(config, initial_adapters(config, checkpoint, recorded_changes(folder)))
        prepared = read_references(folder.path, record, config, prepared, adapters_with_references(present))
        failed = [name for name, state in status.items() if state == "failed"]
        late = Progress.of(checkpoint.position).not_awaited if checkpoint.position else ()
        slot = checkpoint.slot or 0
        plan = plan_for_mesh(before, config, prepared, slot, drop=drop, failed=failed, not_awaited=late)
    check_agreement(job_facts(config, prepared, base_files, starting))
    after = -1 if checkpoint.slot is None else checkpoint.slot  # -1: keep no rows, not even those before the first slot
    all_listeners = local_listeners(listeners, lambda: Recorder(folder.path, resume_slot=after))
    for notice in _folder_notices(folder, config, checkpoint, record, damaged_exports):
        fan_out(all_listeners)(notice)
    record["base_files"] = base_files
    if is_first():  # a kill may have come before the links
        folder.mark_exports(config.save.keep)
    return launch(config, prepared, plan, folder, record, all_listeners, checkpoint=checkpoint, before=before)


def _adapter_status(config: JobConfig, checkpoint: FoundCheckpoint, folder: RunFolder) -> dict[str, str]:
    """Returns the status of every adapter at the checkpoint; "to join" for one that is added at a later slot."""
    status = {adapter.name: "to join" for adapter in config.adapters}
    status |= dict.fromkeys(initial_adapters(config, checkpoint, recorded_changes(folder)), "running")
    return status | {name: row["status"] for name, row in checkpoint.position.get("adapters", {}).items()}


def checked_base(record: dict, config: JobConfig, every_byte: bool) -> dict:
    """Compares the base model with that of the run. Returns all known digests."""
    directory, before = base_directory(config), record["base_files"]
    digests = base_digests(directory, every_byte=every_byte)
    check_base(before, digests, directory)
    return before | digests


def _folder_notices(
    folder: RunFolder, config: JobConfig, checkpoint: FoundCheckpoint, record: dict, damaged_exports: Sequence[Damage]
) -> list[RunEvent]:
    """Returns events for what a user should know about the folder: damage, and checks that were skipped."""
    notices, slot = [], checkpoint.slot or 0
    if damaged_exports:
        files = ", ".join(str(damage) for damage in damaged_exports[:SHOWN])
        text = f"damaged: {files}. These folders are written again from the checkpoint"
        notices.append(FilesDamaged(slot=slot, text=text))
    if checkpoint.damaged:
        files = ", ".join(str(damage) for damage in checkpoint.damaged[:SHOWN])
        text = (
            f"damaged: {files}. The run continues from the checkpoint before it, {folder.state / str(checkpoint.slot)}"
        )
        notices.append(FilesDamaged(slot=slot, text=text))
    if (versions := other_versions(record)) is not None:
        notices.append(CheckSkipped(slot=slot, text=f"other versions: {versions}"))
    if (scores := other_scores(record, config)) is not None:
        notices.append(CheckSkipped(slot=slot, text=scores))
    if (table := other_table(record, config_store.used_digest(device_kind()))) is not None:
        notices.append(CheckSkipped(slot=slot, text=table))
    return notices


def _complete_result(folder: RunFolder, plan: Plan, progress: Progress, listeners: Sequence[Listener]) -> RunResult:
    """Returns the result of a run that is complete. Reads neither data nor model."""
    changes = recorded_changes(folder)
    for change in changes:
        if change.slot >= progress.slot:  # changes may be newer than the checkpoint
            apply(change, progress)
    progress.drop(stopped_otherwise(plan, changes))
    had_finished = [row["kind"] for row in read_rows(folder.path / "events.jsonl")][-1:] == ["finished"]
    result = RunResult(
        folder=folder.path,
        adapters=progress.adapters,
        seconds=progress.seconds,
        plan=plan,
        had_finished=had_finished,
    )
    if not had_finished:  # it was killed between its last checkpoint and this event
        fan_out(local_listeners(listeners, lambda: Recorder(folder.path)))(result.event())
    return result
