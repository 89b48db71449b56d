"""Ctrl-C in a real terminal: what the screen shows at once, and at the end. Needs tmux."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest
from cli_helpers import make_job

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")]
PATIENCE_S = 300


class Terminal:
    """A command in a terminal of its own server."""

    def __init__(self, folder, columns: int, words: list[str]):
        self._tmux = ["tmux", "-S", str(folder / "tmux")]
        command = f"{shlex.join(words)}; echo rc=$?; exec sh"
        size = ["-x", str(columns), "-y", "32"]
        subprocess.run([*self._tmux, "new-session", "-d", *size, "-s", "s", command], check=True, env=os.environ)

    def keys(self, *names: str) -> None:
        subprocess.run([*self._tmux, "send-keys", "-t", "s", *names], check=True)

    def wait(self, pattern: str) -> str:
        """Waits until the screen matches; returns it."""
        until = time.monotonic() + PATIENCE_S
        while True:
            shown = subprocess.run([*self._tmux, "capture-pane", "-p", "-t", "s"], check=True, capture_output=True)
            screen = shown.stdout.decode().strip()
            if re.search(pattern, screen):
                return screen
            assert time.monotonic() < until, screen
            time.sleep(0.05)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False)


@pytest.mark.parametrize("columns", [80, 110])
@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_is_acknowledged_below_the_live_view(tmp_path, tiny_base, columns, signals):
    job = make_job(tmp_path, tiny_base)
    words = [
        sys.executable,
        "-m",
        "lorafusion_jax",
        "train",
        str(job.path),
        "--out",
        str(tmp_path / "run"),
        "epochs=900",
    ]
    terminal = Terminal(tmp_path, columns, words)
    try:
        terminal.wait(r"loss \d")
        terminal.keys("C-c")
        acknowledged = terminal.wait("stopping: what is under way|interrupted: the state is saved")
        assert "stopping: what" in acknowledged.replace("\n", " ") or "rc=130" in terminal.wait("rc=")
        if signals == 2:
            terminal.keys("C-c")
        screen = terminal.wait(r"rc=\d")
        assert "rc=130" in screen
        assert f"next: lorafusion resume {tmp_path / 'run'}" in screen.replace("\n", "")
        assert len(re.findall(r"^run  .*mb", screen, re.MULTILINE)) <= 1, "the old block is gone"
        saved = any((tmp_path / "run" / "state").glob("[0-9]*"))
        assert saved == ("interrupted: the state is saved" in screen)
        assert saved or "stopped at once" in screen
    finally:
        terminal.close()
