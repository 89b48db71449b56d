"""A resumed run equals an uninterrupted run bit for bit, in weights and metrics."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from small_jobs import write_job, write_rows

from lorafusion_jax.checkpoint.store import StateStore
from lorafusion_jax.config import load_config
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.session import snapshot as snapshot_module
from lorafusion_jax.session.session import Session
from lorafusion_jax.session.snapshot import Snapshots
from lorafusion_jax.training import Interrupted, RunFolder, resume, train
from lorafusion_jax.training.loop import PlanRun

ADAPTERS = {
    "law": {"batch": {"global_samples": 5}, "lora": {"rank": 4, "dropout": 0.2}},
    "med": {"batch": {"global_samples": 3}, "lora": {"rank": 4, "dropout": 0.1}, "epochs": 2},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_base):
    folder = tmp_path_factory.mktemp("job")
    write = partial(write_rows, folder, longest=10)
    entries = [
        {"name": name, "data": {"train": write(name, 10), "eval": write(f"{name}_eval", 3)}, **rest}
        for name, rest in ADAPTERS.items()
    ]
    batch = {"capacity_tokens": 64, "tile_tokens": 16}
    return load_config(write_job(folder, tiny_base, entries, batch=batch, save={"every_steps": 2, "keep": 2}))


@pytest.fixture(scope="module")
def whole(config, kept_programs, tmp_path_factory):
    """The folder of a run that nothing ended, and its result."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, train(config, folder)


def stop_after(slots: int):
    """A listener that asks the loop to stop, as a signal would."""

    def listen(event):
        if event.kind == "slot" and event.slot == slots:
            stop_after.loop._stop.set()

    return listen


@pytest.fixture(scope="module")
def reachable_loop():
    original = PlanRun.__init__

    def init(self, *arguments, **named):
        original(self, *arguments, **named)
        stop_after.loop = self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanRun, "__init__", init)
        yield


@pytest.fixture(scope="module")
def stopped(config, reachable_loop, kept_programs, tmp_path_factory):
    """The folder of a run that was stopped at its second slot."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Interrupted):
        train(config, folder, listeners=[stop_after(1)])
    return folder


@pytest.fixture
def stopped_copy(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "stopped", symlinks=True)


PATIENCE_S = 300


class SlowDisk:
    """Checkpoints whose writing ends only after a step that was taken meanwhile."""

    def __init__(self, monkeypatch):
        self.stepped, self.writing, self.in_time, self.stacked = threading.Event(), False, [], []
        save, take = StateStore.save, Snapshots.take

        def slowly(store, *arguments):
            self.writing = True
            if len(self.in_time) < 2:  # the last save of a run has nothing to wait for
                self.in_time.append(self.stepped.wait(PATIENCE_S))
            save(store, *arguments)
            self.writing = False

        def watched(*arguments):
            self.stacked.append(self.writing)
            self.stepped.clear()
            return take(*arguments)

        monkeypatch.setattr(StateStore, "save", slowly)
        monkeypatch.setattr(Snapshots, "take", watched)

    def __call__(self, event):
        if event.kind == "step":
            self.stepped.set()
        if event.kind == "saved" and len(self.in_time) == 2:
            raise RuntimeError("power cut")


def rows_of(folder):
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] != "slot"]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def weights_of(folder):
    newest = {name: RunFolder(folder).latest(name) for name in ADAPTERS}
    assert None not in newest.values()
    return {name: read_adapter(step)[1] for name, step in newest.items() if step}


def assert_same_run(actual_run, other):
    whole, parts = weights_of(actual_run), weights_of(other)
    for name in whole:
        for path in whole[name]:
            for a, b in zip(whole[name][path], parts[name][path], strict=True):
                np.testing.assert_array_equal(a, b)
    assert rows_of(actual_run) == rows_of(other)


def test_stopped_and_resumed_equals_uninterrupted(config, whole, stopped_copy, tmp_path):
    """Stops twice; then a run that crashes between two checkpoints: its later metrics are written again, not twice."""

    def crash(event):
        if event.kind == "step" and event.step == 4:
            raise RuntimeError("power cut")

    with pytest.raises(Interrupted):
        resume(stopped_copy, listeners=[stop_after(4)])
    assert resume(stopped_copy).exit_code == 0
    assert_same_run(whole[0], stopped_copy)

    with pytest.raises(RuntimeError, match="power cut"):
        train(config, tmp_path / "crashed", listeners=[crash])
    assert resume(tmp_path / "crashed").exit_code == 0
    assert_same_run(whole[0], tmp_path / "crashed")


@pytest.mark.parametrize("roomy", [True, False], ids=["copied on the devices", "copied to the host"])
def test_a_checkpoint_that_is_written_while_training_goes_on_holds_its_own_slot(
    config, whole, tmp_path, monkeypatch, roomy
):
    with monkeypatch.context() as patch:
        if not roomy:
            patch.setattr(snapshot_module, "never_used_bytes", lambda device: 0.0)
        disk = SlowDisk(patch)
        with pytest.raises(RuntimeError, match="power cut"):
            train(config, tmp_path / "crashed", listeners=[disk])
    assert disk.in_time == [True, True], "training has to go on while a checkpoint is written"
    assert disk.stacked == [False, False], "a second save waits for the first"
    assert resume(tmp_path / "crashed").exit_code == 0
    assert_same_run(whole[0], tmp_path / "crashed")


def test_a_finished_run_has_nothing_left_to_do(whole, monkeypatch):
    """The model is not even loaded; and a run that ended before it could say so says so now."""
    out, result = whole
    files = snapshot(out)
    monkeypatch.setattr(Session, "open", None)
    assert resume(out) == dataclasses.replace(result, had_finished=True)
    assert resume(out, ["mesh.stages=1"]).adapters == result.adapters
    assert snapshot(out) == files
    events = (out / "events.jsonl").read_text().splitlines(keepends=True)
    (out / "events.jsonl").write_text("".join(events[:-1]))
    assert resume(out) == result
    assert [row["kind"] for row in read_rows(out / "events.jsonl")][-2:] == ["saved", "finished"]


def test_changed_data_is_refused_and_nothing_is_lost(config, stopped_copy):
    before = sorted(path.name for path in (stopped_copy / "state").iterdir())
    write_rows(Path(config.directory), "law", 10, seed=1, longest=10)
    try:
        with pytest.raises(CheckpointError, match=r"run\.data-changed") as caught:
            resume(stopped_copy)
    finally:
        write_rows(Path(config.directory), "law", 10, longest=10)
    assert "law" in str(caught.value)
    assert sorted(path.name for path in (stopped_copy / "state").iterdir()) == before


def test_another_plan_is_refused(stopped_copy):
    record = json.loads((stopped_copy / "run.json").read_text())
    (stopped_copy / "run.json").write_text(json.dumps(record | {"plan": "another"}))
    with pytest.raises(CheckpointError, match=r"run\.other-plan"):
        resume(stopped_copy)
