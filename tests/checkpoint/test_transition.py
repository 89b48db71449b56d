"""Plan and settings of a run change in one step: a kill at any call of it leaves the old ones or the new ones."""

from __future__ import annotations

import pytest
from campaigns.disk import Disk, Killed

from lorafusion_jax.checkpoint.folder import change_files, complete_change, current_file

OLD = {"plan.json": "old plan", "config.yaml": "old settings"}
NEW = {"plan.json": "new plan", "config.yaml": "new settings"}


@pytest.fixture(scope="module")
def disk():
    return Disk()


@pytest.fixture
def run(tmp_path):
    """A folder in which the digest of a file is its text without spaces."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name, text in (OLD | {"run.json": "old"}).items():
        (folder / name).write_text(text)
    return folder


def digests(texts):
    return {name: text.replace(" ", "") for name, text in texts.items()}


def change(run):
    commit = run / ".run.json.part"

    def write():
        commit.write_text("new")
        commit.replace(run / "run.json")

    change_files(run, NEW, digests(NEW), write)


def named(run):
    """What run.json names, as a reader without the lock finds it."""
    named = digests(NEW if (run / "run.json").read_text() == "new" else OLD)
    return named, {name: current_file(run, name, digest).read_text() for name, digest in named.items()}


def test_a_change_is_there_or_whole_at_every_call(run, disk):
    with disk.watch(run):
        change(run)
    calls, seen = disk.calls, set()
    assert named(run)[1] == NEW
    for call in range(1, calls + 1):
        for name, text in (OLD | {"run.json": "old"}).items():
            (run / name).write_text(text)
        with pytest.raises(Killed), disk.watch(run, kill_at=call):
            change(run)
        names, texts = named(run)
        assert texts in (OLD, NEW)
        seen.add(texts["plan.json"])
        complete_change(run, names)
        assert {name: (run / name).read_text() for name in texts} == texts
        assert not [left for left in run.glob(".*") if left.suffix == ".next"]
    assert seen == {"old plan", "new plan"}
    assert calls == 8  # three files are opened and renamed, and two take their places


def test_new_files_are_on_the_disk_before_they_are_named(run, monkeypatch):
    """After a power cut run.json may name files, which then have to be there."""
    order = []
    monkeypatch.setattr("lorafusion_jax.checkpoint.folder.sync", lambda folder: order.append("synced"))
    change_files(run, NEW, digests(NEW), lambda: order.append("named"))
    assert order[:2] == ["synced", "named"]
