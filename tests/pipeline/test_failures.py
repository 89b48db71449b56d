"""Whatever fails on a stage ends the run with one error that says where, and the last checkpoint goes on from there."""

from __future__ import annotations

import errno
import faulthandler
import re
import sys

import jax
import numpy as np
import pytest
from mixed import assert_equal, read_trained, write_mixed_job
from more_cases import nightly

from lorafusion_jax.checkpoint.store import StateStore
from lorafusion_jax.config import load_config
from lorafusion_jax.errors import RunError
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.session import AdapterState
from lorafusion_jax.session.assembler import Batches
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.training import RunFolder, resume, train

NAMES = ("law", "med")
TIME_LIMIT_S = 180  # of one test, with compiling


@pytest.fixture(autouse=True)
def no_hang():
    """A test that hangs ends the process with all stacks, instead of holding up everybody."""
    faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_base):
    job = write_mixed_job(
        tmp_path_factory.mktemp("job"),
        tiny_base,
        NAMES,
        mesh={"stages": 2},
        train={"block_layers": 1},
        save={"every_steps": 1},
    )
    return load_config(job, ["adapters.med.lora.targets=[q_proj, down_proj]", "adapters.med.lora.rank=4"])  # like law


@pytest.fixture(scope="module")
def healthy(tmp_path_factory, config, kept_programs):
    """A run without failures, and its plan."""
    folder = tmp_path_factory.mktemp("healthy") / "run"
    result = train(config, folder)
    assert result.exit_code == 0
    return read_trained(folder), result.plan


def late_slot(plan) -> int:
    """A slot after the first checkpoint that holds both adapters."""
    ends = [slot for slot, _, _ in plan.batches_ending()]
    return next(
        number
        for number, slot in enumerate(plan.slots)
        if number > min(ends) + plan.num_stages and {ref.adapter for ref in slot.samples} == set(NAMES)
    )


def adapters_of(plan, slot: int) -> str:
    return ", ".join(plan.slots[slot].adapters)


def assert_goes_on(run, whole) -> None:
    """Resumes the run; it becomes what it would have been."""
    assert [row["kind"] for row in read_rows(run / "events.jsonl")][-1] == "stopped"
    assert resume(run).exit_code == 0
    assert_equal(whole, read_trained(run), 0.0)


