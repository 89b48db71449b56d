"""One error for whatever a device reports, with the stage, slot and adapters that it happened to."""

from __future__ import annotations

from collections.abc import Sequence

from lorafusion_jax.errors import RunError


def stage_failed(problem: Exception, stage: int | None, slot: int | None, adapters: Sequence[str]) -> RunError:
    """Describes an error of jax as `train.out-of-memory` or `train.stage-failed`; None: not known.

    >>> print(stage_failed(RuntimeError("RESOURCE_EXHAUSTED: 3 GiB"), 1, 7, ["law"]).what)
    the device has no memory left at stage 1, slot 7 (law).
    """
    text = str(problem)
    places = [f"stage {stage}" if stage is not None else "", f"slot {slot}" if slot is not None else ""]
    where = ", ".join(filter(None, places))
    at = (f" at {where}" if where else "") + (f" ({', '.join(adapters)})" if adapters else "")
    why = text.splitlines()[0][:300] if text else type(problem).__name__
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return RunError(
            "train.out-of-memory",
            f"the device has no memory left{at}.",
            why=why,
            fix="lorafusion resume RUN train.keep=nothing, or a new run with a lower batch.capacity_tokens or more "
            "mesh.stages",
        )
    return RunError(
        "train.stage-failed",
        f"the device failed{at}.",
        why=why,
        fix="lorafusion resume RUN goes on from the last checkpoint",
    )
