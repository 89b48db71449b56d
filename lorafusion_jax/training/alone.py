"""A run folder has one run at a time; what one process of a run is refused there ends all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import jax

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.errors import CheckpointError, LoraFusionError
from lorafusion_jax.pipeline.processes import agreed, is_first


@contextmanager
def all_or_none() -> Iterator[None]:
    """Ends every process of a run where one is refused something within: the others would wait for it.

    All processes must come here equally often.

    Raises:
        LoraFusionError: what was refused.
        CheckpointError: `run.refused`, where it was another process.
    """
    refused: LoraFusionError | None = None
    try:
        yield
    except LoraFusionError as problem:
        refused = problem
    several = jax.distributed.is_initialized()  # one process by itself starts no backend here
    if several and agreed(refused is not None) and refused is None:
        refused = CheckpointError("run.refused", "another process of this run may not go on and says why.")
    if refused is not None:
        raise refused


@contextmanager
def alone(folder: RunFolder) -> Iterator[None]:
    """Keeps others from training a run that goes on.

    Raises:
        CheckpointError: `run.in-use`, in all processes of this run; there is no run (`run.missing`).
    """
    with ExitStack() as held:
        with all_or_none():
            if is_first():
                held.enter_context(folder.lock())
        yield
