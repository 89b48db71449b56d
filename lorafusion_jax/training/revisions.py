"""Revises the plan of a running run: for requests in its folder, and to free the slots of adapters that end.

All new data is read and checked before the run changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.requests import FOLDER, Request, put_away, request_files
from lorafusion_jax.checkpoint.warm_start import read_warm_starts, warm_start_digests
from lorafusion_jax.checkpoint.warm_start_base import check_start_bases
from lorafusion_jax.config.join import add_adapters, check_names, select_adapters
from lorafusion_jax.config.schema import AdapterConfig, Extension, JobConfig
from lorafusion_jax.data.prepare import Prepared, in_order, prepare
from lorafusion_jax.data.references import SetReferences
from lorafusion_jax.errors import ErrorList, LoraFusionError, RunError, raise_all, shortened_text
from lorafusion_jax.planning.training_plan import train_jobs
from lorafusion_jax.report.events import Listener, PhaseBegun, PlanRevised, RequestRefused
from lorafusion_jax.report.record import compared_by, eval_digests, scored_by
from lorafusion_jax.session.base import check_adapters, check_on_mesh
from lorafusion_jax.session.processes import any_process, is_first
from lorafusion_jax.training.agreement import disagreement_on
from lorafusion_jax.training.changes import Change, cap_slots, check_request, recorded_changes, revise
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.references import JoiningReferences, store_references
from lorafusion_jax.training.state import Progress
from scheduling import Plan, PlanError
from scheduling.checks import check_jobs

LacksMemory = Callable[[JobConfig], str | None]  # `Session.lacks_memory`
# A request is refused for any of these, and the run goes on: one that needs more memory than there is, too.
REFUSABLE = (LoraFusionError, PlanError, OSError, ArithmeticError, ValueError, MemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A new plan that is not in force yet.

    Attributes:
        after: the job after the changes, with its old plan.
        references: of new adapters.
    """

    after: Job
    plan: Plan
    changes: Sequence[Change]
    references: Mapping[str, SetReferences]

    def new_adapters(self, before: Job) -> list[AdapterConfig]:
        names = {adapter.name for adapter in before.config.adapters}
        return [adapter for adapter in self.after.config.adapters if adapter.name not in names]

    def additions(self) -> dict[str, list[str]]:
        """Returns request → adapters that it adds."""
        adapters_of: dict[str, list[str]] = {}
        for change in self.changes:
            if change.action == "add":
                adapters_of.setdefault(change.request, []).append(change.adapter)
        return adapters_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The job after some requests.

    Attributes:
        changes: by adapter, of all of them.
        references: of new adapters.
        request: the last of them.
    """

    after: Job
    changes: Mapping[str, Change]
    references: Mapping[str, SetReferences] = field(default_factory=dict)
    request: Request | None = None


class Revisions:
    """Decides at drained slots whether to plan again. The first process writes the new plan into the folder.

    Args:
        job: the current job; every new plan is stored in it.
        recorded: changes of the run so far.
        lacks_memory: `Session.lacks_memory`.
        joining: computes the references of adapters before they join.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        progress: Progress,
        recorded: Sequence[Change],
        lacks_memory: LacksMemory,
        joining: JoiningReferences,
        listener: Listener,
    ):
        self._job, self._folder, self._progress, self._emit = job, folder, progress, listener
        self._lacks_memory, self._joining = lacks_memory, joining
        self._recorded = list(recorded)
        self._postponed: set[str] = set()  # requests about adapters that join at a later slot
        self._preparing: dict[str, Request] = {}  # those of them whose references are computed
        self._stuck: set[str] = set()  # refused requests that cannot be moved away

    def has_requests(self) -> bool:
        """Whether a request is pending. Lists one folder."""
        waiting = {name for name in self._postponed if name not in self._preparing or self._joining.waits(name)}
        waiting |= self._stuck
        return is_first() and any(file.name not in waiting for file in request_files(self._folder.path))

    def revise(self) -> Sequence[Change] | None:
        """Replaces the plan from the drained slot `progress.slot` on. Returns the changes, or None if the plan stays.

        Collective over processes.
        """
        before, slot = self._job.plan, self._progress.slot
        proposal = self._propose(slot) if is_first() else None
        while any_process(proposal is not None) and (
            why := disagreement_on(self._job.config, [] if proposal is None else proposal.new_adapters(self._job))
        ):
            if proposal is not None:
                self._refuse_additions(proposal, why)
                proposal = self._propose(slot)
        if proposal is not None:
            self._write_plan(proposal, slot)
        self._joining.agree(self._job.config)
        if not any_process(proposal is not None):
            return None
        self._recorded = cap_slots(self._recorded, slot)
        changes = self._read_decision() if proposal is None else proposal.changes
        self._recorded += changes
        plan = self._job.plan
        self._emit(
            PlanRevised(
                slot=slot,
                slots=plan.num_slots,
                slots_left=plan.num_slots - slot,
                slots_left_before=before.num_slots - slot,
                plan=plan.digest,
                stopped=_stopped_early(changes),
            )
        )
        return changes

    def _propose(self, slot: int) -> Proposal | None:
        """Plans with what is asked. What cannot be done is refused, and the run goes on."""
        freed, self._postponed, self._preparing = [*self._free_slots(slot), *self._early_stops(slot)], set(), {}
        steps = [_Step(after=self._job, changes={change.adapter: change for change in freed})]
        for request in self._requests():
            before = steps[-1]
            if not before.changes.keys().isdisjoint(request.adapters):  # left to the next revision
                continue
            if (after := self._apply_request(before.after, request)) is None:
                continue
            if (references := self._references_of(request, after)) is None:
                continue
            steps.append(
                _Step(
                    after=after,
                    changes={**before.changes, **_changes_of(request, slot)},
                    references={**before.references, **references},
                    request=request,
                )
            )
        while steps[-1].changes:
            step = steps.pop()
            self._emit(PhaseBegun(text="planning"))
            try:
                plan, changes = revise(
                    step.after, slot, list(step.changes.values()), not_awaited=self._progress.not_awaited
                )
            except REFUSABLE as problem:
                if step.request is None:
                    raise
                self._refuse(step.request.name, f"{step.request.description}: {_one_line(problem)}")
            else:
                return Proposal(after=step.after, plan=plan, changes=changes, references=step.references)
        return None

    def _refuse_additions(self, proposal: Proposal, why: str) -> None:
        for name, adapters in proposal.additions().items():
            self._refuse(name, f"add {', '.join(adapters)}: the processes would not train the same: {why}")

    def _write_plan(self, proposal: Proposal, slot: int) -> None:
        record, config, after = self._folder.read_record(), None, proposal.after
        if after.config != self._job.config:
            record, config = record | new_record_entries(after, record), after.config
            record = store_references(self._folder.path, record, proposal.references, config)
        rows = [change.row() for change in proposal.changes]
        self._folder.write_move(proposal.plan, slot, rows, record=record, config=config)
        self._job.config, self._job.prepared, self._job.plan = after.config, after.prepared, proposal.plan
        self._remove_requests(change.request for change in proposal.changes)

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

    def _early_stops(self, slot: int) -> list[Change]:
        return [
            Change(slot=slot, adapter=name, action="stop", reason=adapter.stop)
            for name, adapter in self._progress.adapters.items()
            if adapter.stop_pending
        ]

    def _requests(self) -> Iterator[Request]:
        """Yields pending requests, oldest first. Reports and removes invalid files."""
        recorded = {change.request for change in self._recorded}
        for file in request_files(self._folder.path):
            if file.name in self._stuck:
                continue
            if file.name in recorded:  # executed before the process was killed
                self._remove_requests([file.name])
                continue
            try:
                yield Request.read(file)
            except Exception as problem:  # whatever is in that folder must not end a run
                self._refuse(file.name, f"{file.name} is not a request: {_one_line(problem)}")

    def _apply_request(self, job: Job, request: Request) -> Job | None:
        """Returns the job after a request; None if the request is postponed or rejected."""
        try:
            if request.action != "add":
                status = {progress.name: progress.status for progress in self._progress.adapters.values()}
                (name,) = request.adapters
                if name not in status and self._joins_later(name):
                    self._postponed.add(request.name)
                    return None
                check_request(request.action, name, status)
            return with_request(job, request, self._lacks_memory)
        except REFUSABLE as problem:
            self._refuse(request.name, f"{request.description}: {_one_line(problem)}")
            return None

    def _joins_later(self, name: str) -> bool:
        return name in self._job.plan.job_of or any(name in request.adapters for request in self._preparing.values())

    def _references_of(self, request: Request, after: Job) -> Mapping[str, SetReferences] | None:
        """Returns the references of the adapters that a request adds; None while others train and they are computed."""
        if request.action != "add":
            return {}
        addition = select_adapters(after.config, request.adapters)
        slot, running = self._progress.slot, [a.status == "running" for a in self._progress.adapters.values()]
        try:
            references = self._joining.take(request.name, addition, after.prepared)
            if references is None and not (any(running) and slot < self._job.plan.num_slots):  # nobody else trains
                references = self._joining.complete(request.name, slot)
        except REFUSABLE as problem:
            self._refuse(request.name, f"{request.description}: {_one_line(problem)}")
            return None
        if references is None:
            self._postponed.add(request.name)
            self._preparing[request.name] = request
        return references

    def _refuse(self, request: str, why: str) -> None:
        text = why.encode(errors="backslashreplace").decode()  # names of files need not be text
        self._emit(RequestRefused(slot=self._progress.slot, text=shortened_text(text)))
        self._joining.drop(request)
        try:
            put_away(self._folder.path / FOLDER / request)
        except OSError:
            self._stuck.add(request)

    def _remove_requests(self, names: Iterable[str]) -> None:
        for name in filter(None, names):
            self._joining.drop(name)
            (self._folder.path / FOLDER / name).unlink(missing_ok=True)


