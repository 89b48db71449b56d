"""Exclusive access to a run folder. If one process of a distributed run fails here, all processes fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.requests import remove_parts
from lorafusion_jax.errors import CheckpointError, LoraFusionError
from lorafusion_jax.session.processes import any_process, is_first


@contextmanager
def fail_together() -> Iterator[None]:
    """Raises on every process if the body raises on any. Collective: every process must enter it equally often.

    Raises:
        LoraFusionError: the error of this process.
        CheckpointError: `run.refused`, if another process raised.
    """
    error: LoraFusionError | None = None
    try:
        yield
    except LoraFusionError as problem:
        error = problem
    if any_process(error is not None) and error is None:
        error = CheckpointError("run.refused", "another process of this run failed; see its message.")
    if error is not None:
        raise error


@contextmanager
def exclusive_run(folder: RunFolder) -> Iterator[None]:
    """Prevents other processes from training this run, and removes temporary files of killed processes.

    Raises:
        CheckpointError: `run.in-use` or `run.missing` (there is no run), on all processes of this run.
    """
    with ExitStack() as resources:
        with fail_together():
            if is_first():
                resources.enter_context(folder.lock())
                folder.complete_change()
                folder.remove_leftovers()  # before any process of this run looks at checkpoints
                remove_parts(folder.path)
        yield
