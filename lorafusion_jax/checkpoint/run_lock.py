"""Lock of a run folder: one process trains it at a time, and others can see whether it still does.

It is a lock of the operating system, which ends with its process in any case. `run.lock` names the process. On file
systems without locks there is no exclusion, and the state is unknown.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from lorafusion_jax.errors import CheckpointError, quoted
from lorafusion_jax.readable import SETTINGS, open_regular

FILE = "run.lock"
TRIES, TRY_EVERY_S = 5, 0.1  # `held_by` in another process holds the lock for a moment


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Prevents other processes from training the run in `folder`.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with run_lock(folder):
    ...     held_by(folder)["alive"]
    True
    >>> held_by(folder)["alive"]
    False

    Raises:
        CheckpointError: `run.in-use`, another process trains it.
    """
    try:
        file = (folder / FILE).open("a+", encoding="utf-8")
    except OSError:  # a folder that is not writable is reported when the run is written
        yield
        return
    with file:  # closing the file releases the lock
        if not _try_to_hold(file):
            raise _in_use(folder)
        with suppress(OSError):  # a full disk
            file.truncate(0)
            json.dump({"process": os.getpid(), "host": socket.gethostname()}, file)
            file.flush()
        yield


def held_by(folder: Path) -> dict:
    """Returns the process that trains the run in `folder`, or the last one that did.

    Returns:
        `process` and `host`, if known, and `alive`. `alive` is None if the file system has no locks, or does not share
        them with that host.
    """
    try:
        with open_regular(folder / FILE, SETTINGS) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                is_locked = False
            except BlockingIOError:
                is_locked = True
            who = json.loads(file.read() or "{}")
    except (OSError, ValueError, RecursionError):
        return {"alive": None}
    who = who if isinstance(who, dict) else {}
    return who | {"alive": is_locked or (False if who.get("host") == socket.gethostname() else None)}


def _try_to_hold(file: TextIO) -> bool:
    for _ in range(TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(TRY_EVERY_S)
        except OSError:
            return True  # the file system has no locks
        else:
            return True
    return False


def _in_use(folder: Path) -> CheckpointError:
    who = held_by(folder)
    by = f"process {who['process']} on {who['host']}" if "process" in who else "another process"
    return CheckpointError(
        "run.in-use",
        f"{folder} is being trained by {by}.",
        where=str(folder / FILE),
        fix=f"lorafusion status {quoted(folder)} --watch shows its progress; wait, or stop it, before you resume",
    )
