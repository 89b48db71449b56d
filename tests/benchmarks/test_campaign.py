"""The campaign runs benchmarks in parallel and never loses measurements."""

import argparse
import json
import sys
import tarfile

import pytest

from benchmarks.campaign import CELLS, Campaign, Cell, cell_named

SCRIPT = """
import json, os, pathlib, sys, time
seconds, _, folder = sys.argv[1:]
with (pathlib.Path(folder) / "rows.jsonl").open("w") as file:
    file.write(json.dumps({"gpus": os.environ["CUDA_VISIBLE_DEVICES"]}) + "\\n" + '{"half": ')
time.sleep(float(seconds))
"""


@pytest.fixture
def cell(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    class Script(Cell):
        @property
        def argv(self):
            return [sys.executable, *self.command.split()]

    return lambda name, gpus, seconds, sleeps: Script(
        name=name, gpus=gpus, seconds=seconds, command=f"{script} {sleeps}"
    )


def test_a_hanging_cell_does_not_affect_others(tmp_path, cell):
    cells = [cell("pair", 2, 1, 0.3), cell("hangs", 1, 0.5, 600), cell("all", 3, 1, 0.1), cell("long", 1, 600, 0)]
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    ended = Campaign(cells, "012", 30, out, work).run()
    assert ended["pair"] == ended["all"] == "exit status 0"
    assert ended["hangs"] == "killed at its limit"
    assert ended["long"].startswith("not started: needs 600 s")
    rows = {row["cell"]: row["gpus"] for row in map(json.loads, (out / "campaign.jsonl").read_text().splitlines())}
    assert rows == {"pair": "0,1", "hangs": "2", "all": "0,1,2"}
    with tarfile.open(out / "campaign.tar.gz") as archive:
        assert "campaign/hangs/log.txt" in archive.getnames()


def test_every_cell_is_a_benchmark_that_exists():
    from benchmarks.campaign import ROOT

    assert all((ROOT / "benchmarks" / f"{cell.command.split()[0]}.py").exists() for cell in CELLS)
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_a_cell_can_be_named_again_with_a_number():
    first, again = cell_named(CELLS[0].name), cell_named(f"{CELLS[0].name}.2")
    assert (again.name, again.command, again.gpus) == (f"{first.name}.2", first.command, first.gpus)
    for wrong in ("second", "", "²"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a cell"):
            cell_named(f"{CELLS[0].name}.{wrong}")
