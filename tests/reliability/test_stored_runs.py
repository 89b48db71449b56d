"""Run folders that earlier versions wrote go on; records of other versions are named as such, and never as damage.

`stored_runs/` has a run of each format of checkpoints, of the job of `whole_run`, cut after its second checkpoint. A
new format adds one: kill `lorafusion train` after a checkpoint, and pack the folder without `adapters/`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lorafusion_jax.checkpoint import run_record
from lorafusion_jax.checkpoint.base_files import base_digests
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.saved_states import POSITION
from lorafusion_jax.cli.main import run as lorafusion
from lorafusion_jax.digests import write_digests
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.session.adapter_state import FORM as STATE_FORM
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.training.changes import Change
from lorafusion_jax.training.state import FORM, READ, AdapterProgress, Progress

STORED = Path(__file__).parent / "stored_runs"
WRITTEN_IN = "/tmp/oldjob2"  # the folder of the job


def unpack(name: str, whole_run, tmp_path) -> Path:
    """Returns a run folder as if it had been written in a copy of the job's folder."""
    home = tmp_path / "home"
    shutil.copytree(whole_run.home, home, ignore=shutil.ignore_patterns("run"))
    with tarfile.open(STORED / f"{name}.tar.xz") as tar:
        tar.extractall(home, filter="data")
    folder = home / name
    config = (folder / "config.yaml").read_text().replace(WRITTEN_IN, str(home))
    (folder / "config.yaml").write_text(config)
    record = json.loads((folder / "run.json").read_text().replace(WRITTEN_IN, str(home)))
    del record[run_record.SEAL]
    record["base_files"]["whole"] |= base_digests(home / "base", every_byte=True)["whole"]
    record = run_record.with_file_digest(record, "config.yaml", config)
    (folder / "run.json").write_text(run_record.to_text(record))
    return folder


def test_there_is_a_stored_run_of_each_format():
    assert {int(path.name.split("-")[1].removesuffix(".tar.xz")) for path in STORED.iterdir()} == set(READ)


@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".tar.xz") for path in STORED.iterdir()))
def test_a_stored_run_is_shown_and_goes_on(name, whole_run, tmp_path, capsys):
    folder = unpack(name, whole_run, tmp_path)
    for command in ("status", "report", "verify"):
        assert lorafusion([command, str(folder)]) == 0
    assert lorafusion(["resume", str(folder)]) == 0
    assert "resumed at microbatch 5" in capsys.readouterr().out
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [(row["adapter"], row["step"]) for row in rows if row["kind"] == "step"]
    assert sorted(steps) == [(adapter, step) for adapter in ("law", "med") for step in (1, 2, 3, 4)]
    for adapter in ("law", "med"):
        file = f"adapters/{adapter}/latest/adapter_model.safetensors"
        for path, tensor in load_file(whole_run.run / file).items():
            np.testing.assert_allclose(load_file(folder / file)[path], tensor, atol=2e-3, err_msg=path)
    assert lorafusion(["status", str(folder)]) == 0


def test_a_checkpoint_holds_states_of_adapters(whole_run, tmp_path):
    """A job of a service goes on from one; its digests are those of the checkpoint."""
    run = RunFolder(unpack("format-5", whole_run, tmp_path))
    folder, law = run.state / "5" / "adapters" / "law", run.read_config().adapter("law")
    assert AdapterState.read(folder, law).step == 3
    (folder / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"state\.damaged"):
        AdapterState.read(folder, law)


def test_a_state_of_the_first_format_is_read(whole_run, tmp_path):
    """It has no sums: a job of a service whose home is older goes on."""
    run = RunFolder(unpack("format-5", whole_run, tmp_path))
    law = run.read_config().adapter("law")
    state = AdapterState.read(run.state / "5" / "adapters" / "law", law)
    folder = dataclasses.replace(state, sums={}, totals={}).write(tmp_path / "e1-s3")
    (folder / "state.json").write_text(json.dumps({"form": 1, "step": state.step, "data": state.data}))
    write_digests(folder)
    again = AdapterState.read(folder, law)
    assert (again.step, again.data, again.alive, again.sums) == (state.step, state.data, True, {})
    for name, leaf in state.weights.items():
        np.testing.assert_array_equal(again.weights[name], leaf)


# Whoever changes a record raises its number, adds a stored run of it, and reads or names those of before.
RECORDS = {  # record → its number, what it is made of, digest of the fields
    "checkpoint": (FORM, 6, (AdapterProgress, Progress), "048138ee8ef3"),
    "change of run.json": (1, 1, (Change,), "4f5456c67afd"),
    "state of a job": (STATE_FORM, 2, (AdapterState,), "a847c6865344"),
}


@pytest.mark.parametrize("record", RECORDS)
def test_fields_of_a_record_change_with_its_number(record):
    number, of_digest, kinds, digest = RECORDS[record]
    fields = [[field.name, str(field.type)] for kind in kinds for field in dataclasses.fields(kind)]
    assert (number, hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:12]) == (of_digest, digest)


def test_a_checkpoint_with_unknown_fields_is_of_another_version(copied, capsys):
    """Its digests are good, so no fix says to remove it, and resuming changes nothing."""
    spoilt = copied()
    spoilt.cut_to(2)
    position = spoilt.newest() / POSITION
    position.write_text(json.dumps(json.loads(position.read_text()) | {"weather": "fine"}))
    write_digests(spoilt.newest())
    before = {path: path.read_bytes() for path in (spoilt.run / "state").rglob("*") if path.is_file()}
    assert lorafusion(["resume", str(spoilt.run)]) == 2
    told = capsys.readouterr().err
    assert "run.later-version" in told
    assert "weather" in told
    assert "remove" not in told
    assert {path: path.read_bytes() for path in (spoilt.run / "state").rglob("*") if path.is_file()} == before


def test_a_change_with_unknown_fields_is_of_another_version(copied, capsys):
    spoilt = copied()
    spoilt.cut_to(2)
    file = spoilt.run / "run.json"
    record = run_record.read(file)
    row = {"slot": 3, "adapter": "law", "action": "weight", "weight": 2.0, "weather": "fine"}
    file.write_text(run_record.to_text(record | {"moves": [{"plan": record["plan"], "changes": [row]}]}))
    assert lorafusion(["resume", str(spoilt.run)]) == 2
    told = capsys.readouterr().err
    assert "run.later-version" in told
    assert "Traceback" not in told


def test_a_state_of_another_version_is_no_damage(tmp_path):
    folder = AdapterState(step=3, data="d", weights={}, optimizer={}).write(tmp_path / "e1-s3")
    note = folder / "state.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"form": STATE_FORM + 1}))
    write_digests(folder)
    with pytest.raises(CheckpointError, match=r"state\.version"):
        AdapterState.read(folder, None)  # type: ignore[arg-type]
