"""Trains a job file from the first slot, or a run folder from its last checkpoint, to finished adapters."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import jax

from lorafusion_jax.checkpoint.base_files import base_digests, check_base
from lorafusion_jax.checkpoint.base_model import base_directory, pin_base
from lorafusion_jax.checkpoint.digests import is_intact
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.new_run import must_be_writable, must_hold_no_run
from lorafusion_jax.checkpoint.run_lock import run_lock
from lorafusion_jax.checkpoint.saved_states import Found, find_checkpoint
from lorafusion_jax.checkpoint.store import StateStore
from lorafusion_jax.checkpoint.warm_start import check_warm_starts, read_warm_starts, start_from, warm_start_digests
from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.errors import CheckpointError, LoraFusionError
from lorafusion_jax.pipeline.executor import Executor
from lorafusion_jax.pipeline.processes import any_process, barrier, is_first
from lorafusion_jax.pipeline.spans import Spans
from lorafusion_jax.pipeline.state import gather, like, scatter
from lorafusion_jax.planning.prediction import predicted_bubbles
from lorafusion_jax.planning.training_plan import plan_training, train_jobs
from lorafusion_jax.report.data_notes import data_notes
from lorafusion_jax.report.events import (
    AdapterEvaluated,
    AdapterFailed,
    CheckSkipped,
    FilesDamaged,
    Listener,
    PhaseBegun,
    RunEvent,
    RunFinished,
    RunInterrupted,
    RunMoved,
    RunStarted,
    RunStopped,
    StateSaved,
)
from lorafusion_jax.report.record import check_record, eval_digests, make_record, other_versions, unchecked
from lorafusion_jax.report.recorder import Recorder, read_rows
from lorafusion_jax.training.adapter_writer import AdapterWriter
from lorafusion_jax.training.base import check_mesh, load_stages, memory_warning
from lorafusion_jax.training.evaluation import Evaluator
from lorafusion_jax.training.exclusive import exclusive_run, fail_together
from lorafusion_jax.training.export_queue import ExportQueue
from lorafusion_jax.training.loop import Hooks, Interrupted, Loop
from lorafusion_jax.training.relayout import apply_resume_overrides, check_drop, check_settings, plan_for_mesh
from lorafusion_jax.training.state import AdapterProgress, Progress
from scheduling import Plan, PlanError, verify_plan

SHOWN = 4  # damaged files that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        seconds: time spent in slots, over all sittings.
    """

    folder: Path
    adapters: dict[str, AdapterProgress]
    seconds: float
    plan: Plan

    @property
    def exit_code(self) -> int:
        failed = [adapter.status == "failed" for adapter in self.adapters.values()]
        return 0 if not any(failed) else 1 if all(failed) else 3


def train(
    config: JobConfig,
    out: str | Path,
    *,
    plan: Plan | None = None,
    listeners: Sequence[Listener] = (),
    verify_base: bool = False,
) -> RunResult:
    """Trains all adapters of a job and leaves a run folder.

    Args:
        config: from `load_config`.
        out: run folder, new.
        plan: executed exactly; made here when absent.
        listeners: called with every `RunEvent`.
        verify_base: notes a digest of every byte of the base model, also of a large one.

    Raises:
        LoraFusionError: bad data, a plan for other data, a model that does not load, no space.
        Interrupted: stopped by a signal; the state is saved.
    """
    folder = RunFolder(Path(out))
    _check_start(config, folder)
    tell = _fan_out(listeners if is_first() else ())
    with fail_together():  # a file may be missing on one host
        config = pin_base(config)
        prepared = prepare(config, progress=lambda text: tell(PhaseBegun(text=text)))
        if plan is None:
            tell(PhaseBegun(text="planning"))
            plan = plan_training(config, prepared)
        else:
            _check_plan(plan, config, prepared)
        folder.must_be_new(plan)
        base_files = base_digests(base_directory(config), every_byte=verify_base)
        record = make_record(config, prepared, plan, base_files, warm_start_digests(config))
    barrier("no folder yet")  # before the first process makes it
    return _Run(config, prepared, plan, folder, record, _heard(listeners, lambda: Recorder(folder.path))).go()


