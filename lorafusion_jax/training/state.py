"""How far a run is; with the pipeline's arrays it is what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lorafusion_jax.errors import CheckpointError

FORM = 2  # of a checkpoint's arrays; 1, of earlier versions, pads all adapters to the largest rank
Status = Literal["running", "paused", "done", "cancelled", "failed"]


@dataclass(slots=True, kw_only=True)
class AdapterProgress:
    """Where one adapter stands.

    Attributes:
        step: optimizer steps taken.
        num_steps: steps of the plan.
        reason: why it failed or was cancelled.
    """

    name: str
    num_steps: int
    step: int = 0
    status: Status = "running"
    reason: str = ""

    @property
    def failure(self) -> str:
        """Why it failed; empty if it did not."""
        return self.reason if self.status == "failed" else ""


@dataclass(slots=True, kw_only=True)
class Progress:
    """Everything besides arrays that a resumed run needs to continue bitwise.

    Attributes:
        slot: slots of the plan that are done.
        plan: its digest.
        replicas: of the layout that ran; sums under way are kept per replica.
    """

    adapters: dict[str, AdapterProgress]
    replicas: int = 1
    slot: int = 0
    plan: str = ""
    seconds: float = 0.0

    @property
    def unwritten(self) -> list[AdapterProgress]:
        """Adapters that took their last step and have no folder: writing it failed."""
        return [own for own in self.adapters.values() if own.status == "failed" and own.step == own.num_steps]

    def drop(self, stopped: Iterable[tuple[str, int]]) -> list[AdapterProgress]:
        """Marks the adapters as failed that the plan leaves out from some slot on; returns those that still trained."""
        dropped = [
            (own, slot)
            for own, slot in ((self.adapters.get(name), slot) for name, slot in stopped)
            if own is not None and own.status == "running"  # one that joins later is dropped when it does
        ]
        for own, slot in dropped:
            own.status, own.reason = "failed", f"dropped by hand at slot {slot}"
        return [own for own, _ in dropped]

    @staticmethod
    def first(steps: Mapping[str, int], *, replicas: int, plan: str) -> Progress:
        """Where a run begins.

        Args:
            steps: of each adapter.
        """
        adapters = {name: AdapterProgress(name=name, num_steps=count) for name, count in steps.items()}
        return Progress(adapters=adapters, replicas=replicas, plan=plan)

    def position(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        return {"form": FORM} | asdict(self)

    @staticmethod
    def of(position: dict[str, Any]) -> Progress:
        """Reads what `position` wrote.

        Raises:
            CheckpointError: `run.bad-state`, keys are missing or unknown; `run.later-version`.
        """
        form = position.get("form", 1)
        if form not in range(1, FORM + 1):
            raise CheckpointError(
                "run.later-version",
                f"checkpoint {position.get('slot')} has arrays of form {form}, and this version reads 1 to {FORM}.",
                fix="resume the run with the version of lorafusion-jax that wrote it, or a later one",
            )
        try:
            adapters = {name: AdapterProgress(**row) for name, row in position["adapters"].items()}
            known = {key: value for key, value in position.items() if key != "form"}
            return Progress(**(known | {"adapters": adapters}))
        except (KeyError, TypeError, AttributeError) as problem:
            raise CheckpointError(
                "run.bad-state",
                f"the position of checkpoint {position.get('slot')} cannot be read.",
                why=str(problem),
                fix=f"remove state/{position.get('slot')} of the run folder to go on from the checkpoint before",
            ) from None


def is_padded(position: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is of a version that padded all adapters to the largest rank."""
    return position.get("form", 1) == 1
