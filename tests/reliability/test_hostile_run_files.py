"""Files of a run folder that are pipes, devices, folders or gigabytes of zeros: every command says so, and at once."""

from __future__ import annotations

import shutil

import limits
import pytest
from campaigns.quick_runs import command
from more_cases import mostly_nightly
from strange_files import STRANGE

FILES = ("config.yaml", "events.jsonl", "metrics.jsonl", "plan.json", "run.json", "run.lock", "adapters/law/latest/*")
COMMANDS = ("status", "verify", "resume", "report", "export")


CASES = [(file, what) for file in FILES for what in STRANGE]
ALWAYS = [("events.jsonl", "20 GB of zeros"), ("metrics.jsonl", "a pipe"), ("adapters/law/latest/*", "a pipe")]


@pytest.mark.parametrize(("file", "what"), mostly_nightly(CASES, ALWAYS))
def test_every_command_says_so(file, what, stopped, tmp_path):
    for name in COMMANDS:
        run = tmp_path / name
        shutil.copytree(stopped, run, symlinks=True)
        spoilt = [path for path in run.glob(file) if path.is_file()]
        assert spoilt
        if len(spoilt) > 1 and what == "20 GB of zeros":
            spoilt = [path for path in spoilt if path.name == "SHA256SUMS"]  # others are compared byte by byte
        for path in spoilt:
            path.unlink()
            STRANGE[what](path)
        arguments = [run, "law", "--to", tmp_path / "exported"] if name == "export" else [run]
        with limits.limited():
            outcome = command(name, *arguments)
        assert outcome.code in (0, 1, 2, 3), (name, outcome.text[-2000:])
        assert "Traceback" not in outcome.text, name
        assert name != "verify" or file == "run.lock" or outcome.code, "a damaged file is not noticed"
        shutil.rmtree(tmp_path / "exported", ignore_errors=True)
