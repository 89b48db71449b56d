"""Every notebook runs from top to bottom without errors."""

from __future__ import annotations

import ast
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest
from more_cases import nightly
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS_A_CELL = 300
TWO_TARGETS, ONE_TARGET = '"targets": ["q_proj", "v_proj"]', '"targets": ["q_proj"]'
TWO_ADAPTERS = {  # programs as of `small_jobs.two_adapters`
    '"capacity_tokens": 512, "tile_tokens": 32': '"capacity_tokens": 128, "tile_tokens": 16',
    '"max_length": 128': '"max_length": 64, "on_long": "drop"',
    '"max_steps": 20': '"max_steps": 3',
    '"targets": ["q_proj", "v_proj", "up_proj", "down_proj"]': '"targets": ["q_proj", "down_proj"]',
    '"rank": 8': '"rank": 2',
    '"rank": 16': '"rank": 4',
}
SHORTER = {  # fewer steps, and adapters of fewer kernels: compiling is most of the time
    "01_quickstart": TWO_ADAPTERS | {"module_eval.csv": "module_eval_few.csv", "ask_eval.jsonl": "ask_eval_few.jsonl"},
    "06_a_sweep_in_one_run": {TWO_TARGETS: ONE_TARGET},
    "15_your_own_data": TWO_ADAPTERS,
    "07_your_nnx_model": {"steps=60": "steps=6"},
    "11_preferences": {TWO_TARGETS: ONE_TARGET},
    "13_reinforcement_learning": {
        "resolve(), 24": "resolve(), 2",
        '"targets": ["q_proj", "v_proj", "down_proj"]': ONE_TARGET,
    },
}
BASE = 'examples / "base"'
# the steps of a run are the same on any base
ON_A_TINY_BASE = ("01_quickstart", "06_a_sweep_in_one_run", "11_preferences", "15_your_own_data")
# cli/test_profile_timeline.py, serve/test_acceptance.py and the blocks of training-api.md do the same
NIGHTLY = ("04_timeline", "12_a_service", "14_training_by_calls")


def code_of(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def run_cell(source: str, names: dict) -> None:
    """Runs a cell and shows the value of its last expression, as Jupyter does."""
    statements = ast.parse(source).body
    last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    if value is not None:
        getattr(value, "_repr_html_", value.__repr__)()


def run_in_kernel(path: Path) -> None:
    NotebookClient(
        nbformat.read(path, as_version=4),
        kernel_name="python3",
        timeout=SECONDS_A_CELL,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()


@pytest.mark.filterwarnings("default")  # of Jupyter's own event loops, and of figures that are not shown
@pytest.mark.parametrize(
    "path", [nightly(path) if path.stem in NIGHTLY else path for path in NOTEBOOKS], ids=lambda path: path.stem
)
def test_notebook_runs(path, tiny_base, monkeypatch):
    """In a kernel where it sets jax up; otherwise in this process, which has imported and compiled much of it."""
    cells = code_of(path)
    assert cells
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # of processes that it starts
    if any("jax.config.update" in cell for cell in cells):
        run_in_kernel(path)
        return
    smaller = {BASE: f"Path({str(tiny_base)!r})"} if path.stem in ON_A_TINY_BASE else {}
    for shown, instead in (SHORTER.get(path.stem, {}) | smaller).items():
        assert sum(cell.count(shown) for cell in cells) == 1
        cells = [cell.replace(shown, instead) for cell in cells]
    monkeypatch.chdir(path.parent)
    plt.switch_backend("agg")
    names = {"__name__": __name__}  # a module that exists: dataclasses look theirs up
    for cell in cells:
        run_cell(cell, names)
    plt.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_imports_what_exists(path):
    for source in code_of(path):
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), path.name, "exec"), {})


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
