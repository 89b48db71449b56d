"""Changes of a running plan: cancel, finish, pause, continue, reweight, add or extend an adapter.

A change takes effect at a slot at which the pipeline is empty. run.json records it with the new plan, so a run that is
resumed from an earlier checkpoint makes the same changes at the same slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.requests import Action, has_ended
from lorafusion_jax.errors import CheckpointError, ConfigError
from lorafusion_jax.planning.training_plan import train_jobs
from lorafusion_jax.planning.turns import turns
from lorafusion_jax.report.events import AdapterChanged, AdapterEvent, AdapterFailed
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.state import AdapterProgress, Progress
from scheduling import Plan, replan


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of an adapter from a slot on.

    Attributes:
        action: as in a request; "free" gives the slots of a failed adapter to the others, "stop" ends one early.
        request: name of the request's file; empty if there was none.
        weight: new weight, for `weight`.
        steps: new total of steps, for `finish`, `stop`, `extend` and `add`.
        reason: why the adapter failed, for `free`, or ends, for `stop`.
    """

    slot: int
    adapter: str
    action: Literal["cancel", "pause", "continue", "finish", "weight", "extend", "add", "free", "stop"]
    request: str = ""
    weight: float | None = None
    steps: int | None = None
    reason: str = ""

    def row(self) -> dict[str, Any]:
        """Returns the entry of run.json."""
        return {key: value for key, value in asdict(self).items() if value not in ("", None)}


def recorded_changes(folder: RunFolder) -> list[Change]:
    """Returns all changes of a run that took effect, in order.

    Raises:
        CheckpointError: `run.later-version`.
    """
    try:
        return [Change(**row) for move in folder.moves() for row in move.get("changes", ())]
    except TypeError as problem:
        raise CheckpointError(
            "run.later-version",
            "run.json has changes with other fields than this version knows.",
            where=str(folder.path),
            why=str(problem),
            fix="use the version of lorafusion-jax that wrote it",
        ) from None


def cap_slots(changes: Iterable[Change], slot: int) -> list[Change]:
    """Caps the slots of changes at the slot from which the run is planned again, as run.json does."""
    return [replace(change, slot=min(change.slot, slot)) for change in changes]


def stopped_otherwise(plan: Plan, changes: Sequence[Change]) -> list[tuple[str, int]]:
    """Returns adapters that the plan stops without a change: those dropped when the run was resumed."""
    changed: set[str] = set()
    for change in changes:
        early = change.action in ("finish", "stop") and not change.steps  # others take their batch to its end
        if change.action in ("cancel", "pause", "free") or early:
            changed.add(change.adapter)
        elif change.action == "continue":
            changed.discard(change.adapter)
    return [(name, slot) for name, slot in plan.stopped if name not in changed]


def check_request(action: Action, name: str, adapters: Mapping[str, str]) -> None:
    """Checks that an action is possible for an adapter of a run.

    Args:
        adapters: name → status.

    Raises:
        ConfigError: `control.unknown-adapter`, `control.ended`, `control.paused`, `control.not-paused`.
    """
    if name not in adapters:
        raise ConfigError(
            "control.unknown-adapter", f"the run has no adapter '{name}'.", fix=f"one of: {', '.join(adapters)}"
        )
    status = adapters[name]
    if action == "continue" and status != "paused":
        raise ConfigError(
            "control.not-paused", f"{name} is {status}, not paused.", fix="only a paused adapter can continue"
        )
    if has_ended(action, status):
        raise ConfigError("control.ended", f"{name} is {status}: it has nothing left to train.")
    if action in ("pause", "finish", "extend") and status == "paused":
        raise ConfigError("control.paused", f"{name} is paused.", fix="continue it first, or cancel it")


def revise(
    job: Job, slot: int, changes: Sequence[Change], *, not_awaited: Collection[str] = ()
) -> tuple[Plan, list[Change]]:
    """Replans the rest of a job with changes, at most one per adapter.

    Args:
        job: with the old plan, and with settings and data after the changes.
        not_awaited: see `turns`.

    Returns:
        (plan, the changes with their steps set)

    Raises:
        PlanError: see `scheduling.replan`.
    """

    def names(*actions: str) -> list[str]:
        return [change.adapter for change in changes if change.action in actions]

    plan, jobs = job.plan, {job.name: job for job in train_jobs(job.config, job.prepared)}
    replanned = replan(
        plan,
        at_slot=slot,
        add=[jobs[name] for name in names("add")],
        extend=[replace(jobs[name], weight=plan.job_of[name].weight) for name in names("extend")],
        cancel=names("cancel", "free"),
        finish=names("finish", "stop"),
        pause=names("pause"),
        resume=names("continue"),
        weights={change.adapter: change.weight for change in changes if change.weight is not None},
        seed=plan.seed,
        time_limit_s=job.config.train.plan_seconds,
        **turns(job.config, job.prepared, list(jobs.values()), not_awaited=not_awaited),
    )
    return replanned, [_with_steps(change, replanned) for change in changes]


def apply(change: Change, progress: Progress) -> AdapterEvent | None:
    """Applies a change to the progress of a run. Returns the event, or None if nothing changed."""
    if change.action == "add" and change.adapter not in progress.adapters:
        assert change.steps is not None
        adapter = AdapterProgress(name=change.adapter, num_steps=change.steps)
        progress.adapters[change.adapter] = adapter
        return _changed_event(change, adapter)
    adapter = progress.adapters[change.adapter]
    before = adapter.status, adapter.num_steps
    if adapter.status == "running" and change.action == "free":
        adapter.fail(change.reason)
        return AdapterFailed(
            slot=change.slot, adapter=adapter.name, step=adapter.step, reason=change.reason, kept_step=adapter.step
        )
    continues = change.action == "extend" and adapter.status == "done" and adapter.step < (change.steps or 0)
    if adapter.status in ("running", "paused") or continues:  # other adapters have ended
        _update_adapter(change, adapter)
    if (adapter.status, adapter.num_steps) == before and change.action != "weight":
        return None
    return _changed_event(change, adapter)


def _changed_event(change: Change, adapter: AdapterProgress) -> AdapterChanged:
    return AdapterChanged(
        slot=change.slot,
        adapter=adapter.name,
        step=adapter.step,
        action=change.action,
        status=adapter.status,
        num_steps=adapter.num_steps,
        weight=change.weight,
        request=change.request,
        reason=change.reason,
    )


def _update_adapter(change: Change, adapter: AdapterProgress) -> None:
    match change.action:
        case "cancel":
            adapter.cancel(f"cancelled by request at slot {change.slot}")
        case "pause":
            adapter.pause()
        case "continue":
            adapter.resume()
        case "finish" if not change.steps:
            adapter.cancel(f"finished by request at slot {change.slot}, before it began")
        case "finish" | "stop":
            adapter.end_at(change.steps or 0, change.reason)
        case "extend":
            adapter.extend(change.steps or 0)


def _with_steps(change: Change, plan: Plan) -> Change:
    if change.action not in ("finish", "stop", "extend", "add"):
        return change
    ended = change.action == "finish" and change.adapter in dict(plan.stopped)
    return replace(change, steps=0 if ended else plan.job_of[change.adapter].num_batches)
