"""Progress of a run. With the pipeline's arrays it is the content of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.session.task import AdapterProgress

FORM = 2  # format of a checkpoint's arrays: every adapter at its own rank


@dataclass(slots=True, kw_only=True)
class Progress:
    """Everything besides arrays that a resumed run needs to continue bitwise.

    Attributes:
        slot: number of slots done.
        plan: digest of the plan.
        stage_devices: number of devices of a stage; partial gradient sums are per device.
    """

    adapters: dict[str, AdapterProgress]
    stage_devices: int = 1
    slot: int = 0
    plan: str = ""
    seconds: float = 0.0

    @property
    def unwritten(self) -> list[AdapterProgress]:
        """Adapters that took their last step but whose folder could not be written."""
        return [
            adapter
            for adapter in self.adapters.values()
            if adapter.status == "failed" and adapter.step == adapter.num_steps
        ]

    def drop(self, stopped: Iterable[tuple[str, int]]) -> list[AdapterProgress]:
        """Marks running adapters that the plan stops as failed, and returns them."""
        dropped = [
            (adapter, slot)
            for adapter, slot in ((self.adapters.get(name), slot) for name, slot in stopped)
            if adapter is not None and adapter.status == "running"  # an adapter that joins later is dropped then
        ]
        for adapter, slot in dropped:
            adapter.status, adapter.reason = "failed", f"dropped by hand at slot {slot}"
        return [adapter for adapter, _ in dropped]

    @staticmethod
    def first(steps: Mapping[str, int], *, stage_devices: int, plan: str) -> Progress:
        """Returns the progress at the start of a run.

        Args:
            steps: number of steps of each adapter.
        """
        adapters = {name: AdapterProgress(name=name, num_steps=count) for name, count in steps.items()}
        return Progress(adapters=adapters, stage_devices=stage_devices, plan=plan)

    def position(self) -> dict[str, Any]:
        """Returns the progress as a checkpoint stores it."""
        return {"form": FORM} | asdict(self)

    @staticmethod
    def of(position: dict[str, Any]) -> Progress:
        """Inverse of `position`.

        Raises:
            CheckpointError: `run.bad-state`, keys are missing or unknown; `run.later-version`.
        """
        form = position.get("form")
        if form != FORM:
            raise CheckpointError(
                "run.later-version",
                f"checkpoint {position.get('slot')} has format {form}; this version reads format {FORM}.",
                fix="resume the run with the version of lorafusion-jax that wrote it",
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
                fix=f"remove state/{position.get('slot')} of the run folder to continue from the checkpoint before it",
            ) from None
