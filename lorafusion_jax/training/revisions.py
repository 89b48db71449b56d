"""Revises the plan of a running run: for requests in its folder, and to free the slots of failed adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.requests import FOLDER, Request, request_files
from lorafusion_jax.errors import ErrorList, LoraFusionError
from lorafusion_jax.pipeline.processes import any_process, is_first
from lorafusion_jax.report.events import Listener, PhaseBegun, PlanRevised, RequestRefused
from lorafusion_jax.training.additions import LacksMemory, new_record_entries, reread, with_request
from lorafusion_jax.training.changes import Change, cap_slots, check_request, recorded_changes, revise
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.state import Progress
from scheduling import Plan, PlanError


class Revisions:
    """Decides at drained slots whether to plan again. The first process writes the new plan into the folder.

    Args:
        job: the current job; every new plan is stored in it.
        recorded: changes of the run so far.
        lacks_memory: `Session.lacks_memory`.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        progress: Progress,
        recorded: Sequence[Change],
        lacks_memory: LacksMemory,
        listener: Listener,
    ):
        self._job, self._folder, self._progress, self._emit = job, folder, progress, listener
        self._lacks_memory = lacks_memory
        self._recorded = list(recorded)
        self._postponed: set[str] = set()  # requests about adapters that join at a later slot

    def has_requests(self) -> bool:
        """Whether a request is pending. Lists one folder."""
        return is_first() and any(file.name not in self._postponed for file in request_files(self._folder.path))

    def revise(self) -> Sequence[Change] | None:
        """Replaces the plan from the drained slot `progress.slot` on. Returns the changes, or None if the plan stays.

        Collective over processes.
        """
        before, slot = self._job.plan, self._progress.slot
        changes = self._decide_changes(slot) if is_first() else None
        if not any_process(changes is not None):
            return None
        self._recorded = cap_slots(self._recorded, slot)
        if changes is None:  # another process has decided
            changes = self._read_decision()
        self._recorded += changes
        plan = self._job.plan
        self._emit(
            PlanRevised(
                slot=slot,
                slots=plan.num_slots,
                slots_left=plan.num_slots - slot,
                slots_left_before=before.num_slots - slot,
                plan=plan.digest,
            )
        )
        return changes

    def _decide_changes(self, slot: int) -> list[Change] | None:
        changes = {change.adapter: change for change in self._free_slots(slot)}
        after = self._job
        self._postponed = set()
        for request in self._requests():
            if not changes.keys().isdisjoint(request.adapters):  # left to the next revision
                continue
            if (following := self._apply_request(after, request)) is None:
                continue
            after = following
            changes |= {
                name: Change(
                    slot=slot, adapter=name, action=request.action, request=request.name, weight=request.weight
                )
                for name in request.adapters
            }
        if not changes:
            return None
        self._emit(PhaseBegun(text="planning"))
        plan, made = revise(after, slot, list(changes.values()))
        self._write_plan(after, plan, slot, made)
        return made

    def _write_plan(self, after: Job, plan: Plan, slot: int, changes: Sequence[Change]) -> None:
        record, config = self._folder.read_record(), None
        if after.config != self._job.config:
            record, config = record | new_record_entries(after, record), after.config
        self._folder.write_move(plan, slot, [change.row() for change in changes], record=record, config=config)
        self._job.config, self._job.prepared, self._job.plan = after.config, after.prepared, plan
        self._remove_requests(change.request for change in changes)

    def _read_decision(self) -> list[Change]:
        """Reads what the first process has written."""
        job = self._job
        job.plan = self._folder.read_plan()
        job.config = self._folder.read_config()
        job.prepared = reread(job.config, job.prepared)
        return [change for change in recorded_changes(self._folder) if change not in self._recorded]

    def _free_slots(self, slot: int) -> list[Change]:
        """Returns changes that give the slots of failed adapters to the others."""
        if self._job.config.train.on_failed == "keep":
            return []
        stopped = dict(self._job.plan.stopped)
        return [
            Change(slot=slot, adapter=name, action="free", reason=adapter.reason)
            for name, adapter in self._progress.adapters.items()
            if adapter.status == "failed" and name not in stopped
        ]

    def _requests(self) -> Iterator[Request]:
        """Yields pending requests, oldest first. Reports and removes invalid files."""
        known = {change.request for change in self._recorded}
        for file in request_files(self._folder.path):
            if file.name in known:  # executed before the process was killed
                self._remove_requests([file.name])
                continue
            try:
                yield Request.read(file)
            except (OSError, ValueError, TypeError, RecursionError) as problem:
                self._refuse(file.name, f"{file.name} is not a request: {problem}")

    def _apply_request(self, job: Job, request: Request) -> Job | None:
        """Returns the job after a request; None if the request is postponed or rejected."""
        try:
            if request.action != "add":
                status = {own.name: own.status for own in self._progress.adapters.values()}
                (name,) = request.adapters
                if name not in status and name in self._job.plan.job_of:
                    self._postponed.add(request.name)
                    return None
                check_request(request.action, name, status)
            return with_request(job, request, self._lacks_memory)
        except (LoraFusionError, PlanError) as problem:
            self._refuse(request.name, f"{request.what}: {_one_line(problem)}")
            return None

    def _refuse(self, request: str, why: str) -> None:
        self._emit(RequestRefused(slot=self._progress.slot, text=why))
        self._remove_requests([request])

    def _remove_requests(self, names: Iterable[str]) -> None:
        for name in filter(None, names):
            (self._folder.path / FOLDER / name).unlink(missing_ok=True)


def _one_line(problem: LoraFusionError | PlanError) -> str:
    """Describes an error in one line."""
    errors = problem.errors if isinstance(problem, ErrorList) else (problem,)
    more = [*errors[0].problems[:1]] if isinstance(errors[0], PlanError) else []
    text = " ".join(filter(None, (errors[0].what, errors[0].why, *more)))
    return text if len(errors) == 1 else f"{text} (and {len(errors) - 1} more mistakes)"
