"""Turns errors of devices into our own error, with the stage, slot and adapters.

The loss of another process appears in the same places: in a collective, or in an agreement between processes. The
transport (Gloo on CPUs, NCCL on GPUs) reports a closed connection, and jax's coordination service a missing heartbeat.
A process that notices neither within 100 s is ended by jax itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax

from lorafusion_jax.errors import LoraFusionError, RunError
from lorafusion_jax.layout.layer import RematPolicy

PROCESS_LOST = "train.process-lost"
_PEER_LOST = re.compile(
    "connection (closed|reset) by (remote )?peer"
    r"|socketserver: |errno: (32|104|107|110|111|113)\b"  # of jax's transfer server
    "|remote process exited"
    "|gloo .* failed: .*timed? ?out"
    "|heartbeat timeout|stopped sending heartbeats"
    "|another task died"
    "|coordination service"
    r"|getkeyvalue\(\) timed out|barrier timed out",
    re.IGNORECASE | re.DOTALL,
)
_NUMBER = re.compile(r"/task:(\d+) heartbeat timeout|stopped sending heartbeats\):\s*(\d+)")
_ADDRESS = re.compile(r"peer (?:\[([^\]\s]+)\]:\d+|([^\s<\[]+)<\d+>)")


def is_of_devices(problem: Exception) -> bool:
    """Whether a device or another process caused an exception. A lost connection may be a ValueError."""
    if isinstance(problem, LoraFusionError):  # already has a description
        return False
    return isinstance(problem, jax.errors.JaxRuntimeError) or bool(_PEER_LOST.search(str(problem)))


class FailedEvent(Exception):
    """An exception, with the event during which it was raised."""

    def __init__(self, problem: Exception, stage: int, slot: int | None, adapters: Sequence[str]):
        super().__init__(str(problem))
        self.problem, self.stage, self.slot, self.adapters = problem, stage, slot, adapters


def place_of(stage: int | None, slot: int | None, adapters: Sequence[str]) -> str:
    """Describes the place of an error, as far as it is known.

    >>> place_of(1, 7, ["law"])
    ' at stage 1, slot 7 (law)'
    """
    places = [f"stage {stage}" if stage is not None else "", f"slot {slot}" if slot is not None else ""]
    where = ", ".join(filter(None, places))
    return (f" at {where}" if where else "") + (f" ({', '.join(adapters)})" if adapters else "")


def stage_failed(
    problem: Exception,
    stage: int | None,
    slot: int | None,
    adapters: Sequence[str],
    *,
    remat: RematPolicy | None = None,
) -> RunError:
    """Describes an error of jax as `train.out-of-memory`, `train.process-lost` or `train.stage-failed`.

    Args:
        problem: exception of jax.
        stage, slot: place of the error (None: unknown).
        remat: rematerialisation policy of the run (None: unknown).

    >>> print(stage_failed(RuntimeError("RESOURCE_EXHAUSTED: 3 GiB"), 1, 7, ["law"]).what)
    the device has no memory left at stage 1, slot 7 (law).
    """
    text = str(problem)
    at = place_of(stage, slot, adapters)
    why = text.splitlines()[0][:300] if text else type(problem).__name__
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return RunError(
            "train.out-of-memory",
            f"the device has no memory left{at}.",
            why=why,
            fix=("" if remat == "nothing" else "lorafusion resume RUN train.remat=nothing, or ")
            + "a new run with a lower batch.capacity_tokens or more mesh.stages",
        )
    if _PEER_LOST.search(text):
        return RunError(
            PROCESS_LOST,
            f"another process of this run{_which(text)} is lost, or the network to it; "
            f"noticed{at or ' between slots'}.",
            why=why,
            fix="read the end of that process's own output or log for the reason. Then lorafusion resume RUN in all "
            "processes continues from the last checkpoint, which is intact",
        )
    return RunError(
        "train.stage-failed",
        f"the device failed{at}.",
        why=why,
        fix="lorafusion resume RUN continues from the last checkpoint",
    )


def _which(text: str) -> str:
    number, address = _NUMBER.search(text), _ADDRESS.search(text)
    if number:
        return f" (process {number[1] or number[2]})"
    return f" (on {address[1] or address[2]})" if address else ""
