"""Gradients on a quantised base, by depth, in miniature."""

import csv
import sys

from benchmarks import quantised_depth


def test_every_layer_has_a_row_and_errors_grow_towards_the_first(tmp_path, monkeypatch):
    arguments = ["--out", str(tmp_path), "--small", "--layers", "2", "--kinds", "fp8"]
    monkeypatch.setattr(sys, "argv", ["quantised_depth", *arguments])
    quantised_depth.main()
    rows = list(csv.DictReader((tmp_path / "quantised_depth.csv").read_text().splitlines()))
    assert [(row["kind"], int(row["layer"])) for row in rows] == [("fp8", 1), ("fp8", 2)]
    errors = [float(row["error"]) for row in rows]
    assert errors[0] > errors[1] > 0
    assert all(0.9 < float(row["cosine"]) < 1 for row in rows)
