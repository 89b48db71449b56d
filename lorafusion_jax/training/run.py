"""Trains a job file from the first slot, or a run folder from its last checkpoint, to finished adapters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.store import StateStore
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared, plan_training, prepare, train_jobs
from lorafusion_jax.errors import CheckpointError, ConfigError, LoraFusionError
from lorafusion_jax.modules.spec import AdapterSpec, resolve_targets
from lorafusion_jax.report.events import Event, Listener
from lorafusion_jax.report.record import check_record, make_record
from lorafusion_jax.report.recorder import Recorder
from lorafusion_jax.training.base import load_base
from lorafusion_jax.training.evaluation import Evaluator
from lorafusion_jax.training.export import AdapterExporter, read_starts, start_from
from lorafusion_jax.training.leaves import Parts, take_apart
from lorafusion_jax.training.loop import Hooks, Interrupted, Loop
from lorafusion_jax.training.programs import Programs
from lorafusion_jax.training.state import AdapterProgress, RunState
from scheduling import Plan, PlanError, verify_plan


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
    config: JobConfig, out: str | Path, *, plan: Plan | None = None, listeners: Sequence[Listener] = ()
) -> RunResult:
    """Trains all adapters of a job and leaves a run folder.

    Args:
        config: from `load_config`.
        out: run folder, new.
        plan: executed exactly; made here when absent.
        listeners: called with every `Event`.

    Raises:
        LoraFusionError: bad data, a plan for other data, a model that does not load, no space.
        Interrupted: stopped by a signal; the state is saved.
    """
    _one_device(config)
    folder = RunFolder(Path(out))
    tell = _fan_out(listeners)
    prepared = prepare(config, progress=lambda text: tell(Event(kind="phase", values={"text": text})))
    if plan is None:
        tell(Event(kind="phase", values={"text": "planning"}))
        plan = plan_training(config, prepared)
    else:
        _check_plan(plan, config, prepared)
    folder.must_be_new(plan)
    return _Run(config, prepared, plan, folder, [Recorder(folder.path), *listeners]).go(resume=False)


def resume(out: str | Path, *, listeners: Sequence[Listener] = ()) -> RunResult:
    """Continues a run folder from its newest checkpoint, or from its start, bitwise as if it had never stopped.

    Raises:
        CheckpointError: no run folder, or data or plan changed since.
    """
    folder = RunFolder(Path(out))
    config, plan, record = folder.read_config(), folder.read_plan(), folder.read_record()
    _one_device(config)
    prepared = prepare(config)
    check_record(record, prepared, plan)
    store = StateStore(folder.state)
    slot = store.latest()
    store.close()
    recorder = Recorder(folder.path, resume_slot=-1 if slot is None else slot)  # -1: not even the first losses stay
    return _Run(config, prepared, plan, folder, [recorder, *listeners]).go(resume=slot is not None)


def adapter_specs(config: JobConfig) -> list[AdapterSpec]:
    """The adapters of a job as the modules see them."""
    return [
        AdapterSpec(
            name=a.name,
            rank=a.lora.rank,
            alpha=a.lora.alpha,
            rslora=a.lora.rslora,
            dropout=a.lora.dropout,
            targets=resolve_targets(a.lora.targets),
            seed=a.seed,
        )
        for a in config.adapters
    ]


def _one_device(config: JobConfig) -> None:
    if config.mesh.stages * config.mesh.data > 1:
        raise ConfigError(
            "mesh.one-device",
            f"the job asks for {config.mesh.stages} stages and {config.mesh.data} replicas.",
            why="training runs on one device in this version; lorafusion plan works for any mesh",
            fix="mesh.stages=1 mesh.data=1",
        )


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
    of_plan = (plan.capacity_tokens, plan.tile_tokens, plan.num_stages, plan.data_parallel)
    of_job = (config.batch.capacity_tokens, config.batch.tile_tokens, config.mesh.stages, config.mesh.data)
    if of_plan != of_job:
        raise CheckpointError(
            "plan.mismatch",
            "the plan was made for another capacity, tile or mesh.",
            why=f"capacity, tile, stages and replicas are {of_plan} in the plan, {of_job} in the job file",
            fix="lorafusion plan jobs.yaml -o plan.json",
        )


def _fan_out(listeners: Sequence[Listener]) -> Listener:
    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell


class _Run:
    """Wires model, programs, checkpoints and listeners together for one sitting."""

    def __init__(
        self, config: JobConfig, prepared: Prepared, plan: Plan, folder: RunFolder, listeners: Sequence[Listener]
    ):
        self._config, self._prepared, self._plan, self._folder = config, prepared, plan, folder
        self._tell = _fan_out(listeners)
        self._store = StateStore(folder.state, config.save.keep)
        self._specs = adapter_specs(config)

    def go(self, *, resume: bool) -> RunResult:
        starts = read_starts(self._config, self._specs)
        parts = start_from(self._load(), starts)
        programs = Programs(parts, self._config.adapters, self._specs, self._config.train)
        self._state = self._initial(parts, programs)
        if resume:
            self._state = self._state.restored(*self._store.restore(self._state.arrays()))
        elif (
            not self._folder.plan_file.exists()
        ):  # not before the model has loaded: a failed start leaves nothing behind
            self._folder.create(self._config, self._plan, make_record(self._config, self._prepared, self._plan))
        self._store.check_space(self._state.arrays())
        self._evaluator = Evaluator(self._config, self._prepared, programs, parts.frozen)
        self._exporter = AdapterExporter(self._config, self._prepared, self._plan, self._folder, self._specs)
        self._announce(parts)
        if not resume:
            for adapter in self._config.adapters:
                self._evaluate(adapter.name, 0)
        loop = Loop(
            self._config,
            self._prepared,
            self._plan,
            programs,
            parts.frozen,
            self._state,
            self._tell,
            Hooks(save=self._save, evaluate=self._evaluate, finish=self._finish),
        )
        try:
            loop.run()
        except Interrupted:
            self._tell(Event(kind="interrupted", slot=self._state.slot))
            raise
        except LoraFusionError as problem:
            with suppress(OSError):  # a full disk cannot take the note either
                self._tell(
                    Event(kind="stopped", slot=self._state.slot, values={"code": problem.code, "what": problem.what})
                )
            raise
        finally:
            self._store.close()
        result = RunResult(
            folder=self._folder.path, adapters=self._state.adapters, seconds=self._state.seconds, plan=self._plan
        )
        self._tell(
            Event(
                kind="finished",
                slot=self._state.slot,
                values={
                    "exit_code": result.exit_code,
                    "seconds": round(result.seconds, 3),
                    "peak_bytes": _peak_bytes(),
                },
            )
        )
        return result

    def _load(self) -> Parts:
        self._phase(f"loading {Path(self._config.base.model).name}")
        return take_apart(load_base(self._config, self._prepared, self._specs))

    def _initial(self, parts: Parts, programs: Programs) -> RunState:
        steps = {
            adapter.name: -(-len(self._prepared.adapters[adapter.name].order) // adapter.global_samples)
            for adapter in self._config.adapters
        }
        optimizers = {spec.name: programs.init_optimizer(index, parts.lora) for index, spec in enumerate(self._specs)}
        # Committed to the device like every result: an uncommitted first argument would compile each program twice
        # (3m49 each at 8B, unrolled, on an H200).
        arrays = jax.device_put(
            {"lora": parts.lora, "sums": programs.start(parts.lora), "optimizers": optimizers}, jax.local_devices()[0]
        )
        return RunState(
            **arrays, adapters={name: AdapterProgress(name=name, num_steps=count) for name, count in steps.items()}
        )

    def _announce(self, parts: Parts) -> None:
        device = jax.devices()[0]
        record = self._folder.read_record() | {"device": device.device_kind, "platform": device.platform}
        self._folder.write_record(record)
        trainable = sum(leaf.size for leaf in parts.lora.values())
        self._tell(
            Event(
                kind="started",
                slot=self._state.slot,
                values={
                    "device": device.device_kind,
                    "slots": len(self._plan.slots),
                    "density": round(self._plan.density, 4),
                    "adapters": {name: adapter.num_steps for name, adapter in self._state.adapters.items()},
                    "capacity_tokens": self._plan.capacity_tokens,
                    "trainable": trainable,
                    "plan": self._plan.digest,
                    "frozen": sum(leaf.size for leaf in jax.tree.leaves(parts.frozen)),
                },
            )
        )

    def _evaluate(self, name: str, step: int) -> None:
        if self._prepared.adapters[name].eval is None:
            return
        self._phase(f"evaluating {name}")
        loss, tokens = self._evaluator(name, self._state.lora)
        if step == 0:
            self._state.first_losses[name] = loss
        self._tell(
            Event(
                kind="eval",
                slot=self._state.slot,
                adapter=name,
                step=step,
                values={"eval_loss": loss, "eval_tokens": tokens},
            )
        )

    def _save(self) -> None:
        self._phase("saving")
        started = time.perf_counter()
        self._store.save(self._state.slot, self._state.arrays(), self._state.position())
        for name, adapter in self._state.adapters.items():
            if adapter.status == "running" and adapter.step:
                self._exporter(name, adapter.step, self._state.lora)
        self._tell(
            Event(
                kind="saved",
                slot=self._state.slot,
                values={
                    "path": str(self._folder.state / str(self._state.slot)),
                    "seconds": round(time.perf_counter() - started, 3),
                },
            )
        )

    def _finish(self, name: str) -> None:
        adapter = self._state.adapters[name]
        if adapter.step:
            path = self._exporter(name, adapter.step, self._state.lora)
            self._tell(
                Event(
                    kind="exported", slot=self._state.slot, adapter=name, step=adapter.step, values={"path": str(path)}
                )
            )

    def _phase(self, text: str) -> None:
        self._tell(Event(kind="phase", values={"text": text}))


def _peak_bytes() -> int | None:
    """Most device memory that was in use; None where the backend does not say (CPU)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
