"""Settings that may change when a run is resumed: its devices and its adapters, never what an adapter computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lorafusion_jax.checkpoint.new_run import SHOWN, differences, flat_settings
from lorafusion_jax.config.explain import new_name
from lorafusion_jax.config.load import override_resolved
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.errors import ConfigError, first_few, raise_all
from lorafusion_jax.planning.turns import turns
from scheduling import Plan, replan

MAY_CHANGE = (
    "mesh.stages",
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "mesh.layers",
    "train.remat",
    "train.block_layers",
    "train.parts",
    "train.on_failed",
    "base.cache_quantized",
    "train.log_every_s",
    "save",
    "handover",
    "report",
)

PLACES = ("directory", "base.model", "base.revision", "report.", "train.log_every_s")


LENGTHS = ("max_steps", "epochs")  # keys of those who want to train for longer


def apply_resume_overrides(config: JobConfig, overrides: Sequence[str]) -> JobConfig:
    """Applies `key=value` settings to the configuration of an existing run.

    Raises:
        ConfigError, ErrorList: `resume.fixed`, or a setting that does not exist.
    """
    if not overrides:
        return config
    values = {key: value for key, _, value in (text.partition("=") for text in overrides)}
    keys = list(values)
    raise_all([_not_changeable(key, values[key], config) for key in keys if not _may_change(key)])
    changed = override_resolved(config, overrides)
    if changed.mesh.stages != config.mesh.stages and "mesh.layers" not in keys:
        changed = changed.model_copy(update={"mesh": changed.mesh.model_copy(update={"layers": None})})
    return changed


def check_settings(before: JobConfig, now: JobConfig) -> None:
    """Checks that the settings of an existing run were not edited.

    Raises:
        ConfigError: `run.config-changed`.
    """
    edited = [change for change in differences(before, now) if not _may_differ(change.key)]
    if edited:
        raise ConfigError(
            "run.config-changed",
            "config.yaml was edited after this run started.",
            where=first_few(edited, SHOWN, "; "),
            why="a run keeps the settings that it started with",
            fix="restore the old values, or start a new run with lorafusion train",
        )


def check_drop(names: Sequence[str], adapters: Mapping[str, str]) -> None:
    """Checks that adapters can be dropped from the rest of a run.

    Args:
        adapters: name → status.

    Raises:
        ConfigError, ErrorList: `resume.unknown-adapter`, `resume.done` (it has nothing left to train),
            `resume.paused`, `resume.to-join` (it joins later).
    """
    errors = []
    for name in names:
        if name not in adapters:
            fix = f"--drop takes one of: {', '.join(adapters)}"
            errors.append(ConfigError("resume.unknown-adapter", f"the run has no adapter '{name}'.", fix=fix))
        elif adapters[name] in ("done", "cancelled"):
            message = f"{name} is {adapters[name]}: it has nothing left to drop."
            errors.append(ConfigError("resume.done", message, fix="leave out --drop " + name))
        elif adapters[name] == "to join":
            message = f"{name} joins the run later than the checkpoint from which it continues."
            errors.append(
                ConfigError("resume.to-join", message, fix=f"lorafusion cancel RUN {name}   or leave out --drop")
            )
        elif adapters[name] == "paused":
            message = f"{name} is paused, so the plan already leaves out its samples."
            errors.append(
                ConfigError("resume.paused", message, fix=f"lorafusion cancel RUN {name}   or leave out --drop")
            )
    raise_all(errors)


def plan_for_mesh(
    plan: Plan,
    config: JobConfig,
    prepared: Prepared,
    slot: int,
    *,
    drop: Sequence[str] = (),
    failed: Sequence[str] = (),
    not_awaited: Sequence[str] = (),
) -> Plan:
    """Returns the plan with which a run continues from a slot, on the mesh of its configuration.

    The plan stays if nothing is dropped and all remaining slots were planned for this mesh. Otherwise the remaining
    slots are planned again. Earlier slots stay, so checkpoints up to `slot` fit the new plan, too.

    Args:
        drop: adapters that are dropped from this slot on.
        failed: adapters that have failed. If the plan stays, so do their samples, which keeps the results of the others
            bitwise equal. A new plan omits them.
        not_awaited: see `turns`.
    """
    mesh_layout = (config.mesh.stages, config.mesh.replicas)
    stays = all(layout[1:] == mesh_layout for layout in plan.layouts if layout.end > slot)
    stays &= (plan.num_stages, plan.data_parallel) == mesh_layout  # also where no slot is left: requests may add some
    stopped = dict(plan.stopped)
    if stays and all(name in stopped for name in drop):
        return plan
    stages, replicas = mesh_layout
    return replan(
        plan,
        at_slot=slot,
        cancel=[name for name in dict.fromkeys([*drop, *failed]) if name not in stopped],
        num_stages=stages,
        data_parallel=replicas,
        seed=plan.seed,
        time_limit_s=config.train.plan_seconds,
        **turns(config, prepared, plan.jobs, not_awaited=not_awaited),
    )


def _may_differ(key: str) -> bool:
    """Whether a setting may differ from the recorded one. Paths may: the content at each path has a digest."""
    return _may_change(key) or is_place(key)


def is_place(key: str) -> bool:
    """Whether a setting names a place, or what a screen shows: results do not depend on it."""
    of_adapter = key.startswith("adapters.") and key.endswith((".data.train", ".data.eval", ".lora.init_from"))
    return of_adapter or key.startswith(PLACES)


def _may_change(key: str) -> bool:
    return new_name(key) in MAY_CHANGE or key.partition(".")[0] in MAY_CHANGE  # an old name has its own error


def _not_changeable(key: str, value: str, config: JobConfig) -> ConfigError:
    accepted_keys = [key if "." in key else f"{key}.*" for key in MAY_CHANGE]
    accepted = f"start a new run with lorafusion train; resume accepts {', '.join(accepted_keys)}"
    longer = key.rpartition(".")[2] in LENGTHS
    of_adapters = [f"adapters.{adapter.name}.{key}" for adapter in config.adapters]
    run = flat_settings(config)
    settings = {name: run[name] for name in (key, *of_adapters) if name in run}
    return ConfigError(
        "resume.fixed",
        f"{key} cannot change when a run is resumed.",
        where=first_few([f"{name} is {was} and would be {value}" for name, was in settings.items()], SHOWN, "; "),
        why="what is planned for an adapter stays as it is, so that a resumed run has the results of an unbroken one",
        fix=f"lorafusion extend RUN ADAPTER --steps N trains an adapter for longer, --epochs N likewise; or {accepted}"
        if longer
        else accepted,
    )
