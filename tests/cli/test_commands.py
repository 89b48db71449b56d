"""Every command on a small job: its output, its files, and the suggested next command."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import pytest
from cli_helpers import make_rows, snapshot, weights, write_rows_to
from forked_commands import Command

from lorafusion_jax.cli import init
from lorafusion_jax.errors import install_line
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report import recorder
from lorafusion_jax.report.format import count
from lorafusion_jax.report.recorder import read_rows
from scheduling import Plan


def test_init_prints_a_job_file_that_checks(lorafusion, tmp_path, tiny_base):
    outcome = lorafusion("init")
    assert outcome.code == 0
    assert outcome.err.splitlines()[-1] == "next: lorafusion check jobs.yaml"
    (tmp_path / "data").mkdir()
    for number, name in enumerate(("law", "law_eval", "chat")):
        write_rows_to(tmp_path / "data" / f"{name}.jsonl", make_rows(32, number))
    path = tmp_path / "jobs.yaml"
    path.write_text(outcome.out)
    checked = lorafusion("check", path, f"base.model={tiny_base}", "--json")
    assert checked.code == 0, checked.err
    assert list(json.loads(checked.out)["adapters"]) == ["law", "chat-lr1e-4", "chat-lr2e-4"]
    assert json.loads(checked.out)["warnings"] == []


def test_init_shows_the_defaults_that_the_schema_has():
    import yaml

    from lorafusion_jax.config import schema

    shown = yaml.safe_load(init.TEXT)
    for section, model in {
        "data": schema.DataSettings,
        "lora": schema.LoraSettings,
        "optim": schema.OptimSettings,
        "batch": schema.BatchSettings,
        "save": schema.SaveSettings,
        "train": schema.TrainSettings,
    }.items():
        for key, value in shown[section].items():
            default = model.model_fields[key].default
            assert type(default)(value) == default, f"{section}.{key}"


def test_init_all_shows_every_key_of_the_schema_and_checks(lorafusion, tmp_path, tiny_base):
    import yaml

    from lorafusion_jax.config.load import load_config
    from lorafusion_jax.config.schema import DEFAULTS, SHARED

    path = tmp_path / "jobs.yaml"
    path.write_text(lorafusion("init", "--all").out)
    shown = yaml.safe_load(path.read_text())
    for section, model in (SHARED | DEFAULTS).items():
        keys = set(model.model_fields) - ({"train"} if section == "data" else set())
        assert set(shown[section]) == keys
        assert all(model.model_fields[key].description for key in keys), section
    assert {"epochs", "seed", "weight"} < set(shown)
    short = tmp_path / "short.yaml"
    short.write_text("base: {model: path/to/model}\nadapters: [{name: law, data: {train: data/law.jsonl}}]")
    assert load_config(path) == load_config(short)
    (tmp_path / "data").mkdir()
    write_rows_to(tmp_path / "data" / "law.jsonl", make_rows(32, 0))
    checked = lorafusion("check", path, f"base.model={tiny_base}", "--json")
    assert json.loads(checked.out)["warnings"] == []


def test_check_counts_rows_and_tokens(lorafusion, job):
    outcome = lorafusion("check", job.path)
    assert outcome.code == 0
    assert outcome.last_line == f"next: lorafusion plan {job.path}"
    numbers = json.loads(lorafusion("check", job.path, "--json").out)["adapters"]
    assert {name: (row["format"], row["rows"], row["cut"]) for name, row in numbers.items()} == {
        "law": ("prompt", 12, 0),
        "med": ("prompt", 12, 0),
    }
    assert all(0 < row["loss_tokens"] < row["tokens"] for row in numbers.values())


def test_overrides_that_do_not_reach_an_adapter_are_reported(lorafusion, job):
    note = "optim.lr=1e-4 does not reach med, which has its own: adapters.med.optim.lr=1e-4 sets that"
    for command in (("check",), ("plan",), ("train", "train.max_steps=1", "--out", job.folder / "run")):
        shown = lorafusion(command[0], job.path, *command[1:], "optim.lr=1e-4")
        assert shown.code == 0, shown.err
        assert note in shown.out
        assert "does not reach law" not in shown.out
    assert "does not reach" not in lorafusion("check", job.path, "optim.lr=1e-4", "adapters.med.optim.lr=1e-5").out
    assert "does not reach" not in lorafusion("check", job.path, "optim={name: sgd}").out
    assert "does not reach" not in lorafusion("check", job.path, "optim.lr=0.001").out  # what med has anyway
    assert "batch.global_samples=4 does not reach law" in lorafusion("check", job.path, "batch.global_samples=4").out


def test_settings_without_effect_are_reported(lorafusion, job):
    job.adapter("law")["optim"] = {"name": "lion", "eps": 1e-6}
    for command in ("check", "plan"):
        assert "law: optim.eps has no effect with lion" in lorafusion(command, job.write()).out


def test_check_and_plan_name_packages_that_a_tracker_lacks(lorafusion, job, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # import fails, whatever is installed
    for command in ("check", "plan"):
        outcome = lorafusion(command, job.path, "report.tensorboard=true", "--json")
        assert outcome.code == 0
        (note,) = [note for note in json.loads(outcome.out)["warnings"] if "missing-package" in note]
        assert "report.tensorboard needs a package" in note
        assert install_line("tensorboard") in note


def test_rows_that_are_cut_come_with_the_length_that_keeps_them(lorafusion, job):
    rows = make_rows(12, 0)
    rows[3]["completion"] = rows[9]["completion"] = " cat" * 25
    write_rows_to(job.folder / "law.jsonl", rows)
    outcome = lorafusion("plan", job.path)
    assert outcome.code == 0
    text = outcome.out.split("warnings", 1)[1]
    assert "law: 2 of 12 rows (16.7 %) are cut at 48 tokens: rows 3, 9" in text
    suggested = int(text.split("raise data.max_length to ", 1)[1].split()[0])
    again = json.loads(
        lorafusion("plan", job.path, f"data.max_length={suggested}", f"batch.capacity_tokens={suggested}", "--json").out
    )
    assert again["warnings"] == []
    assert 48 < again["adapters"]["law"]["longest"] <= suggested <= 80


def test_plan_shows_writes_and_compares(lorafusion, job):
    path, page = job.folder / "out" / "plan.json", job.folder / "timeline.html"
    outcome = lorafusion("plan", job.path, "-o", path, "--compare", "--timeline", page, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert outcome.last_line == f"next: lorafusion train {job.path} --out runs/jobs --plan {path}"
    plan = Plan.from_json(path.read_text())
    assert f"plan {plan.digest[:12]} " in outcome.out
    assert plan.digest not in outcome.out
    assert "predictions" in outcome.out
    assert "one after another" in outcome.out
    assert page.read_text().startswith("<!doctype html>")
    numbers = json.loads(lorafusion("plan", job.path, "--compare", "--json").out)
    assert numbers["plan"] == plan.digest
    assert {name: row["steps"] for name, row in numbers["adapters"].items()} == {"law": 6, "med": 4}
    assert max(row["finishes_slot"] for row in numbers["adapters"].values()) == plan.num_slots
    assert max(row["finishes_s"] for row in numbers["adapters"].values()) == pytest.approx(
        numbers["predicted"]["seconds"]
    )
    assert numbers["seconds_one_after_another"] >= numbers["predicted"]["seconds"]
    assert numbers["slots_one_after_another"] >= plan.num_slots


def test_plan_predicts_bubbles_of_a_pipeline(lorafusion, job):
    one_stage, two = (
        json.loads(lorafusion("plan", job.path, f"mesh.stages={stages}", "--json").out) for stages in (1, 2)
    )
    assert one_stage["predicted"]["bubble_share"] == 0
    assert two["predicted"]["bubble_share"] > 0
    assert "2 stages" in lorafusion("plan", job.path, "mesh.stages=2").out


def test_screens_fit_into_80_columns(lorafusion, job, finished, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in (("check", job.path), ("plan", job.path, "--compare"), ("status", finished[1])):
        lines = lorafusion(*command).out.splitlines()
        table = lines[next(i for i, line in enumerate(lines) if line.startswith("adapter ")) :][:3]
        assert [line.split()[0] for line in table] == ["adapter", "law", "med"]  # nothing is folded
        assert max(map(len, table)) <= 80


def test_preview_shows_tokens(lorafusion, job):
    outcome = lorafusion("data", "preview", job.path, "--adapter", "med", "--rows", "1")
    assert outcome.code == 0
    assert "⟦" in outcome.out
    assert "law" not in outcome.out.split("next:")[0]
    assert outcome.last_line == f"next: lorafusion plan {job.path}"
    shown = json.loads(lorafusion("data", "preview", job.path, "--rows", "2", "--json").out)
    assert [len(rows) for rows in shown.values()] == [2, 2]
    row = shown["law"][0]
    assert len(row["tokens"]) == len(row["learned"]) == len(row["pieces"])
    assert not row["learned"][0]
    assert any(row["learned"])
    unknown = lorafusion("data", "preview", job.path, "--adapter", "lax")
    assert (unknown.code, unknown.errors) == (2, ["config.unknown-adapter"])


def test_train_with_a_plan_is_the_run_without(lorafusion, job, finished):
    plan = job.folder / "plan.json"
    lorafusion("plan", job.path, "-o", plan)
    out = job.folder / "run"
    outcome = lorafusion("train", job.path, "--out", out, "--plan", plan)
    assert outcome.code == 0, outcome.err
    assert weights(out) == weights(finished[1])
    assert outcome.last_line == f"next: lorafusion export {out} law --to out/law"
    assert f"plan {Plan.from_json(plan.read_text()).digest[:12]} " in outcome.out
    assert "compiled the training step in" in outcome.out
    assert "law  step 0  held-out loss" in outcome.out
    assert "law 6/6 loss" in outcome.out
    assert "\x1b" not in outcome.out, "colours in a log"


def test_train_takes_overrides_and_warns(lorafusion, job):
    job.adapter("law")["optim"] = {"momentum": 0.9}
    out = job.folder / "run"
    outcome = lorafusion(
        "train", job.write(), "--out", out, "train.max_steps=1", "adapters.law.optim.schedule=constant"
    )
    assert outcome.code == 0, outcome.err
    assert "law: optim.momentum has no effect with adamw" in outcome.out
    assert {
        name: row["step"] for name, row in json.loads(lorafusion("status", out, "--json").out)["adapters"].items()
    } == {"law": 1, "med": 1}


def test_status_of_a_finished_run(lorafusion, finished):
    _, out = finished
    outcome = lorafusion("status", out)
    assert outcome.code == 0
    assert "finished" in outcome.out
    assert outcome.last_line == f"next: lorafusion export {out} law --to out/law"
    numbers = json.loads(lorafusion("status", out, "--json").out)
    assert numbers["state"] == "finished"
    assert numbers["slot"] == numbers["slots"]
    law, med = numbers["adapters"]["law"], numbers["adapters"]["med"]
    assert (law["status"], law["step"], law["steps"]) == ("done", 6, 6)
    assert law["held_out_after"] is not None
    assert med["held_out_after"] is None
    rates = [row.get("useful_tokens_per_s") for row in read_rows(out / "metrics.jsonl") if row["kind"] == "slot"]
    assert numbers["throughput"]["useful_tokens_per_s"] == statistics.median(rate for rate in rates if rate is not None)
    assert numbers["throughput"]["useful_tokens_per_s"] <= numbers["throughput"]["processed_tokens_per_s"]
    watched = lorafusion("status", out, "--watch")  # nothing to wait for
    assert watched.code == 0


def test_frozen_parameters_are_those_of_the_plan(lorafusion, finished):
    """The base has a tied table, which is embedding and head."""
    job, out = finished
    model = ModelConfig.from_hf(job.values["base"]["model"])
    started = next(row for row in read_rows(out / "events.jsonl") if row["kind"] == "started")
    assert started["frozen"] == model.num_parameters
    assert f"{count(model.num_parameters)} parameters" in lorafusion("plan", job.path).out


def test_metrics_of_a_run_are_the_documented_rows(finished):
    _, out = finished
    documented = {
        kind: {"kind", *re.findall(r"\"(\w+)\"", keys)}
        for kind, keys in re.findall(r"\{\"kind\": \"(\w+)\", (.*?)\}", recorder.__doc__ or "", re.DOTALL)
    }
    rows = read_rows(out / "metrics.jsonl")
    assert {row["kind"] for row in rows} == set(documented)
    assert all(set(row) == documented[row["kind"]] for row in rows)
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [0, 6]  # held-out data of law
    kinds = [event["kind"] for event in read_rows(out / "events.jsonl")]
    assert (kinds[0], kinds[-1], kinds.count("adapter-done")) == ("started", "finished", 2)


def test_export_copies_and_merges(lorafusion, finished, tmp_path):
    _, out = finished
    copied = lorafusion("export", out, "law", "--to", tmp_path / "law")
    assert copied.code == 0, copied.err
    assert copied.last_line == f"next: lorafusion export {out} law --merge --to {tmp_path / 'law'}-merged"
    trained = (out / "adapters" / "law" / "latest").resolve()
    changed = {"README.md", "SHA256SUMS"}  # the card of an export has the results
    files = [{k: v for k, v in snapshot(path).items() if k not in changed} for path in (tmp_path / "law", trained)]
    assert files[0] == files[1]
    assert (tmp_path / "law" / "README.md").read_text().startswith((trained / "README.md").read_text())
    assert len({file.stat().st_mode for file in (tmp_path / "law").iterdir()}) == 1, "some files are private"
    spec, arrays = read_adapter(tmp_path / "law")
    assert (spec.rank, len(arrays)) == (4, 4)
    merged = lorafusion("export", out, "law", "--merge", "--to", tmp_path / "full")
    assert merged.code == 0, merged.err
    assert merged.last_line.startswith("next: python -c")
    assert (tmp_path / "full" / "config.json").is_file()
    assert "4 tensors changed" in merged.out
    early = lorafusion("export", out, "law", "--step", "999", "--to", tmp_path / "early")
    assert (early.code, early.errors) == (2, ["export.no-step"])
    steps = sorted(int(folder.name[-6:]) for folder in (out / "adapters" / "law").glob("step-*"))
    assert steps[-1] == 6
    assert f"fix: --step {' or '.join(map(str, steps))}\n" in early.err


def test_doctor(lorafusion):
    numbers = json.loads(lorafusion("doctor", "--json").out)
    assert set(numbers) == {"versions", "devices", "kernels", "defaults", "extras", "disk"}
    assert numbers["kernels"]["xla"] == "available"
    programs = re.escape(Path(jax.config.jax_compilation_cache_dir).name)
    for what, folder in (("compiled programs", programs), ("tokens", "tokens"), ("quantised bases", "quantised")):
        assert re.search(rf"{folder} *: \d+ files, .*B$", numbers["disk"][what])  # paths are aligned
    outcome = lorafusion("doctor")
    assert outcome.code == 0
    assert outcome.last_line == "next: lorafusion demo"
    assert numbers["versions"]["jax"] in outcome.out
    assert numbers["kernels"]["compiler options"] == "none"
    assert numbers["defaults"]["loss"] == "xla: the only implementation"
    assert numbers["defaults"]["attention"] == "xla: kernels are interpreted here"


def test_doctor_names_the_options_of_a_hopper_gpu():
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    from lorafusion_jax.cli.doctor import diagnosis

    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=h200)):
        report = diagnosis()
    kernels, defaults = report["kernels"], report["defaults"]
    assert kernels["compiler options"].startswith("xla_gpu_enable_triton_gemm=false")
    assert kernels["pallas_mosaic_gpu"] == "available"
    assert defaults["linear q, k and v"] == "pallas_mosaic_gpu: shipped measurements of an NVIDIA H200"
    assert defaults["attention"] == "pallas_mosaic_gpu: shipped measurements of an NVIDIA H200"
    assert defaults["mlp"].startswith("pallas_mosaic_gpu: one op")


@pytest.mark.parametrize("arguments", [("trian",), ("check",), ("plan", "jobs.yaml", "--no-such-option"), ("export",)])
def test_mistyped_commands_are_usage_errors(lorafusion, arguments):
    outcome = lorafusion(*arguments)
    assert outcome.code == 2
    assert "Usage" in outcome.err


def test_version(lorafusion):
    outcome = lorafusion("--version")
    assert (outcome.code, outcome.out) == (0, f"lorafusion-jax {version('lorafusion-jax')}\n")


def test_every_command_has_help_with_an_example(lorafusion):
    names = (
        "demo, init, check, plan, train, resume, status, timeline, report, export, verify, profile, tune, doctor, "
        "data preview"
    )
    for command in names.split(", "):
        outcome = lorafusion(*command.split(), "--help")
        assert outcome.code == 0
        assert f"Example: lorafusion {command}" in " ".join(outcome.out.split())


def test_help_of_train_shows_how_to_use_several_devices(lorafusion):
    shown = " ".join(lorafusion("train", "--help").out.replace("│", " ").split())
    for word in ("mesh.stages=S", "mesh.data=D", "mesh.fsdp=F", "--distributed", "JAX_PROCESS_ID"):
        assert word in shown, word


def test_several_processes_need_the_distributed_option(lorafusion, job, finished, monkeypatch):
    run = job.folder / "run"
    alone = lorafusion("train", job.path, "--out", run, "--coordinator", "localhost:1", "--num-processes", 2)
    assert (alone.code, alone.errors) == (2, ["processes.not-distributed"])
    assert "--distributed" in alone.err
    assert not run.exists()
    for name in ("JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "2")
            outcome = lorafusion("resume", finished[1])
        assert outcome.errors == ["processes.not-distributed"]
        assert name in outcome.err


def test_a_coordinator_without_a_port_is_named(lorafusion, job):
    options = ("--coordinator", "localhost", "--num-processes", 1, "--process-id", 0)
    outcome = lorafusion("train", job.path, "--out", job.folder / "run", "--distributed", *options)
    assert outcome.errors == ["processes.join"]
    assert "localhost has no port" in outcome.err


def test_resume_on_another_mesh(lorafusion, finished, tmp_path):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(finished[1], run, symlinks=True)
    assert lorafusion("resume", run, "batch.capacity_tokens=8").errors == ["resume.fixed"]
    assert "fix: lorafusion extend RUN" in lorafusion("resume", run, "train.max_steps=99").err
    resumed = lorafusion("resume", run, "mesh.data=2", "train.remat=nothing")
    assert resumed.code == 0, resumed.err
    line, following = resumed.out.split("\n", 1)
    assert line.startswith(f"{run} had already finished (2 done): {run}/adapters/NAME/latest")
    assert following == f"next: lorafusion status {run}\n"
    assert weights(run) == weights(finished[1])


def test_planning_does_not_import_jax(job, finished, tmp_path):
    """One new interpreter for all: importing jax takes longer than planning, and a backend may hold a GPU."""
    code = """
