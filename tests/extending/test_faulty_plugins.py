"""Code of another package may raise anything: the message names the package, and no stack trace is shown."""

from __future__ import annotations

import json

import pytest
from more_cases import mostly_nightly

from lorafusion_jax.cli.main import run

SOURCE = """
import optax

from lorafusion_jax.extend import AdapterKind, Leaf, Objective, Optimizer, Schedule, Segment

PROBLEM = {problem}


def fail(*arguments, **named):
    raise PROBLEM("on purpose")


def segments(row):
    return (Segment(name="all", prompt=row["prompt"], answer=row["completion"]),)


BUILD = Optimizer(build=fail, states_per_weight=0)
INIT = Optimizer(build=lambda *of: optax.GradientTransformation(fail, fail), states_per_weight=0)
SCHEDULE = Schedule(build=fail)
STEP = Schedule(build=lambda lr, ratio, steps: fail)
KIND = AdapterKind(leaves=(Leaf(name="down", axes=("K", "R"), init=fail),), low_rank=fail, peft={})
SEGMENTS = Objective(segments=fail, num_segments=1, columns=("prompt", "completion"), loss=fail)
LOSS = Objective(segments=segments, num_segments=1, columns=("prompt", "completion"), loss=fail)
"""
POINTS = {
    "lorafusion_jax.optimizers": {"bad_build": "BUILD", "bad_init": "INIT"},
    "lorafusion_jax.schedules": {"bad_schedule": "SCHEDULE", "bad_step": "STEP"},
    "lorafusion_jax.adapter_kinds": {"bad_kind": "KIND"},
    "lorafusion_jax.objectives": {"bad_segments": "SEGMENTS", "bad_loss": "LOSS"},
}
SETTINGS = {
    "bad_build": {"optim": {"name": "bad_build"}},
    "bad_init": {"optim": {"name": "bad_init"}},
    "bad_schedule": {"optim": {"schedule": "bad_schedule"}},
    "bad_step": {"optim": {"schedule": "bad_step"}},
    "bad_kind": {"lora": {"kind": "bad_kind"}},
    "bad_segments": {"objective": {"name": "bad_segments"}},
    "bad_loss": {"objective": {"name": "bad_loss"}},
}
PROBLEMS = ("ZeroDivisionError", "StopIteration", "MemoryError", "AssertionError", "OSError", "KeyError")
CASES = [(name, problem) for name in SETTINGS for problem in PROBLEMS]
ALWAYS = [("bad_segments", "StopIteration"), ("bad_build", "AssertionError"), ("bad_step", "OSError")]


@pytest.mark.parametrize(("name", "problem"), mostly_nightly(CASES, ALWAYS))
def test_whoever_raised_is_named(name, problem, install, write_rows, write_job, tmp_path, capsys):
    install(f"faulty_{name}_{problem}", SOURCE.replace("{problem}", problem), POINTS)
    entry = {"name": "law", "data": {"train": write_rows("law", 4)}, "batch": {"global_samples": 2}}
    path = write_job([entry | SETTINGS[name]])
    code = run(["train", str(path), "--out", str(tmp_path / "run")])
    output = capsys.readouterr()
    assert code == 2, output.err
    for early in ("check", "plan"):
        assert run([early, str(path)]) == 2
        refusal = capsys.readouterr().err
        assert name in refusal
        assert "Traceback" not in refusal
    assert "error[" in output.err
    assert name in output.err
    assert problem in output.err or "on purpose" in output.err
    assert not (tmp_path / "run" / "state").exists()
    assert "Traceback" not in output.err


def test_the_rows_are_named_too(install, write_rows, write_job, tmp_path, capsys):
    install("faulty_rows", SOURCE.replace("{problem}", "ZeroDivisionError"), POINTS)
    path = write_job([{"name": "law", "data": {"train": write_rows("law", 3)}} | SETTINGS["bad_segments"]])
    assert run(["check", str(path), "--json"]) == 2
    text = capsys.readouterr()
    assert "objective bad_segments raised ZeroDivisionError" in text.out + text.err
    assert json.loads(path.read_text())["adapters"][0]["name"] == "law"
