"""`plan`: what `lorafusion plan` computes, as an object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lorafusion_jax.adapters.table import KINDS
from lorafusion_jax.api.arguments import names_unknown
from lorafusion_jax.api.jobs import Job, job_of
from lorafusion_jax.api.plan_screen import show_plan
from lorafusion_jax.api.shown import Shown, TimelineView
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.model_fit import longest_texts
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.errors import CheckpointError, raise_all
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.files import make_folders, write_output
from lorafusion_jax.objective.table import OBJECTIVES
from lorafusion_jax.optim.schedules import SCHEDULES
from lorafusion_jax.optim.table import OPTIMIZERS
from lorafusion_jax.planning.auto import resolve_auto
from lorafusion_jax.planning.checks import base_problems, checked_data, layer_problems
from lorafusion_jax.planning.network import network_of
from lorafusion_jax.planning.planned import Planned, make_planned
from lorafusion_jax.planning.prediction import this_device
from lorafusion_jax.readable import PLAN, read_text
from lorafusion_jax.report.console import warn
from scheduling import Plan, plan_statistics, simulate


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class JobPlan(Shown):
    """A plan with its predictions. It prints as `lorafusion plan` does.

    Args:
        planned: the plan, its costs and its predictions.
    """

    planned: Planned

    @property
    def plan(self) -> Plan:
        """The plan itself: what runs in which slot."""
        return self.planned.plan

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers of `lorafusion plan --json`."""
        return self.planned.to_json()

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about the data and the prediction."""
        return self.planned.notes

    def save(self, path: str | Path) -> Path:
        """Writes the plan for `train(job, plan=…)` and `lorafusion train --plan`."""
        path = Path(path)
        make_folders(path.parent)
        write_output(path, self.plan.to_json())
        return path

    def timeline(self) -> TimelineView:
        """The predicted timeline of every stage.

        Raises:
            CheckpointError: `plan.no-costs`, the base model is of an unknown kind, so no times are predicted.
        """
        costs = self.planned.costs
        if costs is None:
            raise CheckpointError("plan.no-costs", "this plan has no predicted times.", why=" ".join(self.notes[:1]))
        return TimelineView(timeline=simulate(self.plan, costs), note=plan_statistics(self.plan, costs).hint)

    def _show(self, console: Console) -> None:
        show_plan(console, self.planned)
        warn(console, self.notes)


@names_unknown
def plan(
    job: Job | str | Path | Mapping[str, Any],
    *,
    compare: bool = False,
    device: str | None = None,
    device_memory: float | None = None,
    cost_model: str | Path | None = None,
    processes: int = 1,
) -> JobPlan:
    """Plans a job: reads its data, decides what runs when, predicts times and memory. Touches no device.

    Args:
        job: from `load_job`, or an argument of `load_job`.
        compare: also plan the adapters one after another.
        device: device for predictions, one of those of `lorafusion plan --device` (None: that of this machine).
        device_memory: GiB per device (None: that of the device).
        cost_model: measured costs, from `lorafusion profile`.
        processes: of the run, one on each host.

    Raises:
        LoraFusionError: the errors of `lorafusion plan`, in settings, data or base model.
    """
    config = job_of(job).config
    raise_all([*layer_problems(config)[1], *base_problems(config)])
    config, prepared = checked_data(config, [])
    check_start(config, prepared)
    network = network_of(device or this_device(), processes)
    config, _ = resolve_auto(config, prepared, device=device or this_device(), network=network)
    return JobPlan(
        planned=make_planned(
            config,
            prepared,
            device=device,
            device_memory=device_memory,
            cost_model=None if cost_model is None else Path(cost_model),
            compare=compare,
            network=network,
        )
    )


def check_start(config: JobConfig, prepared: Prepared) -> None:
    """Raises what a run would refuse at its start, beyond settings and data: texts longer than the base's positions,
    and kinds, objectives, optimizers and schedules of other packages that do not work. Only these need jax.

    Raises:
        LoraFusionError: `model.positions`, `kind.broken`, `kind.no-peft`, `objective.broken`, `plugin.broken`.
    """
    try:
        model = ModelConfig.from_hf(base_directory(config))
    except CheckpointError:  # of no known kind: nothing is predicted, and a run says why
        return
    lengths = [longest_texts(prepared.adapters[adapter.name].train).max() for adapter in config.adapters]
    model.check_length(int(max(lengths)), where=str(base_directory(config)))
    builtin = all(
        adapter.lora.adapter_kind in KINDS
        and adapter.objective.chosen.name in OBJECTIVES
        and adapter.optim.name in OPTIMIZERS
        and adapter.optim.schedule in SCHEDULES
        for adapter in config.adapters
    )
    if not builtin:
        from lorafusion_jax.optim.step import check_optimizers
        from lorafusion_jax.session.base import check_adapters

        check_adapters(config, prepared)
        check_optimizers([adapter.optim for adapter in config.adapters])


def read_plan(path: Path) -> Plan:
    """Reads a plan file.

    Raises:
        CheckpointError: missing or damaged.
    """
    try:
        return Plan.from_json(read_text(path, PLAN))
    except FileNotFoundError:
        raise CheckpointError(
            "plan.missing", f"there is no plan {path}.", fix="lorafusion plan jobs.yaml -o plan.json"
        ) from None
    except (OSError, ValueError) as problem:
        raise CheckpointError("plan.damaged", f"{path} is not a plan.", why=str(problem)) from None
