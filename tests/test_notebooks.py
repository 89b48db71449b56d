"""Every notebook runs from top to bottom without errors."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from more_cases import nightly
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS_A_CELL = 300
COMPUTES = ("01_quickstart",)  # the others are done as soon as they are compiled
NIGHTLY = ("04_timeline",)  # cli/test_profile_timeline.py does the same by command


@pytest.mark.filterwarnings("default")  # of Jupyter's own event loops
@pytest.mark.parametrize(
    "path", [nightly(path) if path.stem in NIGHTLY else path for path in NOTEBOOKS], ids=lambda path: path.stem
)
def test_notebook_runs(path, monkeypatch):
    if path.stem not in COMPUTES:
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=SECONDS_A_CELL,
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
    ).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_its_outputs_and_without_errors(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert not [
        output
        for cell in cells
        for output in cell.outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]
