"""What a begun run may change when it goes on: the devices it runs on, never what it computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lorafusion_jax.config.load import override_resolved
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.errors import ConfigError, LoraFusionError, raise_all
from scheduling import Plan, PlanError, verify_plan

MAY_CHANGE = ("mesh.stages", "mesh.data", "mesh.fsdp", "mesh.layers", "train.keep", "train.block_layers", "save")


def go_on_with(config: JobConfig, plan: Plan, overrides: Sequence[str]) -> JobConfig:
    """Applies `key=value` settings to the configuration of a begun run.

    The plan stays. It says which replica runs which samples, so data · fsdp must stay; it keeps the batches of an
    adapter so many slots apart, which is enough for that many stages and for fewer.

    Raises:
        ConfigError, ErrorList: `resume.fixed`, `resume.replicas`, `resume.stages`, or a setting that does not exist.
    """
    if not overrides:
        return config
    keys = [text.partition("=")[0] for text in overrides]
    raise_all([_fixed(key) for key in keys if not _may_change(key)])
    changed = override_resolved(config, overrides)
    if changed.mesh.stages != config.mesh.stages and "mesh.layers" not in keys:
        changed = changed.model_copy(update={"mesh": changed.mesh.model_copy(update={"layers": None})})
    raise_all([problem for problem in (_replicas(changed, plan), _stages(changed, plan)) if problem])
    return changed


def _may_change(key: str) -> bool:
    return key in MAY_CHANGE or key.partition(".")[0] in MAY_CHANGE


def _fixed(key: str) -> ConfigError:
    return ConfigError(
        "resume.fixed",
        f"{key} cannot change while a run is under way.",
        why="the run goes on with the plan, data and adapters that it began with",
        fix=f"lorafusion train starts a new run; resume takes {', '.join(MAY_CHANGE[:-1])} and save.*",
    )


def _replicas(config: JobConfig, plan: Plan) -> LoraFusionError | None:
    mesh, replicas = config.mesh, plan.data_parallel
    if mesh.replicas == replicas:
        return None
    return ConfigError(
        "resume.replicas",
        f"the run was planned for {replicas} replicas and mesh.data · mesh.fsdp is now {mesh.data} · {mesh.fsdp}.",
        why="every slot of its plan hands a microbatch to each replica",
        fix=f"choose mesh.data · mesh.fsdp = {replicas}, or train on from the exported adapters: lora.init_from",
    )


def _stages(config: JobConfig, plan: Plan) -> LoraFusionError | None:
    stages = config.mesh.stages
    if _keeps_distance(plan, stages):
        return None
    most = next(fewer for fewer in range(stages - 1, 0, -1) if _keeps_distance(plan, fewer))
    return ConfigError(
        "resume.stages",
        f"the run's plan does not allow {stages} stages.",
        why=f"some batch begins {most} slots after the one before it: with more stages it would not see that step",
        fix=f"mesh.stages: 1 to {most}",
    )


def _keeps_distance(plan: Plan, stages: int) -> bool:
    try:
        verify_plan(dataclasses.replace(plan, num_stages=stages))
    except PlanError:
        return False
    return True
