"""Changes of a run's plan while it goes on: an adapter is cancelled, finished early, paused, continued or weighed anew.

A change holds from a slot on, at which the pipeline is empty. run.json notes it with the plan that follows from it, so
a run that goes on from an earlier checkpoint comes to the same changes at the same slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.requests import Request
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.planning.training_plan import search_effort
from lorafusion_jax.report.events import AdapterChanged, AdapterEvent, AdapterFailed
from lorafusion_jax.training.state import AdapterProgress
from scheduling import Plan, replan


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What becomes of an adapter from a slot on.

    Attributes:
        action: "free" gives the slots of a failed adapter to the others.
        request: name of the file that asked for it; empty: nobody did.
        weight: the new one, of `weight`.
        steps: with which the adapter ends, of `finish`.
        reason: why it failed, of `free`.
    """

    slot: int
    adapter: str
    action: Literal["cancel", "pause", "continue", "finish", "weight", "free"]
    request: str = ""
    weight: float | None = None
    steps: int | None = None
    reason: str = ""

    def row(self) -> dict[str, Any]:
        """As run.json has it."""
        return {key: value for key, value in asdict(self).items() if value not in ("", None)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A plan that takes the place of another at a drained slot."""

    plan: Plan
    changes: tuple[Change, ...]


def recorded_changes(folder: RunFolder) -> list[Change]:
    """All changes of a run that came into force, in order."""
    return [Change(**row) for move in folder.moves() for row in move.get("changes", ())]


def stopped_otherwise(plan: Plan, changes: Sequence[Change]) -> list[tuple[str, int]]:
    """Adapters that a plan leaves out from some slot on, and no change does: dropped when the run was resumed."""
    changed = {change.adapter for change in changes}
    return [(name, slot) for name, slot in plan.stopped if name not in changed]


def unsupported_reason(request: Request, adapters: Mapping[str, AdapterProgress]) -> str | None:
    """Why a request cannot be carried out."""
    if request.adapter not in adapters:
        return f"the run has no adapter '{request.adapter}', only {', '.join(adapters)}"
    status = adapters[request.adapter].status
    if request.action == "continue":
        return None if status == "paused" else f"{request.adapter} is not paused but {status}"
    if status in ("done", "failed", "cancelled"):
        return f"{request.adapter} is {status}: nothing of it is left to train"
    if request.action in ("pause", "finish") and status == "paused":
        return f"{request.adapter} is paused: continue or cancel it"
    return None


def revise(plan: Plan, config: JobConfig, slot: int, changes: Sequence[Change]) -> Revision:
    """Plans what is left again with some changes, at most one for an adapter.

    Raises:
        PlanError: see `scheduling.replan`.
    """

    def names(*actions: str) -> list[str]:
        return [change.adapter for change in changes if change.action in actions]

    again = replan(
        plan,
        at_slot=slot,
        cancel=names("cancel", "free"),
        finish=names("finish"),
        pause=names("pause"),
        resume=names("continue"),
        weights={change.adapter: change.weight for change in changes if change.weight is not None},
        seed=plan.seed,
        **search_effort(config),
    )
    return Revision(plan=again, changes=tuple(_with_steps(change, again) for change in changes))


def apply(change: Change, adapter: AdapterProgress) -> AdapterEvent | None:
    """Carries a change out on an adapter's progress; returns the news, None where it holds already."""
    before = adapter.status, adapter.num_steps
    if adapter.status == "running" and change.action == "free":
        adapter.status, adapter.reason = "failed", change.reason
        return AdapterFailed(
            slot=change.slot, adapter=adapter.name, step=adapter.step, reason=change.reason, kept_step=adapter.step
        )
    if adapter.status in ("running", "paused"):  # the others are at their end
        _carry_out(change, adapter)
    if (adapter.status, adapter.num_steps) == before and change.action != "weight":
        return None
    return AdapterChanged(
        slot=change.slot,
        adapter=adapter.name,
        step=adapter.step,
        action=change.action,
        status=adapter.status,
        num_steps=adapter.num_steps,
        weight=change.weight,
    )


def _carry_out(change: Change, adapter: AdapterProgress) -> None:
    match change.action:
        case "cancel":
            adapter.status, adapter.reason = "cancelled", f"cancelled by request at slot {change.slot}"
        case "pause":
            adapter.status = "paused"
        case "continue":
            adapter.status = "running"
        case "finish" if not change.steps:
            adapter.status, adapter.reason = "cancelled", f"finished by request at slot {change.slot}, before it began"
        case "finish":
            assert change.steps is not None
            adapter.num_steps = change.steps
            adapter.status = "done" if adapter.step == change.steps else "running"


def _with_steps(change: Change, plan: Plan) -> Change:
    if change.action != "finish":
        return change
    steps = 0 if change.adapter in dict(plan.stopped) else plan.job_of[change.adapter].num_batches
    return Change(slot=change.slot, adapter=change.adapter, action="finish", request=change.request, steps=steps)
