"""Nothing damaged is read back as good: flipped bits and cut files are noticed, and named."""

from __future__ import annotations

import errno
import random
import shutil

import pytest
from campaigns.damage import attempts, harmless
from campaigns.disk import Disk
from more_cases import nightly

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.run_lock import run_lock
from lorafusion_jax.checkpoint.verify_folder import verify_folder
from lorafusion_jax.cli.main import run as lorafusion
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import resume

FLIPS, CUTS = 40, 10


def flip(file, seed):
    draw, content = random.Random(seed), bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def test_every_flip_and_cut_of_a_run_folder_is_named(copied):
    folder = copied().run
    assert not any(verdict.damage for verdict in verify_folder(folder))
    missed = [
        attempt for attempt in attempts(folder, FLIPS, CUTS) if not attempt.named and not harmless(attempt, folder)
    ]
    assert not missed


def test_every_flip_and_cut_of_an_exported_folder_is_named(whole_run, tmp_path):
    assert lorafusion(["export", str(whole_run.run), "law", "--to", str(tmp_path / "law")]) == 0
    assert lorafusion(["verify", str(tmp_path / "law")]) == 0
    missed = [attempt for attempt in attempts(tmp_path / "law", 20, 10) if not attempt.named]
    assert not missed


@pytest.mark.parametrize("seed", range(4))
def test_resume_takes_the_checkpoint_before_a_damaged_one(seed, copied, whole_run, capsys):
    spoilt = copied()
    files = sorted(file for file in spoilt.newest().rglob("*") if file.is_file() and file.stat().st_size)
    file = random.Random(seed).choice(files)
    flip(file, seed)
    assert lorafusion(["verify", str(spoilt.run)]) == 2
    assert file.name in capsys.readouterr().err
    assert lorafusion(["resume", str(spoilt.run)]) == 0
    assert f"damaged: {file}" in capsys.readouterr().out
    told = [row for row in read_rows(spoilt.run / "events.jsonl") if row["kind"] == "damaged"]
    assert len(told) == 1
    assert file.name in told[0]["text"]
    assert spoilt.weights() == whole_run.weights()
    assert lorafusion(["verify", str(spoilt.run)]) == 0


def test_resume_writes_a_damaged_adapter_of_a_finished_run_again(copied, whole_run, capsys):
    spoilt = copied()
    file = spoilt.adapter() / "adapter_model.safetensors"
    flip(file, 3)
    assert lorafusion(["resume", str(spoilt.run)]) == 0
    assert f"damaged: {file.resolve()}" in capsys.readouterr().out.replace("\n", "")
    assert spoilt.weights() == whole_run.weights()
    assert lorafusion(["verify", str(spoilt.run)]) == 0


def test_no_good_checkpoint_is_an_error_that_names_the_files(copied):
    spoilt = copied()
    for slot in spoilt.slots:
        (spoilt.run / "state" / str(slot) / "position" / "metadata").unlink()
    with pytest.raises(CheckpointError, match=r"run\.bad-state") as caught:
        resume(spoilt.run)
    assert "position" in caught.value.why


def test_a_damaged_adapter_is_not_read_and_not_exported(copied, tmp_path, capsys):
    spoilt = copied()
    flip(spoilt.adapter() / "adapter_model.safetensors", 3)
    with pytest.raises(CheckpointError, match=r"peft\.damaged"):
        read_adapter(spoilt.adapter())
    for more in ([], ["--merge"]):
        to = tmp_path / f"to{len(more)}"
        assert lorafusion(["export", str(spoilt.run), "law", "--to", str(to), *more]) == 2
        assert "adapter_model.safetensors" in capsys.readouterr().err
        assert not to.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_without_digests_is_damaged(copied, capsys):
    spoilt = copied()
    (spoilt.newest() / "SHA256SUMS").unlink()
    assert lorafusion(["verify", str(spoilt.run)]) == 2
    assert "SHA256SUMS: it is missing" in capsys.readouterr().err


def test_rows_missing_at_the_end_of_metrics_are_noticed(copied, capsys):
    spoilt = copied()
    file = spoilt.run / "metrics.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    assert lorafusion(["verify", str(spoilt.run)]) == 2
    assert "metrics.jsonl: rows are missing at its end" in capsys.readouterr().err


@pytest.mark.parametrize("checkpoints", [9, 1], ids=["finished", "unfinished"])
def test_links_to_exports_that_a_kill_cost_are_made_at_resume(copied, whole_run, checkpoints):
    """A kill between an export and its link left `latest` at an older step, and older steps for good."""
    spoilt = copied()
    spoilt.cut_to(checkpoints)
    home = spoilt.run / "adapters" / "law"
    newest = (home / "latest").readlink()
    for step in range(1 + RunFolder(spoilt.run).recorded_config().save.keep):
        shutil.copytree(home / newest, home / f"step-{step:06d}", dirs_exist_ok=True)
    (home / "latest").unlink()
    (home / "latest").symlink_to("step-000000")
    assert resume(spoilt.run).exit_code == 0
    assert (home / "latest").readlink() == newest
    assert not (home / "step-000000").exists()
    assert spoilt.weights() == whole_run.weights()


def test_an_adapter_that_a_kill_cost_is_exported_at_resume(copied, whole_run):
    spoilt = copied()
    spoilt.cut_to(1)
    shutil.rmtree(spoilt.run / "adapters")
    assert resume(spoilt.run).exit_code == 0
    assert spoilt.weights() == whole_run.weights()


ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("stride", [7, nightly(1)], ids=["some calls", "every call"])
def test_an_error_at_any_call_of_an_export(stride, lasting, whole_run, tmp_path, capsys):
    """It is told; the folder is there whole or not at all, and the same command then completes it."""
    disk, out, other = Disk(), tmp_path / "exports" / "law", tmp_path / "expected"
    export = ["export", str(whole_run.run), "law", "--to"]
    assert lorafusion([*export, str(other)]) == 0
    expected = contents(other)
    out.parent.mkdir()
    with disk.watch(out.parent):
        assert lorafusion([*export, str(out)]) == 0
    calls = disk.calls
    assert calls > 5
    for call in range(1 + 3 * lasting, calls + 1, stride):
        shutil.rmtree(out)
        capsys.readouterr()
        with disk.watch(out.parent, fail_at=call, error=ERRORS[call % len(ERRORS)], lasting=lasting):
            code = lorafusion([*export, str(out)])
        assert code == 0 or "error[" in capsys.readouterr().err, f"call {call} of {calls}"
        left = contents(out)
        assert left in ({}, expected), f"call {call} of {calls}"
        if not left:
            assert lorafusion([*export, str(out)]) == 0
        assert contents(out) == expected
        assert [path.name for path in out.parent.iterdir()] == ["law"], f"call {call} of {calls}"


def test_what_a_run_is_writing_is_not_called_left_by_a_killed_process(copied, capsys):
    spoilt = copied()
    (spoilt.run / "state" / ".9.new").mkdir()
    with run_lock(spoilt.run):
        assert lorafusion(["verify", str(spoilt.run)]) == 0
        assert "the run is writing it" in " ".join(capsys.readouterr().out.split())
    assert lorafusion(["verify", str(spoilt.run)]) == 0
    assert "left by a killed process" in " ".join(capsys.readouterr().out.split())
