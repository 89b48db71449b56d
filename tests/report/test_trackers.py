"""Trackers are loaded only on request and receive numbers under stable names."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest

from lorafusion_jax.config.schema import ReportSettings
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.report.events import PhaseBegun, SlotDone, StateSaved, StepTaken
from lorafusion_jax.report.trackers import scalars, trackers

STEP = StepTaken(slot=9, adapter="law", step=3, loss=1.5, grad_norm=0.5, lr=1e-4, loss_tokens=7)
SLOT = SlotDone(slot=10, slots=20, useful_tokens_per_s=900.0, adapter_eta_s={"law": 3.0})


@pytest.fixture
def board(monkeypatch):
    """A fake tensorboardX that records calls."""
    written, state = [], {"closed": False, "folder": None}

    class SummaryWriter:
        def __init__(self, folder):
            state["folder"] = folder

        def __enter__(self):
            return self

        def __exit__(self, *problem):
            state["closed"] = True

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

    module = ModuleType("tensorboardX")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    return written, state


@pytest.fixture
def weights_and_biases(monkeypatch):
    """A fake wandb that records calls."""
    logged, state = [], {"finished": False}

    class Run:
        def log(self, values):
            logged.append(values)

        def finish(self):
            state["finished"] = True

    def init(**named):
        state.update(named)
        return Run()

    module = ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return logged, state


@pytest.mark.parametrize(
    ("settings", "package", "extra"),
    [({"tensorboard": True}, "tensorboardX", "tensorboard"), ({"wandb": "project"}, "wandb", "wandb")],
)
def test_a_missing_package_is_an_error_with_the_command_that_installs_it(
    settings, package, extra, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)  # import fails, whatever is installed
    with pytest.raises(ConfigError) as caught, trackers(ReportSettings(**settings), tmp_path):
        pass
    assert caught.value.code == "report.missing-package"
    assert f'pip install "lorafusion-jax[{extra}]"' in str(caught.value)


def test_nothing_is_loaded_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with trackers(ReportSettings(), tmp_path) as listeners:
        assert listeners == []


def test_tensorboard_gets_scalars_per_adapter_and_step(board, tmp_path):
    written, state = board
    with trackers(ReportSettings(tensorboard=True), tmp_path / "exp1") as (listener,):
        listener(PhaseBegun(text="loading"))
        assert state["folder"] is None, "a run that fails to start leaves no folder behind"
        listener(STEP)
        listener(SLOT)
    assert ("adapter/law/loss", 1.5, 3) in written
    assert ("adapter/law/lr", 1e-4, 3) in written
    assert [entry for entry in written if entry[0].startswith("run/")] == [
        ("run/slots", 20, 10),
        ("run/useful_tokens_per_s", 900.0, 10),
    ]
    assert state == {"closed": True, "folder": str(tmp_path / "exp1" / "tensorboard")}


def test_wandb_gets_the_same_names(weights_and_biases, tmp_path):
    logged, state = weights_and_biases
    with trackers(ReportSettings(wandb="tuning"), tmp_path / "exp1") as (listener,):
        listener(StateSaved(slot=3, path="state/3", seconds=0.1))
        listener(STEP)
    assert logged == [
        {
            "adapter/law/loss": 1.5,
            "adapter/law/grad_norm": 0.5,
            "adapter/law/lr": 1e-4,
            "adapter/law/loss_tokens": 7,
            "slot": 9,
        }
    ]
    assert (state["project"], state["name"], state["finished"]) == ("tuning", "exp1", True)


def test_metrics_of_an_objective_are_scalars_of_the_adapter():
    assert scalars(replace(STEP, metrics={"margin": 0.25}))["adapter/law/margin"] == 0.25


def test_trackers_close_when_the_run_fails(board, tmp_path):
    _, state = board

    def broken_run():
        with trackers(ReportSettings(tensorboard=True), tmp_path) as (listener,):
            listener(STEP)
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        broken_run()
    assert state["closed"]
