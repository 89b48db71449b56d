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
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
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
        mesh: sizes of stages, data, fsdp.
        layers: layers of each stage.
        remat: rematerialisation policy.
        adapters: steps of each adapter in the plan.
        taken: steps of each adapter so far.
        failed: reasons of the failed adapters.
        stopped: "paused" or "cancelled", for the adapters that are.
        frozen, trainable: number of parameters.
        plan: digest of the plan.
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
    adapters: Mapping[str, int]
    taken: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    stopped: Mapping[str, str] = field(default_factory=dict)
    capacity_tokens: int
    trainable: int
    plan: str
    frozen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDone(RunEvent):
    """Throughput and remaining time; None before they are measured."""

    kind = "slot"
    slots: int
    useful_tokens_per_s: float | None = None
    processed_tokens_per_s: float | None = None
    slot_seconds: float | None = None
    eta_s: float | None = None
    adapter_eta_s: Mapping[str, float] = field(default_factory=dict)
    adapter_tokens_per_s: Mapping[str, float] = field(default_factory=dict)
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
class StateSaved(RunEvent):
    kind = "saved"
    path: str
    seconds: float


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
    """A request about one adapter was applied.

    Attributes:
        action: cancel, pause, continue, finish or weight.
        status: new status of the adapter.
        num_steps: new total of its steps.
        weight: its new weight, for the action `weight`.
    """

    kind = "adapter-changed"
    action: str
    status: str
    num_steps: int
    weight: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRevised(RunEvent):
    """The rest of the plan was replanned during training."""

    kind = "replanned"
    slots: int
    slots_left: int
    slots_left_before: int
    plan: str


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
class CheckSkipped(RunEvent):
    """A check is not possible in a folder of an earlier version."""

    kind = "unchecked"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(RunEvent):
    kind = "finished"
    exit_code: int
    seconds: float
    peak_bytes: int | None


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
