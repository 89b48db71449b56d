"""The scripts in examples/calls and examples/recipes run, and their curves go where they say."""

import runpy
from pathlib import Path

import pytest
from more_cases import nightly

EXAMPLES = Path(__file__).parents[2] / "examples"
FALL = ("calls/sft", "calls/dpo", "calls/distillation")  # losses and a gap; the others print rewards and likelihoods
FOLDERS = ("calls", "recipes")
SCRIPTS = sorted(f"{folder}/{path.stem}" for folder in FOLDERS for path in (EXAMPLES / folder).glob("*.py"))


@pytest.mark.parametrize("script", [nightly(script) for script in SCRIPTS])
def test_a_curve_rises_or_falls(script):
    returned = runpy.run_path(str(EXAMPLES / f"{script}.py"))["main"]()
    for curve in returned.values() if isinstance(returned, dict) else [returned]:
        part = max(len(curve) // 4, 1)
        gain = sum(curve[-part:]) / part - sum(curve[:part]) / part
        assert (gain < 0) == (script in FALL), curve
        assert abs(gain) > 1e-3, curve


def test_scripts_can_be_imported_and_say_how_they_run():
    """What they do is nightly: it takes minutes. An import that fails is seen in every run."""
    assert len(SCRIPTS) == 8
    for script in SCRIPTS:
        names = runpy.run_path(str(EXAMPLES / f"{script}.py"))
        assert callable(names["main"])
        assert f"`python examples/{script}.py`" in names["__doc__"]
