"""What a service costs while nobody uses it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
        until = time.monotonic() + 120
        while not (home / "address").exists():
            assert server.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
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
