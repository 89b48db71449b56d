"""Invalid input: error codes, messages with file and row, exit codes, and nothing lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from cli_helpers import make_rows, snapshot, weights, write_rows_to
from safetensors.numpy import load_file, save_file

from lorafusion_jax.checkpoint import store
from lorafusion_jax.checkpoint.begun_folder import START
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.generation.sources import find_source
from lorafusion_jax.session import AdapterState

FIVE_MISTAKES = """\
base: {{model: {base}, dtpye: float32}}
data: {{max_length: 48}}
batch: {{capacity_tokens: 100, tile_tokens: 16}}
optim: {{lr: fast}}
adapters:
  - {{name: law, data: {{train: law.jsonl}}, lora: {{rank: 0}}}}
  - {{name: med, data: {{}}}}
"""


@pytest.mark.parametrize("command", [("check",), ("plan",), ("train", "--out", "run"), ("data", "preview")])
def test_five_mistakes_in_one_config(lorafusion, job, command, monkeypatch):
    monkeypatch.chdir(job.folder)
    job.path.write_text(FIVE_MISTAKES.format(base=job.values["base"]["model"]))
    words = command[:2] if command[0] == "data" else command[:1]
    outcome = lorafusion(*words, job.path, *command[len(words) :])
    assert outcome.code == 2
    assert sorted(outcome.errors) == [
        "config.capacity",
        "config.required",
        "config.unknown-key",
        "config.value",
        "config.value",
    ]
    for line in (1, 3, 4, 6, 7):
        assert f"jobs.yaml, line {line}" in outcome.err
    assert "did you mean 'dtype'?" in outcome.err
    assert not (job.folder / "run").exists()


def test_empty_file(lorafusion, job):
    (job.folder / "law.jsonl").write_text("")
    outcome = lorafusion("check", job.path)
    assert (outcome.code, outcome.errors) == (2, ["data.empty-file"])
    assert "law.jsonl" in outcome.err


def test_broken_json_names_the_line(lorafusion, job):
    with (job.folder / "med.jsonl").open("a") as file:
        file.write('{"prompt": "cat", "completion": \n')
    outcome = lorafusion("check", job.path)
    assert (outcome.code, outcome.errors) == (2, ["data.bad-json"])
    assert "med.jsonl, line 13" in outcome.err


def test_row_without_answer_names_the_row(lorafusion, job):
    rows = make_rows(12, 0)
    del rows[7]["completion"]
    write_rows_to(job.folder / "law.jsonl", rows)
    outcome = lorafusion("plan", job.path)
    assert (outcome.code, outcome.errors) == (2, ["data.no-answer"])
    assert "law.jsonl, line 8" in outcome.err  # rows from 0, lines from 1


def test_row_that_is_too_long_names_row_and_length(lorafusion, job):
    rows = make_rows(12, 0)
    rows[4]["completion"] = " cat" * 60
    write_rows_to(job.folder / "law.jsonl", rows)
    outcome = lorafusion("plan", job.path, "data.on_long=error")
    assert (outcome.code, outcome.errors) == (2, ["data.too-long"])
    assert "law.jsonl, line 5" in outcome.err
    assert re.search(r"line 5 has \d+ tokens", outcome.err)
    assert "max_length=48" in outcome.err


def test_rows_without_learned_tokens_are_an_error(lorafusion, job):
    rows = make_rows(12, 0)
    rows[2]["prompt"] = "cat " * 60
    write_rows_to(job.folder / "law.jsonl", rows)
    outcome = lorafusion("plan", job.path)
    assert (outcome.code, outcome.errors) == (2, ["data.empty-loss"])
    assert "law.jsonl, line 3" in outcome.err


def test_data_errors_of_several_adapters_are_reported_together(lorafusion, job):
    (job.folder / "law.jsonl").write_text("")
    with (job.folder / "med.jsonl").open("a") as file:
        file.write("no json\n")
    outcome = lorafusion("train", job.path, "--out", job.folder / "run")
    assert outcome.code == 2
    assert sorted(outcome.errors) == ["data.bad-json", "data.empty-file"]
    assert not (job.folder / "run").exists()


def test_job_and_data_errors_are_reported_together(lorafusion, job):
    (job.folder / "law.jsonl").write_text("")
    job.adapter("med")["lora"] = {"targets": ["q_prj"]}
    job.values["adapters"].append({"name": "med", "data": {"train": "med.jsonl"}, "lora": {"rank": "four"}})
    for command in ("check", "plan"):
        outcome = lorafusion(command, job.write())
        assert outcome.code == 2
        assert sorted(outcome.errors) == [
            "config.duplicate-name",
            "config.value",
            "data.empty-file",
            "lora.unknown-target",
        ]
        assert "med: there is no projection 'q_prj'" in outcome.err


def test_a_wrong_target_names_the_line_where_it_stands(lorafusion, job):
    text = "base: {{model: {}}}\nlora: {{targets: [up]}}\nadapters:\n  - {{name: law, data: {{train: law.jsonl}}}}\n"
    text += "  - name: med\n    lora: {{targets: [q_prj]}}\n    data: {{train: law.jsonl}}\n"
    job.path.write_text(text.format(job.values["base"]["model"]))
    shared, own_error = lorafusion("check", job.path).err.split("error[")[1:]
    assert "there is no projection 'up'" in shared
    assert "jobs.yaml, line 2" in shared
    assert "med: there is no projection 'q_prj'" in own_error
    assert "jobs.yaml, line 6" in own_error


def test_all_bad_lines_of_a_file_are_reported_together(lorafusion, job):
    lines = (job.folder / "law.jsonl").read_text().splitlines()
    lines[1], lines[3], lines[5] = '{"prompt": ', "[1]", '{"prompt": "cat", "completion": ""}'
    (job.folder / "law.jsonl").write_text("\n".join(lines))
    outcome = lorafusion("check", job.path)
    assert (outcome.code, outcome.errors) == (2, ["data.bad-json", "data.bad-row", "data.no-answer"])
    for line in (2, 4, 6):
        assert f"law.jsonl, line {line}\n" in outcome.err


def test_unknown_target(lorafusion, job):
    job.adapter("med")["lora"] = {"targets": ["q_proj", "upp_proj"]}
    outcome = lorafusion("check", job.write())
    assert (outcome.code, outcome.errors) == (2, ["lora.unknown-target"])
    assert "upp_proj" in outcome.err
    assert "up_proj" in outcome.err.split("upp_proj", 1)[1]


@pytest.fixture
def own_base(job):
    """The base model, copied so that it can be damaged; its file of weights."""
    folder = job.folder / "base"
    shutil.copytree(job.values["base"]["model"], folder)
    job.values["base"]["model"] = "base"
    job.write()
    return next(folder.glob("*.safetensors"))


def test_missing_tensor_of_the_base(lorafusion, job, own_base):
    tensors = load_file(own_base)
    missing = "model.layers.1.mlp.up_proj.weight"
    del tensors[missing]
    save_file(tensors, own_base)
    outcome = lorafusion("train", job.path, "--out", job.folder / "run")
    assert outcome.code == 2
    assert all(code.startswith("model.") for code in outcome.errors)
    assert missing in outcome.err
    assert not (job.folder / "run").exists(), "after the repair, the same command must work"


def test_adapter_of_another_base(lorafusion, job, finished):
    folder = job.folder / "old"
    shutil.copytree(finished[1] / "adapters" / "med" / "latest", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/other-model"}))
    for name in ("SHA256SUMS", "run.json"):  # as a folder of another program: digests would tell which base it is
        (folder / name).unlink()
    job.adapter("med")["lora"] = {"init_from": "old"}
    outcome = lorafusion("train", job.write(), "--out", job.folder / "run")
    assert (outcome.code, outcome.errors) == (2, ["peft.other-base"])
    assert "org/other-model" in outcome.err
    assert "adapter_config.json" in outcome.err
    assert not (job.folder / "run").exists()


@pytest.mark.parametrize("command", [("check",), ("plan",), ("train", "--out", "run")])
def test_warm_start_errors_are_reported_together(lorafusion, job, finished, command):
    old = finished[1] / "adapters" / "med" / "latest"
    (job.folder / "empty").mkdir()
    job.adapter("med")["lora"] = {"init_from": str(old), "rank": 8}
    job.adapter("law")["lora"] = {"init_from": "empty"}
    job.values["adapters"].append({"name": "gone", "data": {"train": "law.jsonl"}, "lora": {"init_from": "nowhere"}})
    outcome = lorafusion(command[0], job.write(), *command[1:])
    assert outcome.code == 2
    assert sorted(outcome.errors) == ["peft.missing-file", "peft.missing-file", "peft.other-settings"]
    assert f"adapters.med.lora.init_from={old}" in outcome.err
    assert "the folder has rank 4" in outcome.err
    assert "adapters.law.lora.init_from=empty" in outcome.err
    assert "gone: there is no folder" in outcome.err
    assert outcome.err.count("  fix: ") == 3


@pytest.fixture
def nothing_read(monkeypatch):
    """Reading data fails: what is wrong has to be found before."""

    def read(*arguments, **named):
        raise AssertionError("data are read first")

    for module in ("start", "resume_run"):
        monkeypatch.setattr(f"lorafusion_jax.training.{module}.prepare", read)


def test_folder_of_another_run(lorafusion, job, finished, nothing_read):
    before = snapshot(finished[1])
    outcome = lorafusion("train", finished[0].path, "--out", finished[1], "optim.lr=0.5", "adapters.med.lora.rank=2")
    assert (outcome.code, outcome.errors) == (2, ["run.exists"])
    assert f"{finished[1]} already holds a run with other settings" in outcome.err
    assert "adapters.law.optim.lr was 0.0002 and is 0.5; adapters.med.lora.rank was 4 and is 2" in outcome.err
    assert "fix: another --out" in outcome.err
    outcome = lorafusion("train", finished[0].path, "--out", finished[1], "train.max_steps=2")
    assert "because train.max_steps was null and is 2" in outcome.err
    assert lorafusion("train", job.path, "--out", finished[1]).errors == ["run.exists"]
    assert snapshot(finished[1]) == before


def test_folder_of_the_same_run(lorafusion, finished, nothing_read):
    job, folder = finished
    outcome = lorafusion("train", job.path, "--out", folder)
    assert (outcome.code, outcome.errors) == (2, ["run.exists"])
    assert "with these settings" in outcome.err
    assert f"lorafusion resume {folder}" in outcome.err


@pytest.mark.parametrize("folder", ["jobs.yaml", "jobs.yaml/run", "/proc/run"])
def test_folder_that_cannot_be_made(lorafusion, job, nothing_read, folder):
    outcome = lorafusion("train", job.path, "--out", job.folder / folder)
    assert (outcome.code, outcome.errors) == (2, ["run.folder"])
    assert "fix: --out" in outcome.err


def test_plan_of_other_data_or_of_another_mesh(lorafusion, job):
    plan = job.folder / "plan.json"
    assert lorafusion("plan", job.path, "-o", plan).code == 0
    for override, change in {
        "train.max_steps=3": "law: steps (train.max_steps, epochs, rows of data.train) was 6 and is 3",
        "adapters.med.weight=2.5": "med: weight was 1 and is 2.5",
        "adapters.med.batch.global_samples=4": "med: batch.global_samples was 3 and is 4",
        "seed=5": "samples differ in length or place",
        "weight=2.5": "law, med: weight was 1 and is 2.5",
    }.items():
        outcome = lorafusion("train", job.path, "--out", job.folder / "run", "--plan", plan, override)
        assert (outcome.code, outcome.errors) == (2, ["plan.mismatch"]), outcome.err
        assert change in outcome.err
    write_rows_to(job.folder / "law.jsonl", make_rows(14, 5))
    outcome = lorafusion("train", job.path, "--out", job.folder / "run", "--plan", plan)
    assert (outcome.code, outcome.errors) == (2, ["plan.mismatch"])
    assert "rows of data.train) was 6 and is 7" in outcome.err
    assert lorafusion("plan", job.path, "-o", plan, "mesh.stages=2").code == 0
    outcome = lorafusion("train", job.path, "--out", job.folder / "run", "--plan", plan)
    assert (outcome.code, outcome.errors) == (2, ["plan.mismatch"])
    assert not (job.folder / "run").exists()


def test_damaged_and_missing_plan(lorafusion, job):
    plan = job.folder / "plan.json"
    assert lorafusion("train", job.path, "--plan", plan).errors == ["plan.missing"]
    assert lorafusion("plan", job.path, "-o", plan).code == 0
    plan.write_text(plan.read_text().replace("law", "lax"))
    outcome = lorafusion("train", job.path, "--plan", plan)
    assert (outcome.code, outcome.errors) == (2, ["plan.damaged"])


@pytest.mark.parametrize(
    ("settings", "codes", "fix"),
    [
        (["mesh.stages=4"], ["mesh.stages"], "mesh.stages: 1 to 2"),
        (["mesh.layers=[1]"], ["mesh.layers"], "mesh.layers: [2]"),
        (["mesh.stages=2", "mesh.layers=[1, 2]"], ["mesh.layers"], "mesh.layers: [1, 1]"),
        (["mesh.stages=2", "mesh.layers=[3]"], ["mesh.layers", "mesh.layers"], "mesh.layers: [1, 1]"),
    ],
)
def test_stages_that_the_model_does_not_have(lorafusion, job, settings, codes, fix):
    for command in (("check",), ("plan",), ("train", "--out", job.folder / "run")):
        outcome = lorafusion(command[0], job.path, *command[1:], *settings)
        assert (outcome.code, outcome.errors) == (2, codes), command
        assert fix in outcome.err
    assert not (job.folder / "run").exists()
    (job.folder / "law.jsonl").write_text("")
    for command in ("check", "plan"):
        assert lorafusion(command, job.path, *settings).errors == [*codes, "data.empty-file"]


def test_stage_errors_are_reported_before_data_is_read(lorafusion, job, nothing_read, monkeypatch):
    monkeypatch.setattr("lorafusion_jax.training.profiling.prepare", None)
    out = job.folder / "out"
    for command in (("train", job.path, "--out", out), ("profile", job.path, "-o", out)):
        assert lorafusion(*command, "mesh.stages=4").errors == ["mesh.stages"]
    assert lorafusion("profile", job.path, "-o", job.folder).errors == ["output.folder"]
    assert not out.exists()


def test_mesh_errors_on_resume_are_reported_before_data_is_read(lorafusion, finished, tmp_path, nothing_read):
    run = tmp_path / "run"
    shutil.copytree(finished[1], run, symlinks=True)
    shutil.rmtree(run / "state")  # all is left to do
    assert lorafusion("resume", run, "mesh.stages=4").errors == ["mesh.stages"]
    assert lorafusion("resume", run, "mesh.data=16").errors == ["mesh.devices"]


def test_a_base_without_a_configuration_is_refused(lorafusion, job, own_base):
    (own_base.parent / "config.json").unlink()
    assert lorafusion("check", job.path, "mesh.stages=4").errors == ["model.not-found"]


def test_a_mesh_that_the_machine_does_not_have(lorafusion, job, nothing_read):
    settings = ["mesh.stages=2", "mesh.data=8"]
    outcome = lorafusion("train", job.path, "--out", job.folder / "run", *settings)
    assert (outcome.code, outcome.errors) == (2, ["mesh.devices"])
    assert "lower mesh.stages, mesh.data, mesh.fsdp or mesh.tensor" in outcome.err
    assert not (job.folder / "run").exists()
    checked = lorafusion("check", job.path, *settings)  # asks no device: it may be another machine
    assert checked.code == 0, checked.err


def test_no_run_folder(lorafusion, tmp_path):
    for command in (("status",), ("resume",), ("export", "law", "--to", tmp_path / "to")):
        outcome = lorafusion(command[0], tmp_path / "nothing", *command[1:])
        assert (outcome.code, outcome.errors) == (2, ["run.missing"])


@pytest.mark.parametrize("text", ["x" * 3000, "runs/" + "x" * 300])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("status",), "run.missing"),
        (("check",), "config.missing"),
        (("verify",), "verify.nothing"),
        (("serve", "--base"), "serve.base"),
        (("combine", "--to", "both"), "combine.adapters"),
    ],
)
def test_a_name_that_is_too_long_names_nothing(lorafusion, tmp_path, monkeypatch, words, code, text):
    monkeypatch.chdir(tmp_path)
    outcome = lorafusion(*words, text)
    assert (outcome.code, outcome.errors) == (2, [code])
    assert "fix: " in outcome.err


def test_a_long_name_in_a_job_is_reported_with_its_key(lorafusion, job):
    job.adapter("law")["lora"] = {"init_from": "x" * 300}
    job.adapter("med")["objective"] = {"name": "dpo", "reference": "x" * 300}
    outcome = lorafusion("check", job.write())
    assert outcome.code == 2
    assert {"objective.reference", "peft.missing-file"} <= {*outcome.errors}


def test_a_file_below_very_many_new_folders_is_written(lorafusion, tiny_base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows_to(tmp_path / "rows.jsonl", make_rows(4, seed=0))
    path = "d/" * 1500 + "job.yaml"
    outcome = lorafusion("new", "--base", tiny_base, "--data", "rows.jsonl", "-o", path)
    assert f"written to {path}" in outcome.out
    os.unlink(path)
    os.removedirs(os.path.dirname(path))  # shutil.rmtree recurses, too


def test_a_job_file_is_no_run_and_a_folder_no_job_file(lorafusion, job):
    outcome = lorafusion("resume", job.path)
    assert (outcome.code, outcome.errors) == (2, ["run.missing"])
    assert f"fix: the folder of its run, or lorafusion train {job.path} --out" in outcome.err
    outcome = lorafusion("check", job.folder)
    assert (outcome.code, outcome.errors) == (2, ["config.folder"])
    assert f"fix: one of {job.path}" in outcome.err
    (job.folder / "empty").mkdir()
    assert "fix: lorafusion new" in lorafusion("plan", job.folder / "empty").err


def test_json_files_of_models_and_runs_are_no_job_files(lorafusion, tiny_base, tmp_path):
    assert "fix: lorafusion new" in lorafusion("check", tiny_base).err
    assert "config.json is not a run folder: it is a file" in lorafusion("status", tiny_base / "config.json").err
    (tmp_path / "jobs.json").write_text('{"adapters": []}')
    assert f"fix: one of {tmp_path / 'jobs.json'}" in lorafusion("check", tmp_path).err
    (tmp_path / "plan.json").write_text("{}")
    assert f"its job file, or lorafusion resume {tmp_path}" in lorafusion("check", tmp_path).err
    outcome = lorafusion("status", tmp_path / "jobs.json")
    assert (outcome.errors, f"fix: its folder: {tmp_path}" in outcome.err) == (["run.missing"], True)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["generate", "base", "--prompt", "hi"], "PROMPT is typed without --prompt, as in lorafusion generate runs/"),
        (["export", "--run", "runs/exp1"], "RUN is typed without --run, as in lorafusion export runs/"),
        (["status"], "fix: lorafusion status runs/exp1"),
        (["jobs", "show"], "fix: lorafusion jobs show"),
        (["plan", "jobs.yaml", "--lr", "1e-3"], "typed without dashes: optim.lr=…"),
    ],
)
def test_a_usage_error_says_how_the_command_is_typed(lorafusion, words, fix):
    outcome = lorafusion(*words)
    assert outcome.code == 2
    assert fix in outcome.err


def test_a_wrong_name_of_a_run_is_answered_with_the_runs_that_are_there(lorafusion, tmp_path):
    (tmp_path / "runs" / "sweep").mkdir(parents=True)
    (tmp_path / "runs" / "sweep" / "plan.json").write_text("{}")
    (tmp_path / "runs" / "begun").mkdir()
    (tmp_path / "runs" / "begun" / START).write_text("{}")
    for command in (("status",), ("report",), ("cancel", "law")):
        near = lorafusion(command[0], tmp_path / "runs" / "begin", *command[1:])
        far = lorafusion(command[0], tmp_path / "runs" / "2026", *command[1:])
        assert near.errors == far.errors == ["run.missing"]
        assert f"did you mean '{tmp_path / 'runs' / 'begun'}'?" in near.err
        assert f"one of {tmp_path / 'runs' / 'begun'}, {tmp_path / 'runs' / 'sweep'}" in far.err
    above = lorafusion("report", tmp_path / "runs")
    assert f"one of {tmp_path / 'runs' / 'begun'}, {tmp_path / 'runs' / 'sweep'}" in above.err


@pytest.mark.parametrize("text", ["", '{"slot": 4, "adap', "[]"], ids=["empty", "cut off", "of something else"])
def test_resume_falls_back_to_the_previous_checkpoint(lorafusion, finished, tmp_path, text):
    run = tmp_path / "run"
    shutil.copytree(finished[1], run, symlinks=True)
    *_, before, newest = sorted((run / "state").iterdir(), key=lambda folder: int(folder.name))
    (newest / "position" / "metadata").write_text(text)
    outcome = lorafusion("resume", run)
    assert outcome.code == 0, outcome.err
    assert f"damaged: {newest / 'position' / 'metadata'}" in outcome.out
    assert f"continues from the checkpoint before it, {before}" in outcome.out
    assert f"resumed at microbatch {before.name}" in outcome.out
    assert weights(run) == weights(finished[1])


def test_the_only_checkpoint_cannot_be_read(lorafusion, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished[1], run, symlinks=True)
    *older, newest = sorted((run / "state").iterdir(), key=lambda folder: int(folder.name))
    for folder in (*older, newest / "position"):
        shutil.rmtree(folder)
    outcome = lorafusion("resume", run)
    assert (outcome.code, outcome.errors) == (2, ["run.bad-state"])
    assert f"remove {run / 'state'} to start again" in outcome.err


@pytest.fixture
def full_disk_at_second_save(monkeypatch):
    """The writer runs out of space in the middle of its second checkpoint."""
    original, calls = AdapterState.write_files, []

    def write_files(self, folder):
        slot = int(folder.parents[1].name.split(".")[1])  # .SLOT.new
        if slot not in calls:
            calls.append(slot)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        original(self, folder)

    monkeypatch.setattr(AdapterState, "write_files", write_files)
    return calls


def test_disk_that_fills_up_while_saving(lorafusion, job, finished, full_disk_at_second_save):
    out = job.folder / "run"
    outcome = lorafusion("train", job.path, "--out", out)
    assert (outcome.code, outcome.errors) == (1, ["save.no-space"])
    first, failed = full_disk_at_second_save
    assert str(out / "state") in outcome.err
    assert f"the checkpoint of slot {first} is intact" in outcome.err
    assert failed > first
    shown = lorafusion("status", out)
    assert "stopped" in shown.out
    assert shown.last_line == f"next: lorafusion resume {out}"
    assert lorafusion("resume", out).code == 0
    assert weights(out) == weights(finished[1])


def test_too_little_disk_space_is_reported_before_the_first_step(lorafusion, job, monkeypatch):
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    out = job.folder / "run"
    outcome = lorafusion("train", job.path, "--out", out)
    assert (outcome.code, outcome.errors) == (1, ["save.no-space"])
    assert "MiB are needed and 0 MiB are free" in outcome.err
    assert not list(out.glob("state/*"))
    monkeypatch.undo()
    assert lorafusion("resume", out).code == 0


def test_failed_export_on_a_full_disk_leaves_no_files(lorafusion, finished, tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    outcome = lorafusion("export", finished[1], "law", "--to", tmp_path / "to")
    assert (outcome.code, outcome.errors) == (1, ["save.no-space"])
    assert not list(tmp_path.iterdir())


def test_export_never_overwrites(lorafusion, finished, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    outcome = lorafusion("export", finished[1], "law", "--to", tmp_path)
    assert (outcome.code, outcome.errors) == (2, ["export.exists"])
    assert snapshot(tmp_path).keys() == {"mine.txt"}
    assert lorafusion("export", finished[1], "lax", "--to", tmp_path / "to").errors == ["export.unknown-adapter"]


def test_output_that_the_system_refuses(lorafusion, job):
    (job.folder / "file").write_text("")
    outcome = lorafusion("plan", job.path, "-o", job.folder / "file" / "plans" / "plan.json")
    assert (outcome.code, outcome.errors) == (1, ["system.file"])
    assert "fix: a place whose path leads through folders alone" in outcome.err
    outcome = lorafusion("plan", job.path, "-o", job.folder / ("x" * 300))
    assert (outcome.code, outcome.errors) == (1, ["system.file"])
    assert "fix: a shorter path" in outcome.err
    outcome = lorafusion("serve", "--demo", "--home", job.folder / "file")
    assert (outcome.code, outcome.errors) == (1, ["system.file"])
    assert "fix: a place where no file has this name" in outcome.err


def test_output_where_nobody_may_write(lorafusion, finished, monkeypatch):
    """The file is named as it was asked for, not by the hidden name of a write under way."""

    def refused(self, *arguments, **options):
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refused)
        outcome = lorafusion("report", finished[1], "-o", "report.html")
    assert (outcome.code, outcome.errors) == (1, ["system.file"])
    assert "report.html cannot be used" in outcome.err
    assert ".part" not in outcome.err
    assert "fix: a place where you may read and write" in outcome.err


@pytest.mark.parametrize(
    "words",
    [
        "cancel RUN law",
        "report RUN",
        "timeline RUN",
        "export RUN law --to out",
        "resume RUN",
        "generate RUN hi",
        "verify RUN",
    ],
)
def test_a_run_that_is_starting_is_told_from_one_that_is_missing(lorafusion, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "try").mkdir(parents=True)
    start = {"phase": "compiling 3 of 4: stage 0", "phase_began": 1.0, "began": 1.0}
    (tmp_path / "runs" / "try" / START).write_text(json.dumps(start))
    outcome = lorafusion(*words.replace("RUN", "runs/try").split())
    assert outcome.code != 0
    assert "runs/try is a run that is still starting: compiling 3 of 4: stage 0." in outcome.err
    if not words.startswith(("generate", "verify")):
        (tmp_path / "runs" / "sweep").mkdir()
        (tmp_path / "runs" / "sweep" / "plan.json").touch()
        assert "did you mean 'runs/sweep'?" in lorafusion(*words.replace("RUN", "runs/sweeep").split()).err


def test_a_run_is_found_before_jax_is_imported_and_what_stops_there_leaves_nothing(lorafusion, job, monkeypatch):
    """The job is right; the folder of a wrong one is not made at all."""
    run, seen = job.folder / "runs" / "try", {}

    def look(**_):
        seen["state"] = json.loads(lorafusion("status", run, "--json").out)["state"]
        seen["cancel"] = lorafusion("cancel", run, "law").err
        seen["again"] = lorafusion("train", job.path, "--out", run).errors
        raise ConfigError("test.stop", "stopped here.")

    monkeypatch.setattr("lorafusion_jax.cli.train.prepare_machine", look)
    assert lorafusion("train", job.path, "--out", run).errors == ["test.stop"]
    assert (seen["state"], seen["again"]) == ("starting", ["run.in-use"])
    assert f"{run} is a run that is still starting: getting ready." in " ".join(seen["cancel"].split())
    assert not run.parent.exists()

    seen.clear()
    assert lorafusion("train", job.path, "--out", run, "lora.rank=0").code == 2
    assert (seen, run.parent.exists()) == ({}, False)


def test_a_start_that_was_killed_blocks_no_new_one(lorafusion, job, monkeypatch):
    run = job.folder / "killed"
    run.mkdir()
    (run / START).write_text(json.dumps({"phase": "getting ready", "phase_began": 1.0, "began": 1.0}))
    (run / "run.lock").write_text(json.dumps({"process": 7, "host": os.uname().nodename}))
    outcome = lorafusion("cancel", run, "law")
    assert "is a run that ended while it started: getting ready." in outcome.err
    assert f"--out {run} or another" in outcome.err

    def reached(**_):
        raise ConfigError("test.stop", "it would train.")

    monkeypatch.setattr("lorafusion_jax.cli.train.prepare_machine", reached)
    assert lorafusion("train", job.path, "--out", run).errors == ["test.stop"]
    assert list(run.iterdir()) == []


def test_best_is_the_step_with_the_best_held_out_result(lorafusion, finished, tmp_path):
    run = finished[1]
    best = (run / "adapters" / "law" / "best").resolve()
    outcome = lorafusion("export", run, "law", "--best", "-o", tmp_path / "law")
    assert outcome.code == 0, outcome.err
    assert f"exported law (step {int(best.name.removeprefix('step-'))})" in outcome.out
    assert find_source(run, ["law"], best=True).adapters[0].folder.resolve() == best
    assert "two steps" in lorafusion("export", run, "law", "--best", "--step", 6, "-o", tmp_path / "other").err