def resume(
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    drop: Sequence[str] = (),
    listeners: Sequence[Listener] = (),
    verify_base: bool = False,
) -> RunResult:
    """Continues a run folder from its newest checkpoint, or from its start, bitwise as if it had never stopped.

    Args:
        out: run folder.
        overrides: `key=value` settings that say where the run goes on, e.g. `mesh.stages=2`; see `relayout`. On another
            layout what is left is planned again and sums come in another order, so results are equal to rounding.
        drop: adapters to leave out of what is left, e.g. failed ones. The rest is planned again without them, so
            the results of the others are equal to rounding. An adapter that still trained counts as failed.
        listeners: called with every `RunEvent`.
        verify_base: compares every byte of the base model, also of a large one.

    Raises:
        CheckpointError: no run folder, another process trains it, or plan, data or base model changed since.
        ConfigError: a setting that a begun run cannot change, or an adapter that cannot be dropped.
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
    written = folder.read_config()
    config = apply_resume_overrides(written, overrides)
    found = find_checkpoint(folder.state, _any_process)
    status = {adapter.name: "running" for adapter in config.adapters}
    status |= {name: row["status"] for name, row in found.position.get("adapters", {}).items()}
    check_drop(drop, status)
    if found.slot == before.num_slots and not (progress := Progress.of(found.position)).unwritten:
        progress.drop(before.stopped)
        return _finished(folder, before, progress, listeners)
    with fail_together():
        check_mesh(config)
        prepared = prepare(config)
        check_record(record, prepared, before, found.position.get("plan"))
        check_settings(folder.recorded_config(), written)
        base_files = _checked_base(record, config, verify_base)
        if found.slot is None:
            read_warm_starts(config)  # names a folder that is not there any more
            check_warm_starts(record.get("warm_starts", {}), config)
        folder.check_record_file()
        failed = [name for name, what in status.items() if what == "failed"]
        plan = plan_for_mesh(before, config, found.slot or 0, drop=drop, failed=failed)
    after = -1 if found.slot is None else found.slot  # -1: not even the first losses stay
    heard = _heard(listeners, lambda: Recorder(folder.path, resume_slot=after))
    for notice in _notices(folder, found, record):
        _fan_out(heard)(notice)
    record |= {"base_files": base_files, "eval": eval_digests(prepared)}  # earlier versions did not note them
    return _Run(config, prepared, plan, folder, record, heard).go(found=found, before=before)


def _checked_base(record: dict, config: JobConfig, every_byte: bool) -> dict:
    """Compares the base model with the run's; returns all digests that are known of it now."""
    directory, before = base_directory(config), record.get("base_files")
    now = base_digests(directory, every_byte=every_byte)
    if before is not None:
        check_base(before, now, directory)
    return (before or {}) | now


def _any_process(damaged: bool) -> bool:
    return any_process(damaged) if jax.distributed.is_initialized() else damaged  # one process starts no backend here


def _notices(folder: RunFolder, found: Found, record: dict) -> list[RunEvent]:
    """What a user should know of the folder that the run goes on from."""
    notices, slot = [], found.slot or 0
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
    return notices


def _finished(folder: RunFolder, plan: Plan, progress: Progress, listeners: Sequence[Listener]) -> RunResult:
    """What a run came to that has nothing left to do; neither data nor model are read."""
    result = RunResult(folder=folder.path, adapters=progress.adapters, seconds=progress.seconds, plan=plan)
    told = [row["kind"] for row in read_rows(folder.path / "events.jsonl")][-1:]
    if told != ["finished"]:  # it was cut off between its last checkpoint and the news of it
        _fan_out(_heard(listeners, lambda: Recorder(folder.path)))(_end(result, None))
    return result


def _end(result: RunResult, peak_bytes: int | None) -> RunFinished:
    return RunFinished(
        slot=len(result.plan.slots),
        exit_code=result.exit_code,
        seconds=round(result.seconds, 3),
        peak_bytes=peak_bytes,
    )


def _check_start(config: JobConfig, folder: RunFolder) -> None:
    """What can be wrong before any data are read."""
    with fail_together():
        must_hold_no_run(folder, config)
        if is_first():
            must_be_writable(folder.path)
        check_mesh(config)
        read_warm_starts(config)


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
    of_plan = (plan.capacity_tokens, plan.tile_tokens, *(layout[1:] for layout in plan.layouts))
    of_job = (config.batch.capacity_tokens, config.batch.tile_tokens, (config.mesh.stages, config.mesh.replicas))
    if of_plan != of_job:
        raise CheckpointError(
            "plan.mismatch",
            "the plan was made for another capacity, tile or mesh.",
            why=f"capacity, tile, (stages, replicas) are {of_plan} in the plan, {of_job} in the job file",
            fix="train with the settings that it was planned with, or lorafusion plan jobs.yaml -o plan.json again",
        )


def _heard(listeners: Sequence[Listener], recorder: Callable[[], Listener]) -> list[Listener]:
    """One process of a run writes and shows what happens."""
    return [recorder(), *listeners] if is_first() else []


def _fan_out(listeners: Sequence[Listener]) -> Listener:
    def tell(event: RunEvent) -> None:
        for listener in listeners:
            listener(event)

    return tell


