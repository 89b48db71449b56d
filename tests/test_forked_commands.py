"""The process that forks commands for tests."""

import os
import subprocess
import sys
from pathlib import Path

import forked_commands


def test_the_server_ends_with_the_process_that_started_it(tmp_path):
    """Also when that is killed, and can end nobody: its end of the pipe closes."""
    folder = tmp_path / "server"
    folder.mkdir()
    code = f"import forked_commands; forked_commands.serve({str(folder / 'socket')!r})"
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}], stdin=subprocess.PIPE).wait()"
    environment = os.environ | {"PYTHONPATH": str(Path(forked_commands.__file__).parent)}
    first = subprocess.Popen([sys.executable, "-c", start], env=environment, stdout=subprocess.PIPE)
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"ready\n"
        first.kill()
        assert first.stdout.read() == b""  # the last process that could write has ended
    assert not folder.exists()
