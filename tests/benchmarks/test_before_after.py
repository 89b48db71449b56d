"""The comparison of two checkouts: whose layers take turns, and the rows that come of it."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import before_after

FILES = {
    "benchmarks/kernel_layer.py": "Shape = dict\nSHAPES = [{}]",
    "benchmarks/quantised_programs.py": """
from types import SimpleNamespace
def layers(shape):
    return [SimpleNamespace(name=name, operands=tuple) for name in ("bf16", "int8", "fp8")]
def lowered(program, operands, folder):
    return SimpleNamespace(compile=lambda: program.name)
""",
    "pallas_kernels/tuning/timing.py": """
from types import SimpleNamespace
LOG = "../log"
def time_calls(calls, rounds, round_s):
    with open(LOG, "a") as log:
        log.write(f"{TREE} {' '.join(calls)}\\n")
    return {name: SimpleNamespace(p50_us=US[name]) for name in calls}
""",
}


@pytest.fixture
def trees(tmp_path, monkeypatch):
    """Two checkouts of stand-ins: the layer in fp8 is 2 % slower in the second one."""
    for tree, us in {"before": {"bf16": 100.0, "fp8": 50.0}, "after": {"bf16": 100.5, "fp8": 51.0}}.items():
        for name, text in FILES.items():
            file = tmp_path / tree / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"TREE, US = {tree!r}, {us}\n{text}")
            for folder in (file.parent, *file.parent.parents):
                if folder != tmp_path / tree and folder.is_relative_to(tmp_path / tree):
                    (folder / "__init__.py").touch()
    both = [(name, tmp_path / name) for name in ("before", "after")]
    monkeypatch.setattr(before_after, "_trees", lambda args: both)
    monkeypatch.setattr(before_after, "_run", lambda tree, arguments: '{"device": "none"}')
    return tmp_path


def test_layers_take_turns(trees):
    rows = list(before_after.layer(Namespace(turns=2, small=True)))
    assert (trees / "log").read_text().split("\n")[:-1] == ["before bf16", "after bf16", "before fp8", "after fp8"] * 2
    assert [(row["name"], row["same"]) for row in rows] == [("layer bf16", True), ("layer fp8", False)]
    assert rows[1]["turns"] == [[50.0, 51.0]] * 2
    assert rows[1]["after_over_before"] == pytest.approx(1.02)


def test_layers_that_fail_end_the_comparison(trees):
    (trees / "after" / "benchmarks" / "kernel_layer.py").write_text("")
    with pytest.raises(SystemExit, match="ended with 1"):
        list(before_after.layer(Namespace(turns=1, small=True)))


def test_training_stops_where_no_time_is_left(trees, monkeypatch):
    monkeypatch.setattr(before_after, "_speeds", lambda tree, args: {"ours": 1000.0, "ours_fp8": 1500.0})
    rows = list(before_after.training(Namespace(rounds=2, until=float("inf"))))
    assert [row["name"] for row in rows] == ["8B mix bf16", "8B mix fp8"] * 2
    assert not list(before_after.training(Namespace(rounds=2, until=0.0)))
