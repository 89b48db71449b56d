"""The commands as Python calls: the same results, screens and errors as the command line's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_jobs

import lorafusion_jax as lf
from lorafusion_jax.api.shown import Curve, draw_curves, recording_console
from lorafusion_jax.errors import ConfigError, DataError
from lorafusion_jax.report.events import RunEvent, SlotDone
from lorafusion_jax.report.screen import Screen


@pytest.fixture(scope="module")
def values(tmp_path_factory, tiny_base, kept_programs) -> dict:
    """A job as a dictionary, with paths as `pathlib` has them."""
    folder = tmp_path_factory.mktemp("job")
    rows = {name: folder / small_jobs.write_rows(folder, name, 8) for name in ("law", "med")}
    adapters = [
        {"name": name, "data": {"train": path, "eval": path}, "lora": {"rank": np.int64(4)}}
        for name, path in rows.items()
    ]
    return {
        "base": {"model": tiny_base, "dtype": "float32"},
        "data": {"max_length": 64},
        "batch": {"capacity_tokens": 64, "tile_tokens": 16, "global_samples": 4},
        "train": {"log_every_s": 0, "plan_seconds": 0.1, "block_layers": 1},
        "lora": {"targets": ["q_proj", "down_proj"]},
        "adapters": adapters,
    }


@pytest.fixture(scope="module")
def run(values, tmp_path_factory) -> tuple[lf.Run, list[RunEvent]]:
    events: list[RunEvent] = []
    return lf.train(values, tmp_path_factory.mktemp("runs") / "exp1", progress=events.append), events


def test_a_job_is_read_from_a_dictionary_as_from_a_file(values, tmp_path):
    path = small_jobs.write_job(tmp_path, values["base"]["model"], [])
    text = str({"adapters": values["adapters"]})
    assert "PosixPath" in text  # what YAML itself would refuse
    job = lf.load_job(values, ["adapters.law.optim.lr=5e-4"])
    assert job.config.adapter("law").optim.lr == 5e-4
    assert [adapter.lora.rank for adapter in job.config.adapters] == [4, 4]
    assert str(job).splitlines()[2].split()[:2] == ["adapter", "data"]
    with pytest.raises(ConfigError, match=r"config.no-adapters"):
        lf.load_job(path)


def test_errors_are_those_of_the_command_line(values, tmp_path):
    with pytest.raises(lf.LoraFusionError) as caught:
        lf.load_job(values | {"adapters": [{"name": "law", "lora": {"rnk": 3}}]})
    assert {error.code for error in caught.value.errors} == {"config.unknown-key", "config.required"}
    with pytest.raises(ConfigError, match=r"error\[config.type\] the job holds a value"):
        lf.load_job(values | {"seed": object()})
    gone = values | {"adapters": [{"name": "law", "data": {"train": str(tmp_path / "gone.jsonl")}}]}
    with pytest.raises(DataError, match=r"gone\.jsonl"):
        lf.plan(gone)


def test_one_override_needs_no_list(values, run):
    assert lf.load_job(values, "train.max_steps=7").config.train.max_steps == 7
    with pytest.raises(lf.LoraFusionError, match="nobody"):
        lf.resume(run[0], drop="nobody", progress=False)


def test_a_plan_shows_the_screen_of_the_command(values, tmp_path):
    plan = lf.plan(values, device="h200", compare=True)
    assert plan.numbers["adapters"]["med"]["rank"] == 4
    assert "np." not in repr(plan.numbers)  # numbers of Python, as in the JSON
    assert f"plan {plan.plan.digest[:12]}" in str(plan)
    assert "one after another" in plan._repr_html_()
    assert "<iframe" in plan.timeline()._repr_html_()
    file = plan.save(tmp_path / "plan.json")
    assert lf.train(values, tmp_path / "run", plan=file, progress=False).numbers["plan"] == plan.plan.digest
    with pytest.raises(lf.LoraFusionError, match=r"plan\.missing"):
        lf.train(values, tmp_path / "other", plan=str(tmp_path / "paln.json"), progress=False)


def test_a_run_shows_its_table_and_its_curves(run):
    finished, events = run
    assert any(isinstance(event, SlotDone) for event in events)
    assert "np." not in repr(events)
    assert {adapter["status"] for adapter in finished.adapters.values()} == {"done"}
    law = finished.losses["law"]
    assert law.steps == (1, 2)
    assert law.eval_steps[0] == 0
    assert law.loss[-1] == finished.adapters["law"]["loss"]
    page = finished._repr_html_()
    assert page.count("<polyline") == 2
    assert page.count("<circle") == 2 * len(law.eval_steps)
    assert re.search(r"law\s+done\s+2/2", str(finished))
    assert (finished.adapter("med") / "adapter_model.safetensors").is_file()
    with pytest.raises(ConfigError, match="no trained adapter 'lae'"):
        finished.adapter("lae")
    assert "<iframe" in finished.timeline()._repr_html_()


def test_a_finished_run_is_resumed_to_itself_and_is_never_overwritten(run, values):
    finished, _ = run
    assert lf.resume(finished, progress=False).losses == finished.losses
    assert lf.open_run(str(finished.folder)).losses == finished.losses
    with pytest.raises(lf.LoraFusionError, match=r"run\.exists"):
        lf.train(values, finished.folder, progress=False)
    with pytest.raises(lf.LoraFusionError, match=r"run\.missing"):
        lf.open_run(finished.folder.parent / "other")


def test_a_screen_redraws_in_a_view_of_somebody_elses(run):
    """A notebook's view: lines of note are printed once, the block is drawn when asked."""
    drawn: list[str] = []

    class View:
        def __init__(self, block):
            self.block = block

        def start(self):
            pass

        def refresh(self):
            self.draw()

        def stop(self):
            self.draw()

        def draw(self):
            console = recording_console()
            console.print(self.block())
            drawn.append(console.export_text())

    console = recording_console()
    with Screen("exp1", console, live=View) as screen:
        for event in run[1]:
            screen(event)
    assert "law" in drawn[-1]
    assert "100 %" in drawn[-1]
    assert "microbatches of" in console.export_text()


def test_curves_leave_out_what_is_not_finite():
    drawing = draw_curves({"a<b": Curve(steps=(1, 2, 3), loss=(2.0, float("nan"), 1.0))})
    (points,) = re.findall(r'points="([^"]+)"', drawing)
    assert len(points.split()) == 2
    assert "a&lt;b" in drawing
    assert draw_curves({"law": Curve()}) == ""


def test_importing_the_package_imports_nothing_of_weight():
    code = "import sys, lorafusion_jax; print(sorted({'jax', 'flax', 'pydantic', 'rich', 'numpy'} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[2]
    finished = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert finished.stdout.split() == ["[]"]
    assert set(lf.__all__) <= set(dir(lf))
