"""Commands in processes of their own that need not import jax: they are forks of one that has, and has no device yet.

Importing takes 2.5 seconds of a processor, and tests of several processes start dozens.
"""

from __future__ import annotations

import atexit
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
from functools import cache
from pathlib import Path
from threading import Thread

CPU_S = [0.0]  # of commands that have ended; nobody's child, so the system does not tell


class Command:
    """A command that runs, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]):
        """Words are those after `python`: -m MODULE … or -c CODE …."""
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(_server())
        out, err = os.pipe(), os.pipe()
        socket.send_fds(self._link, [b"."], [out[1], err[1]])
        self._link.sendall(json.dumps({"words": list(words), "env": dict(env), "cwd": os.getcwd()}).encode() + b"\n")
        os.close(out[1])
        os.close(err[1])
        self.stdout, self.stderr = os.fdopen(out[0]), os.fdopen(err[0])
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
def _server() -> str:
    """Path of the socket of the process that forks; it ends with this one."""
    path = Path(tempfile.mkdtemp(), "socket")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    server = subprocess.Popen(
        [sys.executable, __file__, str(path)], env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
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
            for number, stream in enumerate(streams, start=1):
                os.dup2(stream, number)
                os.close(stream)
            return request
        for stream in streams:
            os.close(stream)
        link.sendall(f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        link.sendall(f"{os.waitstatus_to_exitcode(status)} {sum(os.times()[2:4])}\n".encode())
        os._exit(0)


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
