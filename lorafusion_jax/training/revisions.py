"""Other plans for a run that goes on: what users ask for in its folder, and the slots of failed adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.requests import FOLDER, Request, request_files
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.pipeline.processes import any_process, is_first
from lorafusion_jax.report.events import Listener, PhaseBegun, PlanRevised, RequestRefused
from lorafusion_jax.training.changes import Change, Revision, recorded_changes, revise, unsupported_reason
from lorafusion_jax.training.state import Progress
from scheduling import Plan


class Revisions:
    """Decides at drained slots what is planned again; the first process writes it into the folder.

    Attributes:
        plan: the one that holds now.

    Args:
        recorded: changes of the run so far.
    """

    def __init__(
        self,
        config: JobConfig,
        plan: Plan,
        folder: RunFolder,
        progress: Progress,
        recorded: Sequence[Change],
        listener: Listener,
    ):
        self.plan = plan
        self._config, self._folder, self._progress, self._tell = config, folder, progress, listener
        self._recorded = list(recorded)

    def asked(self) -> bool:
        """Whether a request waits; one look at a folder."""
        return is_first() and bool(request_files(self._folder.path))

    def revise(self) -> Revision | None:
        """The plan from the drained slot `progress.slot` on; None: it stays. All processes ask together."""
        before, slot = self.plan, self._progress.slot
        revision = self._decide(slot) if is_first() else None
        if not any_process(revision is not None):
            return None
        if revision is None:  # another process has decided
            plan = self._folder.read_plan()
            made = [change for change in recorded_changes(self._folder) if change not in self._recorded]
            revision = Revision(plan=plan, changes=tuple(made))
        self.plan = revision.plan
        self._recorded += revision.changes
        self._tell(
            PlanRevised(
                slot=slot,
                slots=self.plan.num_slots,
                slots_left=self.plan.num_slots - slot,
                slots_left_before=before.num_slots - slot,
                plan=self.plan.digest,
            )
        )
        return revision

    def _decide(self, slot: int) -> Revision | None:
        changes = {change.adapter: change for change in self._freed(slot)}
        for request in self._requests():
            if request.adapter not in changes:  # else it comes with the next revision
                changes[request.adapter] = Change(
                    slot=slot,
                    adapter=request.adapter,
                    action=request.action,
                    request=request.name,
                    weight=request.weight,
                )
        if not changes:
            return None
        self._tell(PhaseBegun(text="planning"))
        revision = revise(self.plan, self._config, slot, list(changes.values()))
        self._folder.write_move(revision.plan, slot, [change.row() for change in revision.changes])
        self._remove(change.request for change in revision.changes)
        return revision

    def _freed(self, slot: int) -> list[Change]:
        """Failed adapters whose slots the others may have."""
        if self._config.train.on_failed == "keep":
            return []
        stopped = dict(self.plan.stopped)
        return [
            Change(slot=slot, adapter=name, action="free", reason=adapter.reason)
            for name, adapter in self._progress.adapters.items()
            if adapter.status == "failed" and name not in stopped
        ]

    def _requests(self) -> Iterator[Request]:
        """Those that can be carried out, oldest first; what comes of the others is told."""
        known = {change.request for change in self._recorded}
        for file in request_files(self._folder.path):
            if file.name in known:  # a kill left the file of one that was carried out
                self._remove([file.name])
            elif (request := self._checked(file)) is not None:
                yield request

    def _checked(self, file: Path) -> Request | None:
        try:
            request = Request.read(file)
            why = unsupported_reason(request, self._progress.adapters)
        except (OSError, ValueError, RecursionError) as problem:
            request, why = None, f"{file.name} is no request: {problem}"
        if why is None:
            return request
        asked = "" if request is None else f"{request.action} {request.adapter}: "
        self._tell(RequestRefused(slot=self._progress.slot, text=asked + why))
        self._remove([file.name])
        return None

    def _remove(self, names: Iterable[str]) -> None:
        for name in filter(None, names):
            (self._folder.path / FOLDER / name).unlink(missing_ok=True)
