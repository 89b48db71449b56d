"""The planner benchmark reproduces the published rows that do not depend on time."""

import csv
import sys

import pytest

from benchmarks import planner
from benchmarks.published import ORDERS, RESULTS
from scheduling import batch_by_batch, one_after_another


def published(workload, order):
    with (RESULTS / ORDERS / "bubbles.csv").open(newline="") as stream:
        (row,) = [r for r in csv.DictReader(stream) if (r["workload"], r["order"]) == (workload, order)]
    return {key: float(value) for key, value in row.items() if key not in ("workload", "order")}


@pytest.mark.parametrize(
    ("order", "make", "program"),
    [
        ("batch by batch, no flush", batch_by_batch, None),
        ("one adapter at a time, 1F1B with flush", one_after_another, planner.flushed),
    ],
)
def test_baselines_match_the_published_rows(order, make, program):
    jobs = planner.workload(16, "xsum")
    in_ours = planner.idle(make(jobs, **planner.LIMITS), program)
    own_idle = planner.idle(planner.fastest(make, jobs, program), program)
    assert in_ours == pytest.approx(published("xsum", order))
    assert own_idle == pytest.approx(published("xsum", f"{order}, own capacity"))
    assert own_idle["capacity_tokens"] < in_ours["capacity_tokens"]
    assert own_idle["seconds"] < in_ours["seconds"]  # or it would not be the capacity of choice
    assert own_idle["idle_share"] > own_idle["bubble_share"]  # fill and drain count


def test_a_part_that_does_not_exist_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["planner", "bubbels", "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="2"):
        planner.main()
    assert "no part bubbels; parts: workloads" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_part_leaves_table_plot_and_conditions(monkeypatch, tmp_path):
    rows = [{"workload": "xsum", "order": order, "idle_share": 0.1} for order in ("ours", "other")]
    monkeypatch.setitem(planner.PARTS, "bubbles", lambda: rows)
    monkeypatch.setattr(sys, "argv", ["planner", "bubbles", "--out", str(tmp_path)])
    planner.main()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bubbles.csv", "bubbles.png", "conditions.json"]
    assert (tmp_path / "bubbles.csv").read_text().splitlines()[1:] == ["xsum,ours,0.1", "xsum,other,0.1"]
