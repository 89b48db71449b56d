"""Checkpoints: those that cannot be written, those that stay, and damage."""

from __future__ import annotations

import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chex
import numpy as np
import orbax.checkpoint as ocp
import pytest

from lorafusion_jax.checkpoint.saved_states import POSITION, checkpoint_damage, find_checkpoint, slots_of
from lorafusion_jax.checkpoint.store import ARRAYS, StateStore
from lorafusion_jax.digests import find_damage, write_digests
from lorafusion_jax.errors import RunError
from lorafusion_jax.files import replace_text, write_output
from lorafusion_jax.new_folder import new_folder
from lorafusion_jax.session import AdapterState
from lorafusion_jax.tensor_file import MANIFEST

THREADS_END_S = 0.5  # those of the writer, after its error


def state_of(arrays: dict[str, np.ndarray]) -> dict[str, AdapterState]:
    return {"law": AdapterState(step=0, data="", weights=arrays, optimizer={})}


@pytest.mark.parametrize("slots", [(), (3,)])
def test_a_disk_that_takes_no_checkpoint_is_told_once(slots, tmp_path, request, capfd):
    store = StateStore(tmp_path / "run" / "state")
    (tmp_path / "run").mkdir()
    for slot in slots:
        store.save(slot, state_of({"a": np.zeros(4)}), {"slot": slot})
    request.getfixturevalue("no_large_files")
    arrays = {f"a{number}": np.random.default_rng(number).random(100_000) for number in range(8)}
    with pytest.raises(RunError, match=r"save\.failed") as caught:
        store.save(9, state_of(arrays), {"slot": 9})
    time.sleep(THREADS_END_S)
    assert "File too large" in caught.value.why
    does = "continues: the checkpoint of slot 3 is intact" if slots else "starts again: no checkpoint was written yet"
    assert caught.value.fix.endswith(f"lorafusion resume {tmp_path / 'run'} {does}")
    assert "Traceback" not in capfd.readouterr().err


def test_pruning_keeps_the_newest_good_checkpoints(tmp_path):
    """A run that went on from slot 4, because that of slot 9 is damaged, replaces it."""
    state = tmp_path / "state"
    first = StateStore(state)
    for slot in (2, 4, 9):
        first.save(slot, state_of({"a": np.full(4, slot)}), {"slot": slot})
    again = StateStore(state, keep=2, slot=4)
    again.save(6, state_of({"a": np.zeros(4)}), {"slot": 6})
    assert slots_of(state) == [4, 6]


def test_a_position_of_another_slot_is_damage(tmp_path):
    for slot, named in ((3, 3), (5, 4)):
        position = tmp_path / str(slot) / POSITION
        position.parent.mkdir(parents=True)
        position.write_text(json.dumps({"slot": named, "adapters": {}}))
        write_digests(tmp_path / str(slot))
    (damage,) = checkpoint_damage(tmp_path / "5")
    assert "does not name slot 5" in damage.why
    checkpoint = find_checkpoint(tmp_path)
    assert (checkpoint.slot, checkpoint.damaged) == (3, (damage,))


def test_a_wanted_file_that_has_no_digest_is_damage(tmp_path):
    (tmp_path / "weights").write_text("good")
    write_digests(tmp_path)
    (tmp_path / "late").write_text("exchanged")
    assert find_damage(tmp_path, ["weights"]) == []
    (damage,) = find_damage(tmp_path, ["weights", "late"])
    assert (damage.file.name, damage.why) == ("late", "SHA256SUMS does not list it")


def test_what_orbax_left_unmerged_is_read(tmp_path):
    """A checkpoint of before, in a folder whose name was taken for a pattern."""
    arrays = {"lora": {"law": {"one": np.arange(3.0)}}, "optimizers": {"law": {"0/mu/one": np.ones(3)}}}
    state = tmp_path / "law[0-9]" / "state"
    (state / "4").mkdir(parents=True)
    StateStore(state)._arrays().save(state / "4" / ARRAYS, args=ocp.args.StandardSave(arrays))
    assert not (state / "4" / ARRAYS / MANIFEST).exists()
    trees = []
    StateStore(state, slot=4).restore(lambda name, folder: None, lambda tree: trees.append(tree) or {})
    chex.assert_trees_all_equal(trees, [arrays])


def test_every_folder_that_is_made_is_on_the_disk(tmp_path, monkeypatch):
    """Its entry is in the folder above: that is synchronised, also above a folder that is renamed into its place."""
    synced: list[Path] = []
    monkeypatch.setattr("lorafusion_jax.files.sync", synced.append)
    monkeypatch.setattr("lorafusion_jax.new_folder.sync", synced.append)
    with new_folder(tmp_path / "jobs" / "job-1" / "adapter" / "step-1") as folder:
        (folder / "file").write_text("x")
    assert {tmp_path, tmp_path / "jobs", tmp_path / "jobs" / "job-1", tmp_path / "jobs" / "job-1" / "adapter"} <= {
        *synced
    }
    synced.clear()
    replace_text(tmp_path / "note.txt", "x")
    assert synced == [tmp_path]


def test_what_a_user_names_is_written_to_if_it_is_no_file(tmp_path):
    """A file took the place of a pipe or a device: for root, of /dev/null."""
    pipe, file = tmp_path / "pipe", tmp_path / "note.txt"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        text = reader.submit(pipe.read_text)
        write_output(pipe, "through")
        assert text.result(5) == "through"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write_output(file, "old")
    write_output(file, "new")
    assert (file.read_text(), sorted(path.name for path in tmp_path.iterdir())) == ("new", ["note.txt", "pipe"])
    with file.open() as handle:  # as a shell redirects the standard output
        write_output(Path(f"/dev/fd/{handle.fileno()}"), "through")
    assert file.read_text() == "through"
    (tmp_path / "link").symlink_to(file)
    write_output(tmp_path / "link", "newest")
    assert (file.read_text(), (tmp_path / "link").is_symlink()) == ("newest", True)
