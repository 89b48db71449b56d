"""A run goes on with what it began with, or says what is another."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import small_jobs
import yaml
from more_cases import mostly_nightly
from safetensors.numpy import load_file, save_file

from lorafusion_jax.checkpoint import base_files
from lorafusion_jax.checkpoint.base_files import base_digests, check_base
from lorafusion_jax.cli.main import run as lorafusion
from lorafusion_jax.config import load_config
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.training import RunFolder, resume


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run with its data and base, of which the last checkpoints are gone."""

    home: Path
    run: Path

    def edit_config(self, **changes) -> None:
        file = self.run / "config.yaml"
        values = yaml.safe_load(file.read_text())
        for key, value in changes.items():
            parent_value = values
            *parents, last = key.split("__")
            for parent in parents:
                parent_value = parent_value[int(parent) if isinstance(parent_value, list) else parent]
            parent_value[last] = value
        file.write_text(yaml.safe_dump(values))


@pytest.fixture
def unfinished(whole_run, tmp_path) -> Unfinished:
    home = tmp_path / "moved [1] a*b? ü 名 %s $HOME"  # names of folders are names, not patterns
    shutil.copytree(whole_run.home, home, symlinks=True)
    run = home / "run"
    for slot in sorted(int(folder.name) for folder in (run / "state").iterdir())[1:]:
        shutil.rmtree(run / "state" / str(slot))
    copy = Unfinished(home, run)
    copy.edit_config(directory=str(home))  # as one does who moves a job: what lies there is compared
    return copy


@pytest.fixture
def resumed(unfinished, capsys):
    """resumed(*settings) → (exit code, errors, output) of resuming the run."""

    def resume_it(*settings):
        capsys.readouterr()
        code = lorafusion(["resume", str(unfinished.run), *settings])
        shown = capsys.readouterr()
        return code, shown.err, shown.out

    return resume_it


def test_a_moved_run_goes_on(unfinished, resumed, whole_run):
    code, err, _ = resumed()
    assert code == 0, err
    folder = RunFolder(unfinished.run)
    newest = max(folder.state.iterdir(), key=lambda path: int(path.name))
    assert AdapterState.read(newest / "adapters" / "law", folder.read_config().adapter("law")).step > 3
    exported = unfinished.home / "out[2]*"
    assert lorafusion(["export", str(unfinished.run), "law", "--to", str(exported)]) == 0
    assert load_file(exported / "adapter_model.safetensors")
    for name in ("law", "med"):
        file = Path("adapters") / name / "latest" / "adapter_model.safetensors"
        assert (unfinished.run / file).read_bytes() == (whole_run.run / file).read_bytes()
    assert lorafusion(["verify", str(unfinished.run)]) == 0


def test_an_exchanged_base_is_refused(unfinished, resumed):
    file = unfinished.home / "base" / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] * np.float32(1.001)
    save_file(tensors, file, metadata={"format": "pt"})
    code, err, _ = resumed()
    assert code == 2
    assert "error[run.base-changed]" in err
    assert "model.safetensors has other content" in err


def test_edited_settings_are_refused_with_the_difference(unfinished, resumed):
    before = yaml.safe_load((unfinished.run / "config.yaml").read_text())["adapters"][0]["optim"]["lr"]
    unfinished.edit_config(adapters__0__optim__lr=0.5)
    code, err, _ = resumed()
    assert code == 2
    assert "error[run.config-changed]" in err
    assert f"adapters.law.optim.lr was {before} and is 0.5" in err


def test_errors_of_settings_that_are_not_the_runs_say_so(unfinished, resumed):
    """A cut or a flip may leave settings that can be read, as of data in another folder."""
    unfinished.edit_config(base__model=str(unfinished.home / "nowhere"))
    code, err, _ = resumed()
    assert code == 2
    assert "error[model.missing]" in err
    assert "config.yaml is not as this run wrote it" in err
    assert "restore it" in err


def test_a_finished_run_whose_record_is_damaged_is_refused(copied):
    file = copied().run / "run.json"
    text = file.read_text()
    file.write_text(text.replace('"versions"', '"Versions"', 1))
    with pytest.raises(CheckpointError, match=r"run\.record"):
        resume(file.parent)
    file.write_text(text)
    assert resume(file.parent).exit_code == 0


def test_a_link_that_a_kill_cost_is_there_after_a_resume(unfinished, resumed):
    link = unfinished.run / "adapters" / "law" / "latest"
    link.unlink()
    code, err, _ = resumed()
    assert code == 0, err
    assert link.is_symlink()
    assert link.is_dir()


def test_settings_that_resume_may_change_are_noted(unfinished, resumed):
    code, err, _ = resumed("save.keep=7")
    assert code == 0, err
    assert RunFolder(unfinished.run).recorded_config().save.keep == 7
    assert lorafusion(["verify", str(unfinished.run)]) == 0


def test_other_held_out_data_are_refused(unfinished, resumed):
    small_jobs.write_rows(unfinished.home, "med_eval", 3, seed=1, longest=8)
    code, err, _ = resumed()
    assert code == 2
    assert "error[run.data-changed] the held-out data of med changed" in err


