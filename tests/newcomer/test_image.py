"""The Dockerfile of the examples, step by step without Docker: what it copies, installs and starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = [
    line.split(maxsplit=1)
    for line in (ROOT / "examples" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def arguments(instruction: str) -> list[str]:
    return [rest for word, rest in STEPS if word == instruction]


def test_the_image_has_a_python_and_extras_that_the_package_knows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (image,), (extras,) = arguments("FROM"), arguments("ARG")
    python = tuple(map(int, re.fullmatch(r"python:(\d+)\.(\d+)-slim", image).groups()))
    least = tuple(map(int, project["requires-python"].removeprefix(">=").split(",")[0].split(".")))
    assert python >= least
    assert set(extras.removeprefix("EXTRAS=").split(",")) <= set(project["optional-dependencies"])


def test_the_image_gets_everything_that_the_wheel_is_made_of():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    wheel = wheel["wheel"]
    copied = [name for line in arguments("COPY") for name in line.split()[:-1]]
    assert {*wheel["packages"], "examples", "pyproject.toml"} <= set(copied)
    assert all(source.startswith("examples/") for source in wheel["force-include"])
    assert [name for name in copied if not (ROOT / name).exists()] == []


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("sh") is None, reason="a shell runs its steps")
def test_its_steps_make_a_command_that_runs(tmp_path):
    """The folders of the image lie in a folder of the test, and its Python is an environment of its own."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "python"], check=True)
    environment = {"PATH": f"{tmp_path / 'python' / 'bin'}:{os.environ['PATH']}", "EXTRAS": "serve"}

    def inside(text: str) -> str:
        return re.sub(r"(?<![\w.])/(src|cache|work|tmp)\b", rf"{tmp_path}/\1", text)

    for instruction, rest in STEPS:
        match instruction:
            case "COPY":
                *sources, target = inside(rest).split()
                for source in sources:
                    path = ROOT / source
                    if path.is_dir():
                        shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"))
                    else:
                        Path(target).mkdir(exist_ok=True)
                        shutil.copy(path, target)
            case "RUN":
                subprocess.run(["sh", "-c", inside(rest)], env=environment, check=True)
            case "ENV":
                environment |= dict(pair.split("=", 1) for pair in shlex.split(inside(rest)))
    command = [*json.loads(arguments("ENTRYPOINT")[0]), *json.loads(arguments("CMD")[0])]
    done = subprocess.run(command, env=environment, cwd=tmp_path / "work", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "cache") in done.stdout
