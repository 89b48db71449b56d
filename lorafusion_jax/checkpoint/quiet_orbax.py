"""Silences the background tracebacks of orbax and tensorstore: our own error reports a failed write, once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Silences their background threads while a checkpoint is written.

    After a failed write they stay silent, because the threads end only after the error was raised here.
    """
    orbax, hook = logging.getLogger("absl"), sys.unraisablehook
    orbax.addFilter(_is_ours)
    sys.unraisablehook = partial(_hook, hook)
    yield
    sys.unraisablehook = hook
    orbax.removeFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    return "_SignalingThread" not in str(record.msg)  # orbax raises the same error again in the waiting thread


def _hook(before, unraisable) -> None:
    """Drops tensorstore's error about the event loop, which is closed after the first failure."""
    if unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed":
        return
    before(unraisable)
