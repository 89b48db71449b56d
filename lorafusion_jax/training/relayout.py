"""What a begun run may change when it goes on: the devices it runs on, never what it computes."""

from __future__ import annotations

from collections.abc import Sequence

from lorafusion_jax.checkpoint.new_run import SHOWN, differences
from lorafusion_jax.config.explain import new_name
from lorafusion_jax.config.load import override_resolved
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.errors import ConfigError, raise_all
from lorafusion_jax.planning.training_plan import search_effort
from scheduling import Plan, replan

MAY_CHANGE = ("mesh.stages", "mesh.data", "mesh.fsdp", "mesh.layers", "train.remat", "train.block_layers", "save")

PLACES = ("directory", "base.model", "base.revision", "report.", "train.log_every_s")


def apply_resume_overrides(config: JobConfig, overrides: Sequence[str]) -> JobConfig:
    """Applies `key=value` settings to the configuration of a begun run.

    Raises:
        ConfigError, ErrorList: `resume.fixed`, or a setting that does not exist.
    """
    if not overrides:
        return config
    keys = [text.partition("=")[0] for text in overrides]
    raise_all([_fixed(key) for key in keys if not _may_change(key)])
    changed = override_resolved(config, overrides)
    if changed.mesh.stages != config.mesh.stages and "mesh.layers" not in keys:
        changed = changed.model_copy(update={"mesh": changed.mesh.model_copy(update={"layers": None})})
    return changed


def check_settings(before: JobConfig | None, now: JobConfig) -> None:
    """Makes sure that nobody edited the settings of a begun run; None: an earlier version did not note them.

    Raises:
        ConfigError: `run.config-changed`.
    """
    edited = [] if before is None else [one for one in differences(before, now) if not _may_differ(one.key)]
    if edited:
        more = f"; and {len(edited) - SHOWN} more" if len(edited) > SHOWN else ""
        raise ConfigError(
            "run.config-changed",
            "config.yaml is not the one that this run began with.",
            where="; ".join(map(str, edited[:SHOWN])) + more,
            why="the run goes on with the settings that it began with",
            fix="put the old values back, or start a new run with lorafusion train",
        )


def plan_for_mesh(plan: Plan, config: JobConfig, slot: int) -> Plan:
    """The plan with which a run goes on from a slot, on the mesh of its configuration.

    It is the same plan if every slot that is left has a microbatch for each replica and keeps the distance of that many
    stages. Otherwise the slots before stay, so that every checkpoint up to `slot` is one of the new plan, too, and what
    is left is planned again.
    """
    there = (config.mesh.stages, config.mesh.replicas)
    if all(layout[1:] == there for layout in plan.layouts if layout.end > slot):
        return plan
    stages, replicas = there
    return replan(
        plan, at_slot=slot, num_stages=stages, data_parallel=replicas, seed=plan.seed, **search_effort(config)
    )


def _may_differ(key: str) -> bool:
    """Settings that say where things lie have digests of what lies there."""
    return (
        _may_change(key)
        or key.startswith(PLACES)
        or (key.startswith("adapters.") and key.endswith((".data.train", ".data.eval", ".lora.init_from")))
    )


def _may_change(key: str) -> bool:
    return new_name(key) in MAY_CHANGE or key.partition(".")[0] in MAY_CHANGE  # an old name has an error of its own


def _fixed(key: str) -> ConfigError:
    return ConfigError(
        "resume.fixed",
        f"{key} cannot change while a run is under way.",
        why="the run goes on with the data and adapters that it began with",
        fix=f"lorafusion train starts a new run; resume takes {', '.join(MAY_CHANGE[:-1])} and save.*",
    )
