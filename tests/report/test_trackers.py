"""Trackers get a series per adapter under the same names, are loaded only on request, and never end a run.

The real writers are tested where they are installed: pip install tensorboardX tensorboard wandb mlflow-skinny trackio
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lorafusion_jax.config.load import parse_config
from lorafusion_jax.config.read import Source
from lorafusion_jax.errors import ConfigError, LoraFusionError, install_line
from lorafusion_jax.report.events import AdapterEvaluated, PhaseBegun, RunStarted, SlotDone, StateSaved, StepTaken
from lorafusion_jax.report.trackers import missing_packages, trackers
from lorafusion_jax.report.trackers.series import scalars
from lorafusion_jax.training.relayout import apply_resume_overrides

STEP = StepTaken(slot=9, adapter="law", step=3, loss=1.5, grad_norm=0.5, lr=1e-4, loss_tokens=7)
OTHER = replace(STEP, adapter="tax", loss=2.5)
EVAL = AdapterEvaluated(slot=9, adapter="law", step=3, eval_loss=1.25, eval_tokens=9)
SLOT = SlotDone(slot=10, slots=20, useful_tokens_per_s=900.0, adapter_eta_s={"law": 3.0})
STARTED = RunStarted(
    slot=4, device="cpu", slots=20, density=1.0, adapters={}, taken={"law": 2}, capacity_tokens=8, trainable=1, plan="",
    frozen=1,
)  # fmt: skip
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
ENABLED = {"tensorboard": True, "wandb": "lab/tuning", "mlflow": "tuning", "trackio": "tuning"}


def job(**report):
    adapters = [
        {"name": "law", "data": {"train": "law.jsonl"}, "lora": {"rank": 4}},
        {"name": "tax", "data": {"train": ["a.jsonl", "b.jsonl"]}},
    ]
    values = {"base": {"model": "models/llama"}, "adapters": adapters, "report": report}
    return parse_config(Source(path=Path("jobs.yaml"), values=values))


class Recording:
    """A package of which every call is recorded, as (name, arguments)."""

    def __init__(self, monkeypatch, name: str, fails: str = ""):
        self.calls: list[tuple] = []
        calls = self.calls
        module = ModuleType(name)

        class Result:
            experiment_id = "7"

            def __init__(self):
                self.info = SimpleNamespace(run_id=f"run-{len(calls)}")

            def __getattr__(self, method):
                def call(*arguments, **options):
                    calls.append((method, arguments, options))
                    if method == fails:
                        raise OSError("no connection")
                    return [] if method in ("search_runs", "hparams") else Result()

                return call

        def begin(*arguments, **options):
            calls.append((name, arguments, options))
            return Result()

        for public in ("init", "SummaryWriter", "MlflowClient"):
            setattr(module, public, begin)
        module.summary = Result()
        monkeypatch.setitem(sys.modules, name, module)

    def of(self, *names):
        return [call for call in self.calls if call[0] in names]


def send(config, folder, *events):
    with trackers(config, folder) as (listener,):
        for event in events:
            listener(event)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_an_error_with_the_command_that_installs_it(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)  # import fails, whatever is installed
    config = job(**{name: ENABLED[name]})
    with pytest.raises(ConfigError) as caught, trackers(config, tmp_path):
        pass
    assert caught.value.code == "report.missing-package"
    command, _, setting = caught.value.fix.partition("   or without it: ")
    assert command == install_line(name)
    with trackers(apply_resume_overrides(config, [setting]), tmp_path) as listeners:  # also of a run that began with it
        assert listeners == []


def test_all_missing_packages_are_named_at_once(tmp_path, monkeypatch):
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    settings = {name: ENABLED[name] for name in ("wandb", "trackio")}
    with pytest.raises(LoraFusionError) as caught, trackers(job(**settings), tmp_path):
        pass
    assert all(install_line(name) in str(caught.value) for name in settings)


def test_nothing_is_loaded_unless_asked_for(tmp_path, monkeypatch):
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)
    with trackers(job(), tmp_path) as listeners:
        assert listeners == []
    assert missing_packages(job().report) == []


def test_tensorboard_has_a_folder_per_adapter_with_the_same_tags(tmp_path, monkeypatch):
    board = Recording(monkeypatch, "tensorboardX")
    send(job(tensorboard=True), tmp_path, PhaseBegun(text="loading"), STARTED, STEP, OTHER, EVAL, SLOT)
    opened = {arguments[0]: options for name, arguments, options in board.of("tensorboardX")}
    home = tmp_path / "tensorboard"
    assert opened == {str(home / "law"): {"purge_step": 3}, str(home / "tax"): {}, str(home / "_run"): {}}
    written = [arguments for _, arguments, _ in board.of("add_scalar")]
    assert ("loss", 1.5, 3) in written
    assert ("loss", 2.5, 3) in written
    assert ("useful_tokens_per_s", 900.0, 10) in written
    (law, _), (tax, _) = [arguments for _, arguments, _ in board.of("hparams")]
    assert (law["lora.rank"], tax["lora.rank"], law["base.model"]) == (4, 16, "llama")
    assert tax["data.train"] == "['a.jsonl', 'b.jsonl']"
    assert len(board.of("close")) == 3


def test_wandb_has_a_run_per_adapter_in_a_group(tmp_path, monkeypatch):
    wandb = Recording(monkeypatch, "wandb")
    send(job(wandb="lab/tuning"), tmp_path / "exp1", StateSaved(slot=3, path="state/3", seconds=0.1), STEP, OTHER)
    law, tax = [options for _, _, options in wandb.of("wandb")]
    assert (law["project"], law["entity"], law["group"], law["name"]) == ("tuning", "lab", "exp1", "law")
    assert law["tags"] == ["sft", "adapter"]
    assert law["config"]["lora.rank"] == 4
    assert law["id"] != tax["id"]
    assert (law["resume"], law["reinit"]) == ("allow", "create_new")
    logged = [(arguments[0]["loss"], options["step"]) for _, arguments, options in wandb.of("log")]
    assert logged == [(1.5, 3), (2.5, 3)]
    assert len(wandb.of("finish")) == 2


def test_mlflow_has_a_run_per_adapter_in_an_experiment(tmp_path, monkeypatch):
    mlflow = Recording(monkeypatch, "mlflow")
    send(job(mlflow="tuning"), tmp_path / "exp1", STEP, EVAL, OTHER)
    names = [options["run_name"] for _, _, options in mlflow.of("create_run")]
    assert names == ["exp1/law", "exp1/tax"]
    metrics = [(arguments[1], arguments[2], options["step"]) for _, arguments, options in mlflow.of("log_metric")]
    assert ("loss", 1.5, 3) in metrics
    assert ("eval_loss", 1.25, 3) in metrics
    assert len(mlflow.of("set_terminated")) == 2


def test_trackio_has_a_run_per_adapter_in_a_group(tmp_path, monkeypatch):
    trackio = Recording(monkeypatch, "trackio")
    send(job(trackio="tuning"), tmp_path / "exp1", STEP, OTHER)
    assert [(o["project"], o["group"], o["name"]) for _, _, o in trackio.of("trackio")] == [
        ("tuning", "exp1", "exp1-law"),
        ("tuning", "exp1", "exp1-tax"),
    ]


@pytest.mark.parametrize(
    ("name", "fails"),
    [("tensorboard", "add_scalar"), ("wandb", "log"), ("mlflow", "log_metric"), ("trackio", "finish")],
)
def test_a_tracker_that_fails_does_not_end_the_run(name, fails, tmp_path, monkeypatch, capsys):
    package = Recording(monkeypatch, PACKAGES[name], fails)
    send(job(**{name: ENABLED[name]}), tmp_path, STEP, OTHER, EVAL)
    assert len(package.of(fails)) == 1
    text = capsys.readouterr().err
    assert text.count(f"report.{name} failed and gets no more numbers: no connection. The run goes on.") == 1


def test_trackers_close_when_the_run_fails(tmp_path, monkeypatch):
    board = Recording(monkeypatch, "tensorboardX")

    def broken_run():
        with trackers(job(tensorboard=True), tmp_path) as (listener,):
            listener(STEP)
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        broken_run()
    assert board.of("close")


def test_metrics_of_an_objective_are_numbers_of_the_adapter():
    assert scalars(replace(STEP, metrics={"margin": 0.25}))["margin"] == 0.25


@pytest.mark.parametrize("project", ["a/b/c", "/a", "a/", "a:b"])
def test_a_project_has_one_entity_at_most(project):
    with pytest.raises(ConfigError, match=r"report\.wandb"):
        job(wandb=project)


@pytest.mark.filterwarnings("ignore")
class TestRealWriters:
    """Offline, with the packages themselves."""

    def test_tensorboard(self, tmp_path):
        pytest.importorskip("tensorboardX")
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        send(job(tensorboard=True), tmp_path, STEP, OTHER, EVAL, SLOT)
        for adapter, loss in (("law", 1.5), ("tax", 2.5)):
            events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / adapter)).Reload()
            (point,) = events.Scalars("loss")
            assert (point.step, point.value) == (3, loss)
            assert events.PluginTagToContent("hparams")

    def test_wandb(self, tmp_path, monkeypatch):
        pytest.importorskip("wandb")
        for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "exp1").mkdir()
        send(job(wandb="tuning"), tmp_path / "exp1", STEP, OTHER, EVAL)
        assert len(list((tmp_path / "exp1" / "wandb").glob("offline-run-*"))) == 2

    def test_mlflow(self, tmp_path, monkeypatch):
        mlflow = pytest.importorskip("mlflow")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
        send(job(mlflow="tuning"), tmp_path / "exp1", STEP, EVAL)
        send(job(mlflow="tuning"), tmp_path / "exp1", STARTED, replace(STEP, step=4))  # resumed
        client = mlflow.MlflowClient()
        experiment = client.get_experiment_by_name("tuning")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.data.params["lora.rank"] == "4"
        assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == [3, 4]
        assert run.info.status == "FINISHED"

    def test_trackio(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
        pytest.importorskip("trackio")
        send(job(trackio="tuning"), tmp_path / "exp1", STEP, OTHER, replace(EVAL, step=4))
        (database,) = (tmp_path / "trackio").rglob("tuning*.db")
        with contextlib.closing(sqlite3.connect(database)) as connection:
            rows = connection.execute("select run_name, step from metrics order by run_name, step").fetchall()
        assert rows == [("exp1-law", 3), ("exp1-law", 4), ("exp1-tax", 3)]
