"""Times the passes of a job's stages on this machine, as a basis for predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.auto import refuse_auto
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.config.stack import without_places
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.prediction import better_layout, measured_with
from lorafusion_jax.planning.rebalance import Moved
from lorafusion_jax.planning.training_plan import plan_training
from lorafusion_jax.report.events import Listener, PhaseBegun
from lorafusion_jax.session.assembler import Batches, Load
from lorafusion_jax.session.base import check_mesh, device_bytes, load_stages
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.profile import profile_stages
from scheduling import CostModel, Plan, StageCost


class Profile(NamedTuple):
    """Measurements of a job on this machine.

    Args:
        better: a faster assignment of layers to stages by these times; None if there is none.
    """

    costs: CostModel
    plan: Plan
    better: Moved | None


def profile(config: JobConfig, *, repeats: int = 3, listeners: Sequence[Listener] = ()) -> Profile:
    """Loads the base model, runs a few of the plan's microbatches on every stage and fits a cost model to the times.

    Args:
        config: from `load_config`; its mesh determines the stages.
        repeats: measurements of each pass.

    Raises:
        LoraFusionError: as in `train`.
    """

    def phase(text: str) -> None:
        for listener in listeners:
            listener(PhaseBegun(text=text))

    check_mesh(config)
    config = without_places(config)
    refuse_auto(config.auto, "profile")
    prepared = prepare(config, progress=phase)
    phase("planning")
    plan, specs = plan_training(config, prepared), adapter_specs(config)
    phase(f"loading {Path(config.base.model).name}")
    stages = load_stages(config, prepared, specs)
    lora = stages[0].first_lora()
    for stage in stages:
        stage.start(lora)
    executor = Executor(stages)
    batches = Batches.of_job(config, prepared, plan, executor.local_replicas)
    phase("compiling")
    executor.warm_up(batches.empty())
    phase("measuring")
    device = jax.devices()[0].device_kind
    of = "1 stage" if len(stages) == 1 else f"{len(stages)} stages"
    source = f"measured: {Path(config.base.model).name}, {of}, {device}, jax {jax.__version__}"
    loads = batches.loads(5)
    costs = profile_stages(stages, loads, repeats=repeats, source=source)
    model, remat = ModelConfig.from_hf(base_directory(config)), stages[0].remat
    better = better_layout(
        config,
        model,
        [stage.extent for stage in stages],
        [sum(_seconds(stage, load) for load in loads) for stage in costs.stages],
        remat=remat,
        device_bytes=device_bytes(),
    )
    costs = replace(
        costs,
        capacity_tokens=plan.sizes if plan.smaller else plan.capacity_tokens,
        layers=tuple(stage.extent.count for stage in stages),
        measured_with=measured_with(
            dtype=config.base.dtype,
            quantize=config.base.quantize,
            parameters=model.num_parameters,
            fsdp=config.mesh.fsdp,
            tensor=config.mesh.tensor,
            remat=remat,
        ),
    )
    return Profile(costs, plan, better)


def _seconds(stage: StageCost, load: Load) -> float:
    passes = (stage.forward, stage.backward)
    return sum(each_pass.seconds(load.tokens, load.squares) for each_pass in passes)