@pytest.mark.parametrize(
    ("method", "stage", "text", "code"),
    [
        nightly("forward", 1, "INTERNAL: the link is down", "train.stage-failed"),
        ("backward", 0, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3 GiB", "train.out-of-memory"),
    ],
)
def test_a_program_that_cannot_run(method, stage, text, code, config, healthy, tmp_path, monkeypatch):
    whole, plan = healthy
    failing, original = late_slot(plan), getattr(Stage, method)

    def broken(self, slot, *arguments):
        if slot == failing and (self.extent.start > 0) == (stage > 0):
            raise jax.errors.JaxRuntimeError(text)
        return original(self, slot, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Stage, method, broken)
        with pytest.raises(RunError) as caught:
            train(config, tmp_path / "run")
    assert caught.value.code == code
    assert f"stage {stage}, slot {failing} ({adapters_of(plan, failing)})" in caught.value.what
    assert caught.value.why == text
    assert "lorafusion resume" in caught.value.fix
    assert_goes_on(tmp_path / "run", whole)


def test_a_program_that_fails_while_it_runs(config, healthy, tmp_path, monkeypatch):
    """The host meets it later, at another stage perhaps; it is told where it began."""
    whole, plan = healthy
    failing, original = late_slot(plan), Stage.forward

    def fail(x):
        raise FloatingPointError("a device that computes wrongly")

    @jax.jit
    def broken(x):
        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def forward(self, slot, batch, x):
        return original(self, slot, batch, broken(x) if slot == failing and x is not None else x)

    with monkeypatch.context() as patch:
        patch.setattr(Stage, "forward", forward)
        with pytest.raises(RunError) as caught:
            train(config, tmp_path / "run")
    assert caught.value.code == "train.stage-failed"
    assert f"stage 1, slot {failing} ({adapters_of(plan, failing)})" in caught.value.what
    assert_goes_on(tmp_path / "run", whole)


def test_a_device_that_fails_before_the_first_microbatch(config, tmp_path, monkeypatch):
    def broken(self, *arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such device")

    monkeypatch.setattr(Stage, "evaluate", broken)
    with pytest.raises(RunError, match=r"the device failed at stage [01]\."):
        train(config, tmp_path / "run")
    assert [row["kind"] for row in read_rows(tmp_path / "run" / "events.jsonl")] == ["started", "stopped"]


def test_a_bug_in_a_stage_is_not_lost(config, healthy, tmp_path, monkeypatch):
    """Nobody waits for an optimizer step of a stage by itself; a run must not go on without it."""
    original, steps = Stage.step, []

    def broken(self, *arguments):
        steps.append(self)
        if self.extent.start > 0 and len(steps) > 3:
            raise KeyError("a bug")
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Stage, "step", broken)
        with pytest.raises(KeyError, match="a bug") as caught:
            train(config, tmp_path / "run")
    (note,) = caught.value.__notes__
    assert re.fullmatch(r"raised at stage 1, slot \d+ \((law|med)\); lorafusion resume RUN continues from before", note)
    assert resume(tmp_path / "run").exit_code == 0
    assert_equal(healthy[0], read_trained(tmp_path / "run"), 0.0)


def test_a_disk_that_is_full(config, healthy, tmp_path, monkeypatch):
    original, calls = StateStore.save, []

    def save(self, slot, states, position):
        calls.append(slot)
        if len(calls) < 2:
            return original(self, slot, states, position)
        with monkeypatch.context() as patch:
            patch.setattr(AdapterState, "write_files", no_space)
            return original(self, slot, states, position)

    def no_space(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StateStore, "save", save)
        with pytest.raises(RunError) as caught:
            train(config, tmp_path / "run")
    assert caught.value.code == "save.no-space"
    assert f"the checkpoint of slot {calls[0]} is intact" in caught.value.fix
    assert_goes_on(tmp_path / "run", healthy[0])


def test_an_adapter_whose_data_is_not_a_number_fails_alone(config, healthy, tmp_path, monkeypatch):
    whole, plan = healthy
    failing, original = late_slot(plan), Batches.of

    def poisoned(self, slot):
        rows = original(self, slot)
        if slot != failing:
            return rows
        return rows._replace(weights=np.where(rows.row_adapter == NAMES.index("med"), np.nan, rows.weights))

    monkeypatch.setattr(Batches, "of", poisoned)
    result = train(config, tmp_path / "run")
    assert result.exit_code == 3
    assert {name: adapter.status for name, adapter in result.adapters.items()} == {"law": "done", "med": "failed"}
    failed = [row for row in read_rows(tmp_path / "run" / "events.jsonl") if row["kind"] == "adapter-failed"]
    assert [row["adapter"] for row in failed] == ["med"]
    assert failed[0]["reason"].startswith("gradient not finite (")
    told = re.search(r" of layers \d+ to \d+, stage [01]\) at step (\d+), slot (\d+)$", failed[0]["reason"])
    assert (int(told[1]), int(told[2]) >= failing) == (failed[0]["step"], True), "the slot that completes the batch"
    seen = read_trained(tmp_path / "run")
    for key, leaf in whole.weights["law"].items():
        np.testing.assert_array_equal(seen.weights["law"][key], leaf)
    assert {key: loss for key, loss in seen.losses.items() if key[0] == "law"} == {
        key: loss for key, loss in whole.losses.items() if key[0] == "law"
    }
    assert all(np.isfinite(leaf).all() for leaf in seen.weights.get("med", {}).values())  # its last good ones
    assert result.adapters["med"].step == failed[0]["kept_step"] < result.adapters["med"].num_steps
    kept = RunFolder(tmp_path / "run").latest("med")
    assert kept is None or kept.name == f"step-{failed[0]['kept_step']:06d}"