def test_a_record_without_digests_is_refused(unfinished, resumed):
    file = unfinished.run / "run.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in record.items() if key not in ("base_files", "eval")}))
    code, err, _ = resumed()
    assert code == 2
    assert "error[run.record]" in err
    assert "it lacks eval, base_files" in err


def test_other_versions_are_told(unfinished, resumed):
    folder = RunFolder(unfinished.run)
    record = folder.read_record()
    folder.write_record(record | {"versions": record["versions"] | {"jax": "0.1"}})
    code, err, out = resumed()
    assert code == 0, err
    assert "other versions: jax was 0.1 and is " in out


@pytest.mark.parametrize("command", ["train", "resume"])
def test_a_state_without_its_plan_is_refused(unfinished, command, capsys):
    (unfinished.run / "plan.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in unfinished.run.rglob("*")}
    words = {"train": [str(unfinished.home / "jobs.yaml"), "--out", str(unfinished.run)]}
    assert lorafusion([command, *words.get(command, [str(unfinished.run)])]) == 2
    err = capsys.readouterr().err
    assert "error[run.no-plan]" in err
    assert "restore plan.json" in err
    assert {path: path.stat().st_mtime_ns for path in unfinished.run.rglob("*")} == before


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        ("run.json", b"\xff\xfe{}", "run.record"),
        ("run.json", b"[]", "run.record"),
        ("run.json", b'{"moves": 5}', "run.record"),
        ("run.json", b'{"moves": [5]}', "run.record"),
        ("run.json", b'{"data": []}', "run.record"),
        ("run.json", b"[" * 100_000, "run.record"),
        ("config.yaml", b"\xff\xfe", "run.config"),
        ("config.yaml", b"base: 2024-13-45", "run.config"),
        ("plan.json", b"\xff\xfe", "run.plan"),
        ("plan.json", b"[]", "run.plan"),
    ],
)
def test_damaged_run_files_are_named(file, content, code, unfinished, resumed):
    (unfinished.run / file).write_bytes(content)
    exit_code, err, _ = resumed()
    assert exit_code == 2
    assert f"error[{code}]" in err
    assert str(unfinished.run / file) in err
    assert lorafusion(["verify", str(unfinished.run)]) == 2


BAD_LINES = (b"\xff\xfe\n", b"[1, 2]\n", b'{"kind": "step"}\n', b'{"kind": "slot", "sl\n', b"5\n")


@pytest.mark.parametrize(
    ("log", "line"),
    mostly_nightly(
        list(product(["metrics.jsonl", "events.jsonl"], BAD_LINES)),
        [*product(["metrics.jsonl"], BAD_LINES), ("events.jsonl", BAD_LINES[0])],
    ),
)
def test_a_bad_line_costs_itself_only(log, line, unfinished, resumed, whole_run, capsys):
    path = unfinished.run / log
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], line, *lines[2:]]))
    before = read_rows(path)
    assert len(before) == len(lines)
    assert lorafusion(["status", str(unfinished.run), "--json"]) == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)["adapters"].values()} == {"done"}
    assert resumed()[0] == 0
    assert path.read_bytes().splitlines(keepends=True)[2] == line
    wanted = [row for row in read_rows(whole_run.run / "metrics.jsonl") if row["kind"] == "step"]
    rows = [row for row in read_rows(unfinished.run / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["loss"] for row in rows] == [row["loss"] for row in wanted]
    assert lorafusion(["verify", str(unfinished.run)]) == 2
    assert f"{log}: damaged in line 3" in capsys.readouterr().err


def test_resume_removes_what_killed_processes_left(unfinished, resumed):
    adapters, state = unfinished.run / "adapters" / "law", unfinished.run / "state"
    for left in (adapters / ".step-000009.new", state / ".7.gone"):
        left.mkdir()
        (left / "half").write_text("written")
    kept = adapters / "step-000004"
    kept.rename(adapters / ".step-000004.old")  # killed while it was replaced
    (unfinished.run / ".plan.json.part").write_text("half")
    assert resumed()[0] == 0
    assert not [path for path in unfinished.run.rglob("*") if path.name.startswith(".")]
    assert kept.is_dir()


def test_export_follows_no_link(unfinished, tmp_path, capsys):
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    os.symlink(secret, unfinished.run / "adapters" / "law" / "step-000004" / "note.txt")
    assert lorafusion(["export", str(unfinished.run), "law", "--to", str(tmp_path / "to")]) == 2
    assert "error[export.link]" in capsys.readouterr().err
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("folder", ["adapters", "adapters/law", "adapters/law/step-000004"])
def test_export_follows_no_linked_folder(folder, unfinished, tmp_path, capsys):
    linked = unfinished.run / folder
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    assert lorafusion(["export", str(unfinished.run), "law", "--to", str(tmp_path / "to")]) == 2
    err = capsys.readouterr().err
    assert "error[export.link]" in err
    assert str(linked) in err
    assert not (tmp_path / "to").exists()


def test_a_foreign_step_folder_is_no_step(unfinished, tmp_path):
    (unfinished.run / "adapters" / "law" / "step-foo").mkdir()
    assert RunFolder(unfinished.run).latest("law").name == "step-000004"


def test_a_large_base_is_compared_by_headers_and_samples(unfinished, monkeypatch):
    """Any exchanged tensor is noticed; a single bit by `--verify-base`, which reads everything."""
    base = unfinished.home / "base"
    monkeypatch.setattr(base_files, "WHOLE_BYTES", 1000)
    before = base_digests(base, every_byte=True)
    assert before.keys() == {"whole", "sampled"}
    assert base_digests(base) == {"sampled": before["sampled"]}
    tensors = load_file(base / "model.safetensors")
    for name in tensors:
        changed = tensors | {name: tensors[name] + np.float32(1)}
        save_file(changed, base / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"run\.base-changed"):
            check_base(before, base_digests(base), base)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    check_base(before, base_digests(base, every_byte=True), base)
    tensors = {name: tensor.copy() for name, tensor in tensors.items()}
    largest = max(tensors, key=lambda name: tensors[name].nbytes)
    tensors[largest].reshape(-1).view(np.uint8)[::4][7] ^= 1
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"run\.base-changed"):
        check_base(before, base_digests(base, every_byte=True), base)


