"""Ends or fails the calls by which this process changes a folder: a kill, or a disk that refuses to write.

A hook of Python's audit events sees every such call of Python code before it happens. A kill is simulated: the folder
is copied as it is at that moment, and put back when the process' work has ended, so that nothing of its end stays.
Calls of libraries written in C are for `LD_PRELOAD`; see `kills`.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CALLS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate")


class Killed(BaseException):
    """Stands for SIGKILL: nothing that follows reaches the disk."""


class Disk:
    """The calls that change one folder.

    Attributes:
        calls: number of calls since `watch` began.
        killed: whether one of them was the last.
    """

    def __init__(self) -> None:
        self._folder, self._copy = "", Path()
        self._at, self._error, self._lasting = 0, 0, False
        self._lock, self._local = threading.RLock(), threading.local()
        self.calls, self.killed = 0, False
        self._active = False
        sys.addaudithook(self._hook)
        others = threading.excepthook  # a thread that was killed is no error
        threading.excepthook = lambda end: None if end.exc_type is Killed else others(end)

    @contextmanager
    def watch(
        self, folder: Path, *, kill_at: int = 0, fail_at: int = 0, error: int = 0, lasting: bool = False
    ) -> Iterator[None]:
        """Counts the calls below a folder within the body; 0 kills and fails none.

        Args:
            kill_at: number of the call before which the process is killed.
            fail_at: number of the call that fails with `error`, an errno; if `lasting`, all calls after it, too.
        """
        assert not self._active
        self._folder, self._copy = str(folder), folder.with_name(f"{folder.name}.killed")
        self._at, self._error, self._lasting = kill_at or fail_at, error if fail_at else 0, lasting
        self.calls, self.killed, self._active = 0, False, True
        try:
            yield
        finally:
            self._active = False
            if self.killed:  # what the process did after its end did not happen
                shutil.rmtree(folder, ignore_errors=True)
                if self._copy.exists():
                    self._copy.rename(folder)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active or getattr(self._local, "inside", False):
            return
        if event not in CALLS and not (event == "open" and (arguments[2] or 0) & WRITING):
            return
        if not self._is_below(arguments):
            return
        with self._lock:
            if self.killed:
                raise Killed
            self.calls += 1
            if not self._at or self.calls < self._at:
                return
            if self._error:
                if self.calls == self._at or self._lasting:
                    raise OSError(self._error, os.strerror(self._error), str(arguments[0]))
                return
            self._local.inside = True
            try:
                self._keep_copy()
            finally:
                self._local.inside = False
            self.killed = True
            raise Killed

    def _keep_copy(self) -> None:
        """Copies the folder as it is at a kill. Another thread may be within a call that it began before."""
        while os.path.isdir(self._folder):
            try:
                shutil.copytree(self._folder, self._copy, symlinks=True)
            except (shutil.Error, FileNotFoundError):  # a file vanished meanwhile
                shutil.rmtree(self._copy, ignore_errors=True)
            else:
                return

    def _is_below(self, arguments: tuple[Any, ...]) -> bool:
        """Whether a call is about the folder. A name relative to an open folder belongs to `shutil.rmtree`."""
        names = [os.fspath(argument) for argument in arguments[:2] if isinstance(argument, str | os.PathLike)]
        return any(
            not os.path.isabs(name) or name == self._folder or name.startswith(f"{self._folder}/") for name in names
        )
