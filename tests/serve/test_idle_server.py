"""What a service costs while nobody uses it, and that it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from campaigns.service_process import wait_for

ABSENT = ("jaxlib", "pyarrow", "ray")  # libraries of workers and checks, which take seconds and most of the memory
MOST_MB, MOST_CPU_S = 150, 6.0  # 2 s on a core of its own; slower and shared ones count more


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def test_a_server_of_one_session_imports_no_policy_and_no_checks():
    """They are a third of what its start takes of the processor; a child process checks jobs."""
    code = "import sys, lorafusion_jax.cli.main, lorafusion_jax.serve.server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "lorafusion_jax.serve.control.controller" in loaded
    unwanted = ("scheduling.online", "lorafusion_jax.planning", "lorafusion_jax.data.prepare", "jax", "ray")
    assert [name for name in unwanted if name in loaded] == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_server_is_small_and_starts_quickly(tmp_path, tiny_base):
    """A policy opens no session before there is a job. Seconds are of the processor: another load changes nothing."""
    home = tmp_path / "home"
    arguments = ["--home", str(home), "--base", f"tiny={tiny_base}", "--policy", "packing", "--port", "0"]
    server = subprocess.Popen([sys.executable, "-m", "lorafusion_jax", "serve", *arguments], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: (home / "address").exists() or server.poll() is not None)
        assert server.poll() is None
        started_s = cpu_seconds(server.pid)
        time.sleep(1.0)  # ten rounds of the controller
        assert resident_mb(server.pid) <= MOST_MB
        assert started_s <= MOST_CPU_S
        libraries = {line.rpartition(" ")[2] for line in Path(f"/proc/{server.pid}/maps").read_text().splitlines()}
        assert [path for path in sorted(libraries) if any(f"/{name}/" in path for name in ABSENT)] == []
        assert cpu_seconds(server.pid) - started_s < 0.3
        assert not (home / "workers").exists()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


# `lorafusion serve`, with stubs for all that it may wait for at its end: none of them ever ends by itself. A child
# reads data, a worker saves, the copy of the day is written. Then the database is locked, and a request waits for it.
HANGING = """
import os, signal, sqlite3, sys, threading, urllib.request
from contextlib import suppress
from lorafusion_jax.__main__ import main
from lorafusion_jax.serve import server
from lorafusion_jax.serve.control import child, controller
from lorafusion_jax.serve.store import database

CLOSE_S = 0.5
controller.CLOSE_S, controller.WRITE_S, database.LOOK_S, database.BUSY_S = CLOSE_S, 0.0, -1.0, 1.0
hanging, urls, never = [], [], threading.Event()
making, writing = controller.Controller, database.Database.write

def begin(what):
    hanging.append(what)
    if sorted(hanging) == ["child", "copy", "url", "worker"]:
        threading.Thread(target=lock, daemon=True).start()

def hang(what):
    begin(what)
    never.wait()

class Child:
    def __init__(self, command): pass
    def ask(self, message, seconds): hang("child")
    def kill(self): print("child: killed", flush=True)

class Worker:
    def has_ended(self): return False
    def terminate(self): print("worker: asked to save", flush=True)
    def wait(self, seconds): print("worker: waited for", seconds <= CLOSE_S, flush=True)

class Launcher:
    problem = ""
    def find(self, group, epoch, pid): pass
    def hosts(self, gpus): pass
    def close(self): print("launcher: closed", flush=True)
    def start(self, arguments, log):
        begin("worker")
        return Worker()

def make(*arguments, **more):
    made = making(*arguments, **more)
    made.child.submit("ana", "count", {"file": ""})
    return made

def write(db):
    if threading.current_thread().name.startswith("AnyIO"):
        print("request: waits", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    return writing(db)

def lock():
    other = sqlite3.connect(os.path.join(sys.argv[3], "service.db"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    database.Database.write = write
    with suppress(OSError):  # 503, or the server is gone
        urllib.request.urlopen(urllib.request.Request(urls[0] + "/v1/workers/local-0/drain", b"", method="POST"))

def note(file, url):
    urls.append(url)
    begin("url")

child.AnsweringProcess, controller.make_launcher = Child, lambda settings, address: Launcher()
database.Database.copy = lambda db, file: hang("copy")
server.Controller, server.replace_text = make, note
main()
"""


def test_a_server_ends_whatever_hangs(tmp_path, tiny_base):
    """What is counted is what it waits for: it would never end if it waited for one of the stubs."""
    arguments = ["serve", "--home", str(tmp_path / "home"), "--base", f"tiny={tiny_base}", "--port", "0"]
    server = subprocess.Popen(
        [sys.executable, "-c", HANGING, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said, problems = server.communicate(timeout=120)
    finally:
        server.kill()
    assert server.returncode == 130, problems
    wanted = ["request: waits", "child: killed", "worker: asked to save", "worker: waited for True", "launcher: closed"]
    assert [line for line in dict.fromkeys(said.splitlines()) if line in wanted] == wanted, (said, problems)
    assert "Traceback" not in problems