def _stopped_early(changes: Sequence[Change]) -> tuple[str, ...]:
    return tuple(change.adapter for change in changes) if all(change.action == "stop" for change in changes) else ()


def _changes_of(request: Request, slot: int) -> dict[str, Change]:
    return {
        name: Change(slot=slot, adapter=name, action=request.action, request=request.name, weight=request.weight)
        for name in request.adapters
    }


def _one_line(problem: Exception) -> str:
    """Describes an error in one line."""
    if not isinstance(problem, LoraFusionError | PlanError):
        kind = "" if isinstance(problem, OSError | ValueError) else f"{type(problem).__name__}: "
        return f"{kind}{str(problem).partition(chr(10))[0]}"
    errors = problem.errors if isinstance(problem, ErrorList) else (problem,)
    more = [*errors[0].problems[:1]] if isinstance(errors[0], PlanError) else []
    text = " ".join(filter(None, (errors[0].what, errors[0].why, *more)))
    return text if len(errors) == 1 else f"{text} (and {len(errors) - 1} more mistakes)"


def with_request(job: Job, request: Request, lacks_memory: LacksMemory) -> Job:
    """Returns the job with what a request adds, and with its old plan.

    Raises:
        LoraFusionError, PlanError: the request cannot be fulfilled.
    """
    if request.action == "add":
        return with_adapters(job, request.settings, lacks_memory)
    if request.action == "extend":
        return extended(job, request.adapters[0], epochs=request.epochs, steps=request.steps)
    return job


