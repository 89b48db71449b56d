"""What a run says while it goes on: one kind of message, sent to any number of listeners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal[
    "phase",  # text: what is being done before the first step
    "compiled",  # program, seconds
    "moved",  # to other devices, and planned again for them: stages, replicas, slots_left, slots_left_before
    "started",  # the run's sizes
    "slot",  # a microbatch is done: throughput and time left
    "step",  # an adapter took an optimizer step: loss, grad_norm, lr
    "eval",  # an adapter was evaluated: eval_loss, eval_tokens
    "saved",  # a checkpoint is on disk
    "exported",  # an adapter folder is on disk
    "export-failed",  # it could not be written, and the run goes on: code, what
    "adapter-done",
    "adapter-failed",
    "damaged",  # text: files that are not as they were written, and what the run does without them
    "unchecked",  # text: what cannot be checked in a folder that an earlier version wrote
    "finished",
    "interrupted",  # by a signal; the state is saved
    "stopped",  # by an error, or at once by a signal: code, what
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One message of a run.

    Attributes:
        slot: slots of the plan that are done.
        adapter, step: whose step, where it applies.
        values: numbers and texts of this kind of message.
    """

    kind: Kind
    slot: int = 0
    adapter: str | None = None
    step: int | None = None
    values: dict[str, Any] = field(default_factory=dict)


Listener = Callable[[Event], None]
