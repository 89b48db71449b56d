"""A run folder has one run at a time; the first of its processes sees to that for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import jax

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.pipeline.processes import agreed, is_first


@contextmanager
def alone(folder: RunFolder) -> Iterator[None]:
    """Keeps others from training a run that goes on.

    Raises:
        CheckpointError: `run.in-use`, in all processes of this run; there is no run (`run.missing`).
    """
    with ExitStack() as held:
        refused: CheckpointError | None = None
        if is_first():
            try:
                held.enter_context(folder.lock())
            except CheckpointError as problem:
                refused = problem
        several = jax.distributed.is_initialized()  # one process by itself starts no backend here
        if several and agreed(refused is not None) and refused is None:
            refused = CheckpointError("run.refused", "the first process of this run may not go on and says why.")
        if refused is not None:
            raise refused
        yield
