"""Calls functions of users in a process of their own, with limits of time, memory and disk."""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lorafusion_jax.config.rollout_section import LimitSettings
from lorafusion_jax.errors import RunError
from lorafusion_jax.new_folder import remove_unlocked

LOOK_S = 0.1  # between two looks at the folder and the clock
LARGEST_LINE = 256 << 20
END_S = 10.0  # what a process printed before its end is written within
PREFIX = "lorafusion-functions-"
NEW_S = 60.0  # a folder is locked so soon after it was made


class Functions:
    """The functions of one adapter. The process starts at the first call, and again after one that was ended.

    Args:
        folder: of relative paths.
        log: takes what the functions print (None: nothing does). From `disk_mb` on it goes on in a new file, and the
            one before is kept beside it.
    """

    def __init__(self, settings: LimitSettings, folder: Path, log: Path | None = None):
        self._settings, self._folder, self._log = settings, folder.absolute(), log
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: str | None = None
        self._lock: int | None = None
        self._writer: threading.Thread | None = None

    def call(self, kind: str, value: str, arguments: Mapping[str, Any]) -> Any:
        """Runs a call of `rollout.child` and returns its result.

        Args:
            kind: function, tool, match or url.
            value: FILE.py:function, regular expression, or address.

        Raises:
            RunError: `rollout.function`, it failed, or needed more than it may.
        """
        path = str(self._folder / value) if kind in ("function", "tool") else value
        timeout_s = self._settings.timeout_s
        call = {"kind": kind, "value": path, "timeout_s": timeout_s, **arguments}
        deadline = time.monotonic() + timeout_s
        process = self._started()
        sending = threading.Thread(target=_send, args=(process, json.dumps(call, default=str)), daemon=True)
        sending.start()
        line, why = self._receive(process, deadline)
        if why:
            self.close()
            fix = "look at what it does, or raise timeout_s, memory_gb or disk_mb"
            raise RunError("rollout.function", f"{value} {why}.", fix=fix)
        sending.join()
        answer = json.loads(line)
        if "error" in answer:
            message = f"{value} failed: {answer['error']}."
            if "MemoryError" in answer["error"]:
                self.close()
            new_run = "mend it and train the adapter in a new run, which lora.init_from lets go on from this one"
            raise RunError("rollout.function", message, fix=f"{new_run}; it prints to {self._log}")
        return answer["value"]

    def close(self) -> None:
        """Ends the process and deletes its folder."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._writer is not None:
                self._writer.join(END_S)
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            self._process = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        _remove_old_folders()
        self._scratch = tempfile.mkdtemp(prefix=PREFIX)
        self._lock = os.open(self._scratch, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        limits = [int(self._settings.memory_gb * 2**30), self._disk_bytes]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lorafusion_jax.rollout.child", self._scratch, *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Not the log itself: its size would count as that of a file of the process.
            stderr=subprocess.DEVNULL if self._log is None else subprocess.PIPE,
            start_new_session=True,  # what it starts ends with it
        )
        if self._log is not None:
            assert self._process.stderr is not None
            arguments = (self._process.stderr, self._log, self._disk_bytes)
            self._writer = threading.Thread(target=_write_log, args=arguments, daemon=True)
            self._writer.start()
        return self._process

    @property
    def _disk_bytes(self) -> int:
        return int(self._settings.disk_mb * 2**20)

    def _receive(self, process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, str]:
        """Returns the line that comes back, or why the process has to end."""
        assert process.stdout is not None
        assert self._scratch is not None
        received = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if selector.select(LOOK_S):
                    if not (block := os.read(process.stdout.fileno(), 1 << 16)):
                        return b"", f"ended its process with code {process.wait()}"
                    received += block
                if len(received) > LARGEST_LINE:
                    return b"", f"returned more than {LARGEST_LINE} bytes"
                if written_bytes(Path(self._scratch)) > self._disk_bytes:
                    return b"", f"wrote more than disk_mb={self._settings.disk_mb:g} into its folder"
                if time.monotonic() > deadline:
                    return b"", f"took longer than timeout_s={self._settings.timeout_s:g}"
        return bytes(received), ""


def _remove_old_folders() -> None:
    """Removes the folders of functions whose runs were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > NEW_S:
                remove_unlocked(folder)


def written_bytes(folder: Path) -> int:
    """Counts the bytes of all files of a folder that may change meanwhile."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                total += (Path(parent) / file).lstat().st_size
    return total


def _write_log(printed: IO[bytes], log: Path, most: int) -> None:
    """Appends what a process prints. On a full disk it is lost, as the process must not wait."""
    with printed:
        while block := os.read(printed.fileno(), 1 << 16):
            with suppress(OSError):
                if log.exists() and log.stat().st_size + len(block) > most:
                    log.replace(log.with_name(f"{log.name}.before"))
                with log.open("ab") as file:
                    file.write(block)


def _send(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # the process has ended, which its output says
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()
