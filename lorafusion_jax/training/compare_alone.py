"""Trains one adapter of a run for a few steps twice, jointly and alone, and compares every tensor.

Both start from the run's settings and data. The joint training follows the run's plan. Nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.peft_leaves import Arrays, take_adapter
from lorafusion_jax.checkpoint.warm_start import check_warm_starts, read_warm_starts
from lorafusion_jax.config.references import adapters_with_references
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.pipeline.base import check_mesh
from lorafusion_jax.pipeline.session import Session
from lorafusion_jax.planning.training_plan import plan_training
from lorafusion_jax.report.record import check_record
from lorafusion_jax.training.hooks import Hooks
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.loop import Loop
from lorafusion_jax.training.resume_run import checked_base
from lorafusion_jax.training.state import AdapterProgress, Progress
from lorafusion_jax.training.stored_references import read_references
from scheduling import Plan

# Relative to the tensor, as in CONTRIBUTING.md. float32: sums have another order, and optimizer steps carry the
# difference on. bfloat16: activations are rounded to 8 bits, at other rows.
BOUNDS = {"float32": 1e-5, "bfloat16": 5e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """‖joint - alone‖ / ‖alone‖ of one tensor."""

    tensor: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of an adapter trained jointly and alone.

    Attributes:
        others: number of other adapters with rows in the joint slots.
        differences: differences of all tensors, largest first.
        bound: largest allowed difference.
    """

    adapter: str
    steps: int
    others: int
    differences: tuple[Difference, ...]
    bound: float

    @property
    def good(self) -> bool:
        return all(one.value <= self.bound for one in self.differences)  # False for NaN


def compare_alone(run: Path, name: str, steps: int) -> Comparison:
    """Trains an adapter of a run for a few steps, jointly and alone, and compares its weights.

    Raises:
        ConfigError: `verify.adapter`, the run has no such adapter.
        LoraFusionError: there is no run, or its plan, data or base model changed since.
    """
    folder = RunFolder(run)
    plan, record, config = folder.read_plan(), folder.read_record(), folder.read_config()
    names = [adapter.name for adapter in config.adapters]
    if name not in names:
        raise ConfigError(
            "verify.adapter", f"{run} has no adapter '{name}'.", fix=f"lorafusion verify {run} {names[0]}"
        )
    prepared = prepare(config)
    check_record(record, prepared, plan)
    prepared = read_references(run, record, prepared, adapters_with_references(config))
    checked_base(record, config, False)
    check_warm_starts(record.get("warm_starts", {}), config)
    steps = min(steps, plan.job_of[name].num_batches)
    joint = first_steps(plan, name, steps)
    config = _on_layout_of(config, plan)
    own = config.model_copy(update={"adapters": (config.adapter(name),)})
    own_data = Prepared(tokenizer=prepared.tokenizer, adapters={name: prepared.adapters[name]})
    alone = first_steps(plan_training(own, own_data), name, steps)
    pair = _train(config, prepared, joint, name), _train(own, own_data, alone, name)
    return Comparison(
        adapter=name,
        steps=steps,
        others=len({ref.adapter for slot in joint.slots for ref in slot.samples}) - 1,
        differences=compare(*pair),
        bound=BOUNDS[config.base.dtype],
    )


def first_steps(plan: Plan, name: str, steps: int) -> Plan:
    """Returns the plan cut after the slot in which an adapter takes its last of `steps`, on its first layout."""
    last = next(slot for slot, adapter, batch in plan.batches_ending() if (adapter, batch) == (name, steps - 1))
    first = plan.layouts[0]
    end = min(last + 1, first.end)
    return replace(
        plan,
        slots=plan.slots[:end],
        num_stages=first.num_stages,
        data_parallel=first.data_parallel,
        earlier=(),
        stopped=tuple((job.name, end) for job in plan.jobs),  # incomplete batches take no step
    )


def compare(joint: Arrays, alone: Arrays) -> tuple[Difference, ...]:
    """Returns the difference of every tensor, largest first.

    >>> one = {"q_proj": (np.ones((2, 1)), np.zeros((1, 2)))}
    >>> compare(one, one)[0].value
    0.0
    """
    found = [
        Difference(tensor=f"{path}.lora_{part}", value=_relative(x, y))
        for path, pair in joint.items()
        for part, x, y in zip("AB", pair, alone[path], strict=True)
    ]
    return tuple(sorted(found, key=lambda one: (-one.value if one.value == one.value else -np.inf, one.tensor)))


def _relative(x: np.ndarray, y: np.ndarray) -> float:
    difference, size = float(np.linalg.norm(x - y)), float(np.linalg.norm(y))
    return difference / size if size else (np.inf if difference else difference)


def _on_layout_of(config: JobConfig, plan: Plan) -> JobConfig:
    """Returns the job with the mesh on which its run began."""
    first = plan.layouts[0]
    if not plan.earlier:
        return config
    mesh = {"stages": first.num_stages, "data": first.data_parallel, "fsdp": 1, "layers": None}
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=mesh)})


def _train(config: JobConfig, prepared: Prepared, plan: Plan, name: str) -> Arrays:
    check_mesh(config)
    session = Session.open(config, prepared)
    try:
        session.start(read_warm_starts(config))
        session.finish_loading()
        progress = Progress(
            adapters={job.name: AdapterProgress(name=job.name, num_steps=job.num_batches) for job in plan.jobs}
        )
        hooks = Hooks(save=lambda wait: None, evaluate=lambda *_: None, finish=lambda *_: None)
        job = Job(config=config, prepared=prepared, plan=plan)
        Loop(job, session.executor, progress, lambda event: None, hooks).run()
        leaves = session.read(name)()
        spec = next(spec for spec in adapter_specs(config) if spec.name == name)
        return take_adapter(_with_adapters(leaves), spec, 0)
    finally:
        session.close()


def _with_adapters(leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {leaf: array[:, None] for leaf, array in leaves.items()}
