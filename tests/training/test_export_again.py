"""Folders that a crashed sitting left of steps that are taken again are written again; earlier ones stay."""

from __future__ import annotations

import shutil

import pytest

from lorafusion_jax.checkpoint.store import read_position
from lorafusion_jax.config import load_config
from lorafusion_jax.errors import RunError
from lorafusion_jax.new_folder import new_folder
from lorafusion_jax.training import resume, train

MARK = "left by the sitting before"


def test_a_resumed_run_writes_the_folders_of_its_steps_again(write_job, write_rows, tmp_path):
    adapter = {
        "name": "law",
        "data": {"train": write_rows("law", 12, longest=8)},
        "lora": {"rank": 4, "alpha": 8},
        "batch": {"global_samples": 3},
    }
    run = tmp_path / "run"
    assert train(load_config(write_job([adapter], save={"every_steps": 1, "keep": 10})), run).exit_code == 0
    folders = sorted((run / "adapters" / "law").glob("step-*"))
    assert [folder.name for folder in folders] == [f"step-{step:06d}" for step in (1, 2, 3, 4)]
    for folder in folders:
        (folder / "README.md").write_text(MARK)
    checkpoints = sorted((int(folder.name) for folder in (run / "state").iterdir()), reverse=True)
    for slot in checkpoints:
        position = read_position(run / "state")
        assert position is not None
        if position["adapters"]["law"]["step"] == 2:
            break
        shutil.rmtree(run / "state" / str(slot))
    assert resume(run).exit_code == 0
    assert {folder.name for folder in (run / "adapters" / "law").iterdir()} == {"latest", *(f.name for f in folders)}
    marked = [(folder / "README.md").read_text() == MARK for folder in folders]
    assert marked[0]
    assert not any(marked[2:])


def test_a_folder_that_cannot_be_replaced_stays(tmp_path):
    target = tmp_path / "step-000001"
    with new_folder(target) as draft:
        (draft / "note.txt").write_text("old")
    with pytest.raises(RunError, match=r"save\.failed"), new_folder(target, replace=True) as draft:
        draft.rmdir()
    with pytest.raises(ValueError, match="a bug"), new_folder(target, replace=True):
        raise ValueError("a bug")
    assert (target / "note.txt").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
