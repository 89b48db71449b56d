"""Events of a run: one record type per kind, sent to all listeners.

`row()` is the record as `metrics.jsonl` and `events.jsonl` have it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event of a run.

    Attributes:
        kind: name in the files of the run folder.
        slot: number of slots of the plan that are done.
    """

    kind: ClassVar[str]
    slot: int = 0

    def row(self) -> dict[str, Any]:
        """All fields by name. Metrics become fields of their own."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        metrics = values.pop("metrics", {})
        return {"kind": self.kind, **values, **metrics}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEvent(RunEvent):
    """An event of one adapter after one of its steps."""

    adapter: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBegun(RunEvent):
    """A phase other than training has begun. It is shown, but not recorded."""

    kind = "phase"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCompiled(RunEvent):
    kind = "compiled"
    program: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencesComputed(RunEvent):
    """A forward pass has computed what the references of these adapters say of their samples.

    Attributes:
        tokens: of their samples, held-out ones included.
        seconds: of the devices.
        beside_s: time from the first to the last microbatch, between which others trained; None: nobody trained.
    """

    kind = "references"
    adapters: Sequence[str]
    tokens: int
    seconds: float
    beside_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedUp(RunEvent):
    """The base model is on its devices and the programs are there.

    Attributes:
        seconds: since it began to be read.
        parts: begin and end of what went on, side by side: reading the base, compiling each stage.
        compiled, from_cache: programs that the compilation cache lacked and had; none is counted without a cache.
        lowering_s, compiling_s: seconds of Python that lowered programs, and of XLA; those of threads add up.
        base_from_cache: whether the kernels of the base were quantised by an earlier run.
        ahead_failures: programs that a process of their own could not compile, and why. The run compiled them.
    """

    kind = "started-up"
    seconds: float
    parts: Mapping[str, tuple[float, ...]]
    compiled: int
    from_cache: int
    lowering_s: float
    compiling_s: float
    base_from_cache: bool = False
    ahead_failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMoved(RunEvent):
    """A resumed run was replanned for other devices."""

    kind = "moved"
    stages: int
    replicas: int
    slots_left: int
    slots_left_before: int
    plan: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(RunEvent):
    """A session of the run has started: sizes of the run, and progress of its adapters.

    Attributes:
        mesh: stages, data, fsdp, tensor.
        layers: of each stage.
        remat: what a layer's forward leaves for its backward.
        adapters: steps of each in the plan.
        taken: steps of each so far.
        failed: why, for those that did.
        stopped: paused or cancelled, for those that are.
        frozen, trainable: parameters; trainable are the adapters' own.
        sizes: microbatches of each capacity, where a plan has several.
        stored: numbers that the devices hold for the trainable ones: weights, gradients, moments.
        plan: its digest.
        predicted: seconds of the whole plan at default rates: of slots, evaluations and saves.
    """

    kind = "started"
    device: str
    mesh: Mapping[str, int] | None = None
    layers: Sequence[float] = ()
    remat: str = ""
    memory_warning: str | None = None
    data_notes: Sequence[str] = ()
    slots: int
    density: float
    predicted_bubble_share: float | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)
    adapters: Mapping[str, int]
    taken: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    stopped: Mapping[str, str] = field(default_factory=dict)
    capacity_tokens: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    trainable: int
    stored: Mapping[str, int] = field(default_factory=dict)
    plan: str
    frozen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDone(RunEvent):
    """Throughput and time left, in wall time since the first slots of a session; None before there is any.

    Attributes:
        slot_seconds: of a slot, without pauses.
        eta_s: with the evaluations and saves to come.
        paused_share, paused_s: what training waited for, evaluating, saving or compiling.
        eta_leaves_out: what is to come and has not been measured yet.
    """

    kind = "slot"
    slots: int
    useful_tokens_per_s: float | None = None
    processed_tokens_per_s: float | None = None
    slot_seconds: float | None = None
    eta_s: float | None = None
    adapter_eta_s: Mapping[str, float] = field(default_factory=dict)
    adapter_tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    paused_share: float | None = None
    paused_s: Mapping[str, float] = field(default_factory=dict)
    eta_leaves_out: Sequence[str] = ()
    bubble_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken(AdapterEvent):
    """An adapter took an optimizer step.

    Attributes:
        loss: value that the adapter's objective minimises.
        metrics: further metrics of the objective.
    """

    kind = "step"
    loss: float
    grad_norm: float
    lr: float
    loss_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEvaluated(AdapterEvent):
    """An adapter was evaluated.

    Attributes:
        metrics: metrics of the objective, with the prefix `eval_`.
    """

    kind = "eval"
    eval_loss: float
    eval_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSampled(AdapterEvent):
    """An adapter generated texts, see `train.samples`; or the rows of a step, of which these are some.

    Attributes:
        prompts, texts: of each sample.
        rewards: of each; empty where texts are not rewarded.
    """

    kind = "sample"
    prompts: Sequence[str]
    texts: Sequence[str]
    rewards: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSaved(RunEvent):
    """A checkpoint is complete; `slot` is its own, and training has gone on meanwhile.

    Attributes:
        seconds: from its beginning to its place on the disk.
        paused_s: of them, those in which nothing was trained: the save before was not through, the state was copied.
    """

    kind = "saved"
    path: str
    seconds: float
    paused_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterExported(AdapterEvent):
    kind = "exported"
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFailed(AdapterEvent):
    """An adapter's folder could not be written; the run continues."""

    kind = "export-failed"
    code: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDone(AdapterEvent):
    kind = "adapter-done"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFailed(AdapterEvent):
    """An adapter failed and stopped training; its folder holds `kept_step`."""

    kind = "adapter-failed"
    reason: str
    kept_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChanged(AdapterEvent):
    """A request about one adapter was applied, or it is stopped early.

    Attributes:
        action: cancel, pause, continue, finish, weight, extend or add; stop.
        status: of the adapter from here on.
        num_steps: its steps from here on.
        weight: its new one, of `weight`.
        request: name of the request's file, which tells two requests of one slot apart.
        reason: why an adapter is stopped early.
    """

    kind = "adapter-changed"
    action: str
    status: str
    num_steps: int
    weight: float | None = None
    request: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRevised(RunEvent):
    """The rest of the plan was replanned during training.

    Attributes:
        stopped: adapters that end early, for which alone it was replanned; empty if there was another cause.
    """

    kind = "replanned"
    slots: int
    slots_left: int
    slots_left_before: int
    plan: str
    stopped: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRefused(RunEvent):
    """A request in `control/` was rejected and its file removed."""

    kind = "request-refused"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesDamaged(RunEvent):
    """Files are damaged; `text` also says how the run continues without them."""

    kind = "damaged"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSkipped(RunEvent):
    """The quantised base cannot be cached; `text` says why."""

    kind = "cache-skipped"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSkipped(RunEvent):
    """Something differs from the start of the run that cannot be checked, such as versions of packages."""

    kind = "unchecked"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(RunEvent):
    """The plan is through.

    Attributes:
        seconds: of slots, over all sessions.
        evaluation_s, saving_s: in which the last session did not train; None: no longer known.
    """

    kind = "finished"
    exit_code: int
    seconds: float
    peak_bytes: int | None
    evaluation_s: float | None = None
    saving_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInterrupted(RunEvent):
    """A signal interrupted the run; the state is saved."""

    kind = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped(RunEvent):
    """An error or a second signal stopped the run."""

    kind = "stopped"
    code: str
    what: str


Listener = Callable[[RunEvent], None]


def fan_out(listeners: Sequence[Listener]) -> Listener:
    """Returns a listener that passes every event on to all of these."""

    def emit(event: RunEvent) -> None:
        for listener in listeners:
            listener(event)

    return emit
