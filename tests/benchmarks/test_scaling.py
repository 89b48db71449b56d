"""The scaling table agrees with the current planner, memory model and costs."""

import csv

import pytest

from benchmarks.published import RESULTS, SCALING
from benchmarks.scaling import best, with_efficiency, write


def read(folder):
    with (folder / "scaling.csv").open() as stream:
        return list(csv.DictReader(stream))


def test_a_small_table_has_the_columns_and_figures_of_the_whole_one(tmp_path):
    write(with_efficiency([best("8B", 4, 8, gpus) for gpus in (1, 2, 8)]), tmp_path)
    whole = {
        line["gpus"]: line
        for line in read(RESULTS / SCALING)
        if (line["model"], line["adapters"]) == ("8B", "4") and line["global_batch"] == "8"
    }
    for line in read(tmp_path):
        known = whole[line["gpus"]]
        assert tuple(line) == tuple(known)
        same = ("model", "adapters", "global_batch", "stages", "replicas", "fsdp", "capacity", "keep")
        assert {key: line[key] for key in same} == {key: known[key] for key in same}
        assert float(line["tokens_per_s"]) == pytest.approx(float(known["tokens_per_s"]), rel=0.01)
    assert max(float(line["efficiency"]) for line in read(tmp_path)) == 1
    assert read(tmp_path)[-1]["limit"].startswith("replicas starve")
    assert (tmp_path / "scaling.png").exists()
    assert "nothing overlaps it" in (tmp_path / "scaling_assumptions.txt").read_text()


def test_a_model_that_fits_nowhere_has_no_row():
    assert best("70B", 4, 8, 1) is None
