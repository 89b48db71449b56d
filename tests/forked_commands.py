"""Commands in processes of their own that need not import jax: they are forks of one that has, and has no device yet.

Importing takes 2.5 seconds of a processor, and tests of several processes start dozens.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread

WORDS_BYTES = 8192  # room for the words of a command in the system's list of processes
CPU_S = [0.0]  # of commands that have ended; nobody's child, so the system does not tell


class Command:
    """A command that runs, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], *, log: int | None = None, server: str = ""):
        """Words are those after `python`: -m MODULE … or -c CODE ….

        Args:
            log: descriptor that gets all that it writes. It has a session of its own then, and a pipe as its input.
            server: socket of the process that forks; its modules are what the command need not import.
        """
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(server or start_server())
        pipes = [os.pipe(), os.pipe()] if log is None else [os.pipe()[::-1]]
        given = [pipe[1] for pipe in pipes] + ([log] if log is not None else [])
        request = {"words": list(words), "env": dict(env), "cwd": os.getcwd(), "apart": log is not None}
        socket.send_fds(self._link, [b"."], given)
        self._link.sendall(json.dumps(request).encode() + b"\n")
        for pipe in pipes:
            os.close(pipe[1])
        self.stdin = None
        if log is None:
            self.stdout, self.stderr = os.fdopen(pipes[0][0]), os.fdopen(pipes[1][0])
        else:
            self.stdin = os.fdopen(pipes[0][0], "w")
        self._told = self._link.makefile()
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Exit code; the number of a signal is negative."""
        if self.returncode is None:
            self._link.settimeout(None)
            if not _readable(self._link, timeout):
                raise subprocess.TimeoutExpired("command", timeout or 0)
            code, seconds = self._told.readline().split()
            self.returncode = int(code)
            CPU_S[0] += float(seconds)
            self._told.close()
            self._link.close()
            if self.stdin is not None:
                self.stdin.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has written, once it has ended."""
        end = None if timeout is None else time.monotonic() + timeout
        texts = ["", ""]

        def read(number: int, stream) -> None:
            texts[number] = stream.read()

        readers = [Thread(target=read, args=pair, daemon=True) for pair in enumerate((self.stdout, self.stderr))]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("command", timeout or 0)
        self.wait(None if end is None else max(1.0, end - time.monotonic()))
        self.stdout.close()
        self.stderr.close()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _readable(link: socket.socket, timeout: float | None) -> bool:
    return bool(select.select([link], [], [], timeout)[0])


@cache
def start_server(*modules: str) -> str:
    """Path of the socket of a process that forks; it ends with this one.

    Args:
        modules: that it imports, too.
    """
    path = Path(tempfile.mkdtemp(), "socket")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    words = [sys.executable, __file__, str(path), *modules, " " * WORDS_BYTES]
    server = subprocess.Popen(words, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    atexit.register(_end, server)
    return str(path)


def _end(server: subprocess.Popen) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


def serve(path: str) -> dict:
    """Forks for each request until its input closes, as it does when the first process ends, however that ends.

    Returns in the fork, with its request.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                shutil.rmtree(Path(path).parent)
                os._exit(0)
            link, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                break
            link.close()
    _, streams, _, _ = socket.recv_fds(link, 1, 2)
    with link, link.makefile() as told:
        request = json.loads(told.readline())
        child = os.fork()
        if child == 0:
            apart = request["apart"]
            if apart:
                os.setsid()
            for numbers, stream in zip(((0,), (1, 2)) if apart else ((1,), (2,)), streams, strict=True):
                for number in numbers:
                    os.dup2(stream, number)
                os.close(stream)
            show_words([sys.executable, *request["words"]])
            return request
        for stream in streams:
            os.close(stream)
        link.sendall(f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        with suppress(BrokenPipeError):  # who started it has ended
            link.sendall(f"{os.waitstatus_to_exitcode(status)} {sum(os.times()[2:4])}\n".encode())
        os._exit(0)


def show_words(words: Sequence[str]) -> None:
    """Makes the system show these as the command of this process, as far as there is room."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"\0".join(word.encode() for word in words) + b"\0"
    if len(text) < end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def set_up(env: Mapping[str, str]) -> None:
    """What jax reads in the environment when it is imported."""
    import jax

    os.environ.clear()
    os.environ.update(env)
    for variable, value in env.items():
        name = variable.lower()
        if name not in jax.config.values:
            continue
        before = jax.config.values[name]
        if isinstance(before, bool):
            jax.config.update(name, value.lower() in ("1", "true"))
        else:
            jax.config.update(name, value if before is None else type(before)(value))


def main() -> None:
    import one_compile
    import pytest

    import lorafusion_jax.cli.main
    import lorafusion_jax.training  # noqa: F401

    for module in sys.argv[2:-1]:
        importlib.import_module(module)
    request = serve(sys.argv[1])
    set_up(request["env"])
    os.chdir(request["cwd"])
    one_compile.share_programs(pytest.MonkeyPatch())
    kind, program, *words = request["words"]
    sys.argv = [kind, *words]
    if kind == "-c":
        exec(program, {"__name__": "__main__"})
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