import sys
from lorafusion_jax.cli.main import run
for arguments in ARGUMENTS:
    assert run(arguments) == 0, arguments
    assert not {"jax", "flax", "orbax"} & set(sys.modules), arguments
print("none")
"""
    arguments = [
        ["init"],
        ["check", str(job.path)],
        ["plan", str(job.path), "--compare", "--device", "h200"],
        ["status", str(finished[1])],
        ["timeline", str(finished[1]), "--out", str(tmp_path / "timeline.html")],
        ["data", "preview", str(job.path)],
    ]
    done = subprocess.run(
        [sys.executable, "-c", code.replace("ARGUMENTS", repr(arguments))], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("none\n")


def test_export_starts_no_backend(finished, tmp_path):
    code = f"""
from lorafusion_jax.cli.main import run
assert run(["export", {str(finished[1])!r}, "law", "--to", {str(tmp_path / "to")!r}]) == 0
assert run(["export", {str(finished[1])!r}, "law", "--merge", "--to", {str(tmp_path / "full")!r}]) == 0
import jax
from jax._src import xla_bridge
assert not xla_bridge._backends
"""
    command = Command(["-c", code], os.environ)
    _, err = command.communicate()
    assert command.returncode == 0, err


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("", "--xla_gpu_nccl_termination_timeout_seconds=600"),
        ("--xla_dump_to=/x", "--xla_dump_to=/x --xla_gpu_nccl_termination_timeout_seconds=600"),
        ("--xla_gpu_nccl_termination_timeout_seconds=5", "--xla_gpu_nccl_termination_timeout_seconds=5"),
    ],
)
def test_collectives_time_out_unless_the_user_sets_otherwise(monkeypatch, told, expected):
    monkeypatch.setenv("XLA_FLAGS", told)
    prepare_machine()
    prepare_machine()
    assert os.environ["XLA_FLAGS"] == expected


@pytest.mark.parametrize("cache", [True, False])
def test_programs_are_kept_in_the_users_cache_unless_told_otherwise(monkeypatch, tmp_path, cache):
    told, update, shared = {}, jax.config.update, jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    update("jax_compilation_cache_dir", None)  # as for a user
    try:
        monkeypatch.setattr(jax.config, "update", told.__setitem__)
        prepare_machine(cache=cache)
    finally:
        update("jax_compilation_cache_dir", shared)
    assert told.get("jax_enable_compilation_cache", True) is cache
    kept = str(tmp_path / "lorafusion" / "programs") if cache else None
    assert told.get("jax_compilation_cache_dir") == kept


def test_an_adapter_that_got_worse_is_named(lorafusion, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished[1], run)
    worse = {"kind": "eval", "slot": 11, "adapter": "law", "step": 6, "eval_loss": 9.75, "eval_tokens": 4, "time": 0.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(worse) + "\n")
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    assert '"finished"' in events.pop()
    (run / "events.jsonl").write_text("".join(events))  # as if a kill came before its end was told
    for command in ("status", "resume"):
        outcome = lorafusion(command, run)
        assert outcome.code == 0, outcome.err
        assert re.search(r"law: held-out loss rose from 8\.\d+ to 9\.7500 in training", outcome.out), command
        assert "med: held-out" not in outcome.out
    assert "rose" not in lorafusion("status", finished[1]).out
