"""The scripts in examples/flax print what they say."""

import ast
import runpy
from pathlib import Path

import pytest
from more_cases import nightly

NIGHTLY = ("session_qwen3", "session_vit")  # two larger models; `test_session.py` has what they call
SCRIPTS = sorted((Path(__file__).parents[2] / "examples" / "flax").glob("*.py"))


@pytest.mark.parametrize(
    "script",
    [nightly(script) if script.stem in NIGHTLY else script for script in SCRIPTS],
    ids=lambda script: script.stem,
)
def test_prints_what_it_says(script, capsys):
    doc = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    assert doc is not None
    expected = [line.removeprefix("    ") for line in doc.split("Expected output:\n\n")[1].splitlines()]
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == expected


def test_there_are_short_scripts():
    lines = {script.name: len(script.read_text(encoding="utf-8").splitlines()) for script in SCRIPTS}
    assert len(lines) >= 4
    assert {name: count for name, count in lines.items() if count > 60} == {}
