"""Kills this process, fails its calls, or copies a folder at a call that changes it: of Python and of all libraries.

disk_calls.c says how. `preload` starts a program anew with it; processes that are forked from there arm it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).with_name("disk_calls.c")
NO_COUNT, ALL = -1, 2**40


def source_digest() -> str:
    """Tells a library from one of other source."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]


def build(library: Path) -> Path:
    """Compiles the library for LD_PRELOAD; needs a C compiler."""
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def preload(library: Path, script: str) -> None:
    """Starts this process anew with the library, unless it has it; builds it where it is not there.

    Args:
        script: this process' module.
    """
    if str(library) in os.environ.get("LD_PRELOAD", ""):
        return
    if not library.exists():
        build(library)
    arguments = [sys.executable, "-m", script, *sys.argv[1:]]
    os.execve(sys.executable, arguments, os.environ | {"LD_PRELOAD": str(library)})


@contextmanager
def watched(folder: Path | str, *, at: int = 0, error: int = 0, lasting: bool = False) -> Iterator[SimpleNamespace]:
    """Counts the calls within, and kills or fails one; yields what has `calls` afterwards.

    `calls` has a letter for every call: n of a name, s that makes something durable, w that opens or writes a file.

    Args:
        folder: below which calls count; empty: anywhere, but then no writes to files.
        at: number of the call before which this process is killed; 0: none.
        error: an errno with which that call fails instead; if `lasting`, all that follow, too.
    """
    library, seen = ctypes.CDLL(None), SimpleNamespace(calls="")
    library.calls_seen.restype = ctypes.c_char_p
    numbers = ctypes.c_long(at), ctypes.c_long(ALL if lasting else at)
    library.watch_calls(os.fsencode(folder), *numbers, ctypes.c_int(error))
    try:
        yield seen
    finally:
        seen.calls = library.calls_seen().decode()
        library.watch_calls(b"", ctypes.c_long(NO_COUNT), ctypes.c_long(0), ctypes.c_int(0))


@contextmanager
def copied(folder: Path, into: Path, first: int = 1, last: int = ALL) -> Iterator[SimpleNamespace]:
    """Copies the folder before each of its calls from `first` to `last`; what is copied is what SIGKILL would leave.

    A copy has the number of its call for a name, and is not there if the folder was not. Yields as `watched`.

    Args:
        into: an existing folder elsewhere.
    """
    with watched(folder) as seen:
        ctypes.CDLL(None).copy_at_calls(os.fsencode(into), ctypes.c_long(first), ctypes.c_long(last))
        yield seen
