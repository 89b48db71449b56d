"""An adapter that is done is written while the others train; nothing calls it done before its folder is complete."""

from __future__ import annotations

import errno
import threading

import pytest

from lorafusion_jax.checkpoint.store import StateStore, read_position
from lorafusion_jax.config import load_config
from lorafusion_jax.errors import RunError
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import RunFolder, train
from lorafusion_jax.training.exports import AdapterWriter

PATIENCE_S = 300


@pytest.fixture
def config(write_job, write_rows):
    """law is done long before med."""
    rows = {"law": 2, "med": 24}
    adapters = [
        {
            "name": name,
            "data": {"train": write_rows(name, count, longest=8)},
            "batch": {"global_samples": 2},
            "lora": {"rank": 4, "dropout": 0.1},
        }
        for name, count in rows.items()
    ]
    batch = {"capacity_tokens": 64, "tile_tokens": 16}  # programs as those of test_compiles.py
    return load_config(write_job(adapters, batch=batch))


def around_export(monkeypatch, before) -> None:
    original = AdapterWriter.write

    def write(self, name, *args, **options):
        before(name)
        return original(self, name, *args, **options)

    monkeypatch.setattr(AdapterWriter, "write", write)


def test_others_train_while_an_adapter_is_written(config, tmp_path, monkeypatch):
    others, in_time, events = threading.Event(), [], []

    def listen(event):
        events.append((event.kind, getattr(event, "adapter", None)))
        if event.kind == "exported":
            assert (RunFolder(tmp_path / "run").latest(event.adapter) / "adapter_model.safetensors").is_file()
        if event.kind == "step" and event.adapter == "med" and event.step == 6:
            others.set()

    def slowly(name):
        if name == "law":
            in_time.append(others.wait(PATIENCE_S))

    around_export(monkeypatch, slowly)
    result = train(config, tmp_path / "run", listeners=[listen])
    assert in_time == [True]
    assert {adapter.status for adapter in result.adapters.values()} == {"done"}
    for name in ("law", "med"):
        kinds = [kind for kind, adapter in events if adapter == name]
        assert kinds[-2:] == ["exported", "adapter-done"]
    assert [kind for kind, _ in events[-2:]] == ["saved", "finished"]


def test_a_checkpoint_waits_for_the_folders_of_what_it_calls_done(config, tmp_path, monkeypatch):
    original, lacking = StateStore.save, []

    def save(self, slot, arrays, position):
        done = [name for name, row in position["adapters"].items() if row["status"] == "done"]
        lacking.extend(name for name in done if RunFolder(tmp_path / "run").latest(name) is None)
        return original(self, slot, arrays, position)

    monkeypatch.setattr(StateStore, "save", save)
    around_export(monkeypatch, lambda name: threading.Event().wait(0.2))
    train(config.model_copy(update={"save": config.save.model_copy(update={"every_steps": 3})}), tmp_path / "run")
    assert not lacking


def test_a_folder_that_cannot_be_written_ends_the_run(config, tmp_path, monkeypatch):
    def full(name):
        raise RunError("save.no-space", f"there is no space for {name}.", why=str(errno.ENOSPC))

    around_export(monkeypatch, full)
    with pytest.raises(RunError, match=r"save\.no-space") as caught:
        train(config, tmp_path / "run")
    assert caught.value.what == "there is no space for law."
    stopped = read_rows(tmp_path / "run" / "events.jsonl")[-1]
    assert (stopped["kind"], stopped["code"]) == ("stopped", "save.no-space")
    assert read_position(tmp_path / "run" / "state") is None