class _Run:
    """Wires model, programs, checkpoints and listeners together for one sitting."""

    def __init__(
        self,
        config: JobConfig,
        prepared: Prepared,
        plan: Plan,
        folder: RunFolder,
        record: dict,
        listeners: Sequence[Listener],
    ):
        self._config, self._prepared, self._plan, self._folder = config, prepared, plan, folder
        self._record = record
        self._tell = _fan_out(listeners)
        self._specs = adapter_specs(config)

    def go(self, *, found: Found | None = None, before: Plan | None = None) -> RunResult:
        """Runs to the end, from the checkpoint found; `before` is the plan that the folder holds, if there is one."""
        slot = None if found is None else found.slot
        self._store = StateStore(self._folder.state, self._config.save.keep, slot)
        starts = {} if slot is not None else read_warm_starts(self._config)  # the checkpoint has gone on from them
        self._phase(f"loading {Path(self._config.base.model).name}")
        self._stages = load_stages(self._config, self._prepared, self._specs)
        self._start(starts)
        if found is not None and slot is not None:
            self._restore(found.position)
        with ExitStack() as held:
            if is_first():  # not before the model has loaded: a failed start leaves everything as it was
                if before is None:
                    self._folder.path.mkdir(parents=True, exist_ok=True)
                    held.enter_context(run_lock(self._folder.path))
                self._write(before)
            with self._noted():
                return self._run(resume=slot is not None)

    def _run(self, *, resume: bool) -> RunResult:
        barrier("folder is there")
        if not is_first():
            self._plan = self._folder.read_plan()  # a search that the clock cut short may have ended elsewhere
        self._store.check_space(
            sum(size.nbytes for size in jax.tree.leaves([stage.changing() for stage in self._stages]))
        )
        self._spans = Spans(len(self._stages))
        self._executor = Executor(self._stages, [spec.name for spec in self._specs], self._spans)
        self._evaluator = Evaluator(self._config, self._prepared, self._executor)
        since = {name: adapter.step for name, adapter in self._progress.adapters.items()}
        writer = AdapterWriter(self._config, self._prepared, self._plan, self._folder, self._specs, since)
        self._exports = ExportQueue(writer, self._executor, self._specs, self._tell)
        hooks = Hooks(
            save=self._save,
            evaluate=self._evaluate,
            finish=self._finish,
            finished=self._exports.poll,
            bubble_share=self._spans.bubble_share,
        )
        self._announce()
        try:
            self._begin(resume)
            Loop(self._config, self._prepared, self._plan, self._executor, self._progress, self._tell, hooks).run()
        finally:
            self._exports.close()
            self._timeline()
        result = RunResult(
            folder=self._folder.path, adapters=self._progress.adapters, seconds=self._progress.seconds, plan=self._plan
        )
        self._tell(_end(result, _peak_bytes()))
        return result

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Notes in the run folder how a sitting ended that did not come to the end of its plan."""
        try:
            yield
        except Interrupted:
            self._tell(RunInterrupted(slot=self._progress.slot))
            raise
        except BaseException as problem:
            with suppress(OSError):  # a full disk cannot take the note either
                self._tell(RunStopped(slot=self._progress.slot, code=_code(problem), what=_what(problem)))
            raise

    def _begin(self, resume: bool) -> None:
        """What comes before the first microbatch."""
        # compiles what `_finish` runs in the middle of the pipeline: 0.3 to 0.7 s on a CPU
        with self._executor.blaming(None, None):
            for part in self._executor.read(lambda stage: stage.adapter(0)):
                part.result()
        if not resume:
            for adapter in self._config.adapters:
                self._evaluate(adapter.name, 0, self._progress.slot)
            return
        slot, unwritten = self._progress.slot, self._progress.unwritten
        for name, adapter in self._progress.adapters.items():  # a kill came between checkpoint and export
            if adapter in unwritten or not adapter.step:
                continue
            if _any_process(not is_intact(self._folder.adapter_step(name, adapter.step))):
                self._exports.write(adapter, slot)
        for adapter in self._progress.drop(self._plan.stopped):
            self._tell(
                AdapterFailed(
                    slot=slot, adapter=adapter.name, step=adapter.step, reason=adapter.reason, kept_step=adapter.step
                )
            )
            self._finish(adapter.name, slot)
        for adapter in unwritten:
            adapter.status, adapter.reason = "done", ""
            self._finish(adapter.name, slot)

    def _write(self, before: Plan | None) -> None:
        if before is None:
            self._folder.create(self._config, self._plan, self._record)
            return
        self._folder.write_config(self._config, self._record)
        if self._plan is before:
            return
        slot = self._progress.slot
        self._folder.write_move(self._plan, slot)
        self._tell(
            RunMoved(
                slot=slot,
                stages=self._plan.num_stages,
                replicas=self._plan.data_parallel,
                slots_left=self._plan.num_slots - slot,
                slots_left_before=before.num_slots - slot,
                plan=self._plan.digest,
            )
        )

    def _start(self, starts: dict) -> None:
        lora = start_from(self._stages[0].first_lora(), starts)
        for stage in self._stages:
            stage.start(lora)
        steps = {
            adapter.name: -(-len(self._prepared.adapters[adapter.name].order) // adapter.global_samples)
            for adapter in self._config.adapters
        }
        self._progress = Progress(
            adapters={name: AdapterProgress(name=name, num_steps=count) for name, count in steps.items()},
            replicas=self._config.mesh.replicas,
            plan=self._plan.digest,
        )

    def _restore(self, position: dict) -> None:
        progress = Progress.of(position)
        scatter(self._stages, self._store.restore(like(self._stages, progress.replicas)))
        self._progress = dataclasses.replace(progress, replicas=self._config.mesh.replicas, plan=self._plan.digest)

    def _announce(self) -> None:
        device = jax.devices()[0]
        if is_first():
            record = self._folder.read_record() | {"device": device.device_kind, "platform": device.platform}
            self._folder.write_record(record)
        trainable = sum(leaf.size for stage in self._stages for leaf in stage.lora.values())
        frozen = ModelConfig.from_hf(base_directory(self._config)).num_parameters  # a tied table lies on two stages
        self._tell(
            RunStarted(
                slot=self._progress.slot,
                device=device.device_kind,
                mesh=self._config.mesh.model_dump(include={"stages", "data", "fsdp"}),
                layers=[stage.extent.count for stage in self._stages],
                remat=self._stages[0].remat,
                memory_warning=self._memory_warning(),
                data_notes=data_notes(self._config, self._prepared),
                slots=len(self._plan.slots),
                density=round(self._plan.density, 4),
                predicted_bubble_share=predicted_bubbles(self._config, self._plan) if is_first() else None,
                adapters={name: adapter.num_steps for name, adapter in self._progress.adapters.items()},
                taken={name: adapter.step for name, adapter in self._progress.adapters.items()},
                failed={
                    name: adapter.reason
                    for name, adapter in self._progress.adapters.items()
                    if adapter.status == "failed"
                },
                capacity_tokens=self._plan.capacity_tokens,
                trainable=trainable,
                plan=self._plan.digest,
                frozen=frozen,
            )
        )

    def _memory_warning(self) -> str | None:
        model = ModelConfig.from_hf(base_directory(self._config))
        return memory_warning(self._config, model, self._stages[0].remat)

    def _evaluate(self, name: str, step: int, slots_done: int) -> None:
        if self._prepared.adapters[name].eval is None:
            return
        self._phase(f"evaluating {name}")
        with self._spans.pause(f"evaluating {name}"):
            found = self._evaluator(name)
        self._tell(
            AdapterEvaluated(
                slot=slots_done,
                adapter=name,
                step=step,
                eval_loss=found.loss,
                eval_tokens=found.tokens,
                metrics={f"eval_{key}": value for key, value in found.metrics.items()},
            )
        )

    def _save(self) -> None:
        self._phase("saving")
        started = time.perf_counter()
        with self._spans.pause("saving"):
            self._exports.poll(wait=True)  # an adapter that the checkpoint calls done has its folder
            self._executor.wait_dispatched()
            arrays = gather(self._stages)
            if is_first():
                self._store.save(self._progress.slot, arrays, self._progress.position())
            for adapter in self._progress.adapters.values():
                if adapter.status == "running" and adapter.step:
                    self._exports.write(adapter, self._progress.slot)
            barrier("saved")
        self._tell(
            StateSaved(
                slot=self._progress.slot,
                path=str(self._folder.state / str(self._progress.slot)),
                seconds=round(time.perf_counter() - started, 3),
            )
        )

    def _finish(self, name: str, slots_done: int) -> None:
        adapter = self._progress.adapters[name]
        if adapter.step:
            self._exports.submit(adapter, slots_done)

    def _timeline(self) -> None:
        timeline = self._spans.close(self._plan)
        if timeline.spans and is_first():
            with suppress(OSError):  # a full disk has its own error
                self._folder.write_timeline(timeline.to_json())

    def _phase(self, text: str) -> None:
        self._tell(PhaseBegun(text=text))


def _peak_bytes() -> int | None:
    """Most device memory that was in use; None where the backend does not say (CPU)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _code(problem: BaseException) -> str:
    return problem.code if isinstance(problem, LoraFusionError) else type(problem).__name__


def _what(problem: BaseException) -> str:
    """Why a sitting ended, in one line."""
    if isinstance(problem, LoraFusionError):
        return problem.what
    if isinstance(problem, KeyboardInterrupt):  # a second signal, or one before the first microbatch
        return "at once, by a signal"
    return str(problem).partition("\n")[0][:300] or type(problem).__name__