def with_adapters(job: Job, adapters: Sequence[AdapterConfig], lacks_memory: LacksMemory) -> Job:
    """Returns the job with additional adapters.

    Raises:
        LoraFusionError: a name is taken, data or a warm start cannot be read, samples are too long for the base, or
            memory does not suffice (`add.memory`).
        PlanError: a sample does not fit into a microbatch.
    """
    check_names(adapters, job.config)
    addition = job.config.model_copy(update={"adapters": tuple(adapters)})
    check_on_mesh(addition)
    prepared = prepare(addition)
    read_warm_starts(addition)
    raise_all(check_start_bases(addition))
    check_adapters(addition, prepared)
    check_jobs(
        train_jobs(addition, prepared),
        capacity_tokens=job.plan.sizes,
        num_stages=job.plan.num_stages,
        data_parallel=job.plan.data_parallel,
        tile_tokens=job.plan.tile_tokens,
    )
    config = add_adapters(job.config, adapters)
    if (lacking := lacks_memory(config)) is not None:
        raise RunError("add.memory", "the devices lack the memory for more adapters.", why=lacking)
    return replace(job, config=config, prepared=_with_data(job.prepared, prepared))


def extended(job: Job, name: str, *, epochs: int | None, steps: int | None) -> Job:
    """Returns the job with more samples of an adapter, after the current end of its stream.

    Raises:
        ConfigError: `config.too-many-samples`.
    """
    adapter, data = job.config.adapter(name), job.prepared.adapters[name]
    more = data.epoch_samples * epochs if epochs is not None else adapter.global_samples * (steps or 0)
    part = Extension(after=job.plan.job_of[name].num_samples, samples=more)
    longer = adapter.model_copy(update={"extended": (*adapter.extended, part)})
    adapters = tuple(longer if other.name == name else other for other in job.config.adapters)
    data_in_order = in_order(longer, data.train, data.eval, job.config.train.max_steps, data.weights, data.rollout)
    return replace(
        job,
        config=job.config.model_copy(update={"adapters": adapters}),
        prepared=replace(job.prepared, adapters=job.prepared.adapters | {name: data_in_order}),
    )


def reread(config: JobConfig, prepared: Prepared) -> Prepared:
    """Returns the data of a configuration that the first process has extended.

    Raises:
        LoraFusionError: this process cannot read the data of a new adapter.
    """
    names = [adapter.name for adapter in config.adapters if adapter.name not in prepared.adapters]
    all_data = _with_data(prepared, prepare(select_adapters(config, names))) if names else prepared
    data_by_name = {
        adapter.name: in_order(adapter, data.train, data.eval, config.train.max_steps, data.weights, data.rollout)
        for adapter in config.adapters
        for data in [all_data.adapters[adapter.name]]
    }
    return replace(prepared, adapters=data_by_name)


def new_record_entries(job: Job, record: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of run.json about adapters that the job's plan does not have yet."""
    addition = select_adapters(
        job.config, [adapter.name for adapter in job.config.adapters if adapter.name not in job.plan.job_of]
    )
    names = {adapter.name for adapter in addition.adapters}
    entries = {
        "data": job.prepared.digests(),
        "eval": eval_digests(job.prepared),
        "compared_by": compared_by(addition),
        "scored_by": scored_by(job.config),
        "seeds": {adapter.name: adapter.seed for adapter in addition.adapters},
        "warm_starts": warm_start_digests(addition),
    }
    addition_entries = {
        key: {name: value for name, value in by_name.items() if name in names} for key, by_name in entries.items()
    }
    return {key: record.get(key, {}) | by_name for key, by_name in addition_entries.items()}


def _with_data(prepared: Prepared, more: Prepared) -> Prepared:
    return replace(prepared, adapters=prepared.adapters | more.adapters)
