"""Times the passes of a job's stages on this machine, for predictions that hold on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import plan_training, prepare
from lorafusion_jax.pipeline.executor import Executor
from lorafusion_jax.pipeline.profile import profile_stages
from lorafusion_jax.report.events import Event, Listener
from lorafusion_jax.training.base import load_stages
from lorafusion_jax.training.batches import Batches
from lorafusion_jax.training.run import adapter_specs
from scheduling import CostModel, Plan


def profile(config: JobConfig, *, repeats: int = 3, listeners: Sequence[Listener] = ()) -> tuple[CostModel, Plan]:
    """Loads the base model, runs a few of the plan's microbatches on every stage and fits a cost model to the times.

    Args:
        config: from `load_config`; its mesh decides the stages.
        repeats: measurements of each pass.

    Raises:
        LoraFusionError: as `train`.
    """

    def phase(text: str) -> None:
        for listener in listeners:
            listener(Event(kind="phase", values={"text": text}))

    prepared = prepare(config, progress=phase)
    phase("planning")
    plan, specs = plan_training(config, prepared), adapter_specs(config)
    phase(f"loading {Path(config.base.model).name}")
    stages = load_stages(config, prepared, specs)
    lora = stages[0].first_lora()
    for stage in stages:
        stage.start(lora)
    executor = Executor(stages, [spec.name for spec in specs])
    batches = Batches(config, prepared, plan, executor.local_replicas)
    phase("compiling")
    executor.warm_up(batches.empty())
    phase("measuring")
    device = jax.devices()[0].device_kind
    source = f"measured: {Path(config.base.model).name}, {len(stages)} stages, {device}, jax {jax.__version__}"
    costs = profile_stages(stages, batches.loads(5), repeats=repeats, source=source)
    return replace(costs, capacity_tokens=plan.capacity_tokens), plan
