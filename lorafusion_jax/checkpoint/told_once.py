"""A write that fails is told once, as our own error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def told_once() -> Iterator[None]:
    """Keeps tracebacks of orbax's and tensorstore's threads off the screen while a checkpoint is written.

    Where the write fails, they stay off: those threads come to their end after the error has been raised here.
    """
    orbax, hook = logging.getLogger("absl"), sys.unraisablehook
    orbax.addFilter(_of_our_own)
    sys.unraisablehook = partial(_hook, hook)
    yield
    sys.unraisablehook = hook
    orbax.removeFilter(_of_our_own)


def _of_our_own(record: logging.LogRecord) -> bool:
    return "_SignalingThread" not in str(record.msg)  # it raises the same error once more where one waits for it


def _hook(before, unraisable) -> None:
    """Drops what tensorstore says when the loop that asked for a write has gone with the first failure."""
    if unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed":
        return
    before(unraisable)
