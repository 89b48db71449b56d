"""Adapters of a run that are in no place on the devices: their states wait in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorafusion_jax.peft.folder import Arrays
from lorafusion_jax.session.adapter_state import AdapterState


@dataclass(slots=True, kw_only=True)
class Bank:
    """What adapters have that are in no place. One that is at its first step has no state: it is drawn again.

    Attributes:
        states: by name; arrays are not changed, so that a checkpoint may be written of them meanwhile.
        starts: weights of a warm start, of all adapters that have one.
    """

    states: dict[str, AdapterState] = field(default_factory=dict)
    starts: Mapping[str, Arrays] = field(default_factory=dict)

    def keep(self, name: str, state: AdapterState) -> None:
        """Takes the state of an adapter that leaves its place."""
        if state.step or state.sums:
            self.states[name] = state