def test_resume_reads_every_byte_of_a_large_base_if_asked_to(unfinished, monkeypatch, capsys):
    """As if no sample had met the bit that flipped."""
    base, record = unfinished.home / "base", unfinished.run / "run.json"
    monkeypatch.setattr(base_files, "WHOLE_BYTES", 1000)
    before = base_digests(base, every_byte=True)
    weights = bytearray((base / "model.safetensors").read_bytes())
    weights[-7] ^= 1
    (base / "model.safetensors").write_bytes(weights)
    known = {"whole": before["whole"], "sampled": base_digests(base)["sampled"]}
    record.write_text(json.dumps(json.loads(record.read_text()) | {"base_files": known}))
    check_base(known, base_digests(base), base)
    assert lorafusion(["resume", str(unfinished.run), "--verify-base"]) == 2
    assert "error[run.base-changed]" in capsys.readouterr().err


def test_an_adapter_begins_again_with_what_it_began_with(unfinished, whole_run, tmp_path, capsys):
    """A run that was killed before its first checkpoint; later ones do not need the folder any more."""
    start = tmp_path / "start"
    shutil.copytree(whole_run.run / "adapters" / "law" / "latest", start)
    job = json.loads((unfinished.home / "jobs.yaml").read_text())
    job["adapters"][0]["lora"] = {"init_from": str(start)}
    (unfinished.home / "jobs.yaml").write_text(json.dumps(job))
    run = tmp_path / "warm"
    assert lorafusion(["train", str(unfinished.home / "jobs.yaml"), "--out", str(run)]) == 0
    shutil.rmtree(start)
    shutil.rmtree(run / "state" / max((run / "state").iterdir(), key=lambda folder: int(folder.name)).name)
    assert lorafusion(["resume", str(run)]) == 0
    shutil.rmtree(run / "state")
    shutil.copytree(whole_run.run / "adapters" / "law" / "step-000002", start)
    capsys.readouterr()
    assert lorafusion(["resume", str(run)]) == 2
    assert "error[run.init-changed]" in capsys.readouterr().err


def test_a_hub_base_is_pinned_to_its_commit(unfinished, tmp_path, monkeypatch):
    asked, commit = [], "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "snapshots" / commit
    shutil.copytree(unfinished.home / "base", snapshot)

    def download(name, *, revision=None, **more):
        asked.append((name, revision))
        return str(snapshot)

    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    from lorafusion_jax.checkpoint.base_model import base_directory, pin_base

    job = json.loads((unfinished.home / "jobs.yaml").read_text())
    (unfinished.home / "jobs.yaml").write_text(json.dumps(job | {"base": {"model": "org/tiny"}}))
    pinned = pin_base(load_config(unfinished.home / "jobs.yaml"))
    assert pinned.base.revision == commit
    base_directory(pinned)
    assert asked == [("org/tiny", None), ("org/tiny", commit)]


def test_status_of_a_long_run_is_quick(tmp_path, monkeypatch):
    """Of 64 adapters and 2000 steps it parses the last rows only: 0.2 s of a quiet core."""
    from lorafusion_jax.log_file import encode_row
    from lorafusion_jax.report import summary as module

    parsed, parse_row = [], module.parse_row
    monkeypatch.setattr(module, "parse_row", lambda line: parsed.append(line) or parse_row(line))

    row = {"kind": "step", "grad_norm": 0.123456789, "lr": 1e-4, "loss_tokens": 1234, "time": 1.5}
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        for step in range(1, 2001):
            for number in range(64):
                file.write(encode_row(row | {"slot": step, "adapter": f"a{number}", "step": step, "loss": 1 / step}))
    summary = module.read_summary(tmp_path)
    assert len(parsed) == 64 * module.SPARE
    assert len(summary.adapters) == 64
    assert {row["step"] for row in summary.adapters.values()} == {2000}
