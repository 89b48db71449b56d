"""Silences the background tracebacks of orbax and tensorstore: our own error reports a failed write, once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Silences those threads while a checkpoint is written.

    After a failed write they stay silent, because they end only after the error has been raised here.
    """
    orbax, hook = logging.getLogger("absl"), sys.unraisablehook
    orbax.addFilter(_is_ours)
    sys.unraisablehook = partial(_hook, hook)
    yield
    sys.unraisablehook = hook
    orbax.removeFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    return "_SignalingThread" not in str(record.msg)  # it raises the same error once more where one waits for it


def _hook(before, unraisable) -> None:
    """Drops what tensorstore says when the loop that asked for a write has gone with the first failure."""
    if unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed":
        return
    before(unraisable)
