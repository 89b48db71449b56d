"""What changes during a run, and nothing else: it is what a checkpoint holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lorafusion_jax.training.leaves import Leaves
from lorafusion_jax.training.programs import Sums

Status = Literal["running", "done", "failed"]


@dataclass(slots=True, kw_only=True)
class AdapterProgress:
    """Where one adapter stands.

    Attributes:
        step: optimizer steps taken.
        num_steps: steps of the plan.
        reason: why it failed.
    """

    name: str
    num_steps: int
    step: int = 0
    status: Status = "running"
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class RunState:
    """Everything that a resumed run needs to continue bitwise.

    Attributes:
        lora: stacked trainable leaves of all adapters.
        sums: gradients of global batches that are under way.
        optimizers: optax state per adapter.
        slot: slots of the plan that are done.
    """

    lora: Leaves
    sums: Sums
    optimizers: dict[str, Any]
    adapters: dict[str, AdapterProgress]
    slot: int = 0
    seconds: float = 0.0
    first_losses: dict[str, float] = field(default_factory=dict)  # held-out loss before training, per adapter

    def arrays(self) -> dict[str, Any]:
        return {"lora": self.lora, "sums": self.sums, "optimizers": self.optimizers}

    def position(self) -> dict[str, Any]:
        return {
            "slot": self.slot,
            "seconds": self.seconds,
            "first_losses": self.first_losses,
            "adapters": {name: asdict(adapter) for name, adapter in self.adapters.items()},
        }

    def restored(self, arrays: dict[str, Any], position: dict[str, Any]) -> RunState:
        """The state that a checkpoint describes."""
        return RunState(
            **arrays,
            slot=position["slot"],
            seconds=position["seconds"],
            first_losses=position["first_losses"],
            adapters={name: AdapterProgress(**row) for name, row in position["adapters"].items()},
        )
