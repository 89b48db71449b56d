"""The states of a job, as a table: (state, event) → next state. Every other pair is refused."""

from __future__ import annotations

from typing import Literal, get_args

from lorafusion_jax.errors import LoraFusionError

State = Literal[
    "checking", "queued", "starting", "running", "draining", "paused",
    "done", "failed", "cancelled", "rejected", "deleted",
]  # fmt: skip
STATES: tuple[State, ...] = get_args(State)
NEW = "new"
ENDED: frozenset[str] = frozenset({"done", "failed", "cancelled", "rejected"})
ON_WORKER: frozenset[str] = frozenset({"starting", "running", "draining"})
LIVE: frozenset[str] = frozenset({"checking", "queued", "paused"}) | ON_WORKER

TRANSITIONS: dict[tuple[str, str], State] = {
    (NEW, "submit"): "checking",
    ("checking", "accept"): "queued",
    ("checking", "reject"): "rejected",
    ("checking", "cancel"): "cancelled",
    ("queued", "place"): "starting",
    ("queued", "pause"): "paused",
    ("queued", "cancel"): "cancelled",
    ("queued", "poison"): "failed",
    ("starting", "started"): "running",
    ("starting", "refused"): "queued",
    ("starting", "lost"): "queued",
    ("starting", "failed"): "failed",
    ("starting", "drain"): "draining",
    ("running", "drain"): "draining",
    ("running", "lost"): "queued",
    ("running", "finished"): "done",
    ("running", "failed"): "failed",
    ("draining", "drain"): "draining",
    ("draining", "started"): "draining",
    ("draining", "lost"): "queued",
    ("draining", "stopped"): "queued",
    ("draining", "finished"): "done",
    ("draining", "failed"): "failed",
    ("paused", "continue"): "queued",
    ("paused", "cancel"): "cancelled",
    ("done", "delete"): "deleted",
    ("failed", "delete"): "deleted",
    ("cancelled", "delete"): "deleted",
    ("rejected", "delete"): "deleted",
}


class StateError(LoraFusionError, ValueError):
    """An event that the state of a job does not allow."""


def next_state(state: str, event: str) -> State:
    """Returns the state after an event.

    Raises:
        StateError: `job.state`.

    >>> next_state("queued", "place")
    'starting'
    """
    after = TRANSITIONS.get((state, event))
    if after is None:
        possible = sorted(name for before, name in TRANSITIONS if before == state)
        raise StateError(
            "job.state",
            f"a job that is {state} cannot take '{event}'.",
            fix=f"possible now: {', '.join(possible)}" if possible else "submit a new job",
        )
    return after
