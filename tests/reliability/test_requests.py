"""What users ask of a run while it trains happens once, at a slot that every later sitting comes to, and moves the
numbers of nobody else: bitwise before that slot, and equal to rounding after it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import small_jobs
from more_cases import nightly
from sick_adapters import settings, with_optim
from watched_runs import asks, assert_same_numbers, crash_after, events_of, losses_of, statuses, weights_of

from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.checkpoint.requests import remove_parts, request_files, write_request
from lorafusion_jax.config import load_config
from lorafusion_jax.training import RunFolder, resume, train
from lorafusion_jax.training.revisions import Revisions

NAMES = ("bad", "law")
WELL = ("law",)
ONE_DEVICE = {"stages": 1, "data": 1}
TWO_BY_TWO = {"stages": 2, "data": 2}
MESHES = pytest.mark.parametrize("mesh", [ONE_DEVICE, nightly(TWO_BY_TWO)], ids=["one device", "two by two"])
LORA = {"rank": 4, "dropout": 0.1}
OFTEN = {"every_steps": 2, "keep": 20}  # of runs that are cut
SICK = settings("adamw lr 1e38", lr=1e38)


@pytest.fixture(scope="module")
def make_config(tmp_path_factory, tiny_base):
    """make_config(mesh, optim, save, **train) → two adapters of six steps each; optim is of the first."""
    folder = tmp_path_factory.mktemp("job")
    draw = random.Random(3)
    for name in NAMES:
        rows = [
            {"prompt": " ".join(draw.choices(small_jobs.WORDS, k=6)), "completion": " graph slot tile"}
            for _ in range(12)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entries = [{"name": n, "data": {"train": f"{n}.jsonl"}, "lora": LORA, "seed": s} for s, n in enumerate(NAMES)]

    def make(mesh, optim=None, save=None, **train):
        config = load_config(
            small_jobs.write_job(
                folder,
                tiny_base,
                entries,
                mesh=mesh,
                batch={"capacity_tokens": 64, "tile_tokens": 16, "global_samples": 2},  # programs as in tests/cli
                optim={"lr": 1e-3},
                save=save or {"every_steps": 100},
                train={"log_every_s": 0, "plan_seconds": 0.1, **train},
            )
        )
        return with_optim(config, "bad", optim or {})

    return make


@MESHES
def test_slots_of_a_failed_adapter_are_free_where_the_job_says_so(mesh, make_config, healthy, tmp_path):
    kept = train(make_config(mesh, SICK.optim), tmp_path / "kept")
    freed = train(make_config(mesh, SICK.optim, OFTEN, on_failed="replan"), tmp_path / "freed")
    assert kept.exit_code == freed.exit_code == 3
    assert freed.plan.num_slots < kept.plan.num_slots
    assert statuses(freed) == {"law": "done", "bad": "failed"}
    assert_same_numbers(tmp_path / "kept", healthy(mesh), WELL, atol=0)
    assert_same_numbers(tmp_path / "freed", healthy(mesh), WELL)
    stopped = dict(freed.plan.stopped)["bad"]
    assert not any(ref.adapter == "bad" for slot in freed.plan.slots[stopped:] for ref in slot.samples)
    slots = sorted(int(slot.name) for slot in (tmp_path / "freed" / "state").iterdir())
    before = weights_of(tmp_path / "freed", "law")
    for slot in slots[1:]:  # the oldest checkpoint does not know of the failure
        shutil.rmtree(tmp_path / "freed" / "state" / str(slot))
    again = resume(tmp_path / "freed")
    assert (again.exit_code, again.plan) == (3, freed.plan)
    for key, array in weights_of(tmp_path / "freed", "law").items():
        np.testing.assert_array_equal(array, before[key])
    assert len(events_of(tmp_path / "freed", "adapter-failed")) == 1


@MESHES
def test_a_cancelled_adapter_ends_and_leaves_its_folder(mesh, make_config, healthy, tmp_path):
    run = tmp_path / "run"
    result = train(make_config(mesh), run, listeners=[asks(run, ("bad", 2, "bad", "cancel"))])
    assert (result.exit_code, statuses(result)) == (0, {"law": "done", "bad": "cancelled"})
    bad = result.adapters["bad"]
    assert 2 <= bad.step < 6
    assert RunFolder(run).latest("bad") == RunFolder(run).adapter_step("bad", bad.step)
    assert "Training failed" not in (RunFolder(run).latest("bad") / "README.md").read_text()
    assert losses_of(run, "bad").items() <= losses_of(healthy(mesh), "bad").items()
    assert result.plan.num_slots < RunFolder(healthy(mesh)).read_plan().num_slots
    assert_same_numbers(run, healthy(mesh), WELL)
    assert request_files(run) == []
    assert run_numbers(run)["adapters"]["bad"]["status"] == "cancelled"
    assert [row["action"] for row in events_of(run, "adapter-changed")] == ["cancel"]
    assert resume(run).adapters == result.adapters  # nothing left to do


@MESHES
def test_a_paused_adapter_goes_on_where_it_was(mesh, make_config, healthy, tmp_path):
    run = tmp_path / "run"
    listener = asks(run, ("bad", 2, "bad", "pause"), ("law", 5, "bad", "continue"))
    result = train(make_config(mesh), run, listeners=[listener])
    assert set(statuses(result).values()) == {"done"}
    assert [row["status"] for row in events_of(run, "adapter-changed")] == ["paused", "running"]
    assert_same_numbers(run, healthy(mesh), NAMES)


def test_an_adapter_that_stays_paused_waits_for_a_later_sitting(make_config, healthy, tmp_path):
    run = tmp_path / "run"
    result = train(make_config(ONE_DEVICE), run, listeners=[asks(run, ("bad", 2, "bad", "pause"))])
    assert (result.exit_code, statuses(result)) == (0, {"law": "done", "bad": "paused"})
    assert RunFolder(run).latest("bad") is not None
    assert run_numbers(run)["adapters"]["bad"]["status"] == "paused"
    assert statuses(resume(run))["bad"] == "paused"
    write_request(run, "continue", "bad")
    assert set(statuses(resume(run)).values()) == {"done"}
    assert_same_numbers(run, healthy(ONE_DEVICE), NAMES)


def test_requests_about_one_adapter_at_one_slot_are_all_told(make_config, tmp_path):
    """As of a user who changes their mind while a run compiles: the last one counts, and `status` says so."""
    run, wanted = tmp_path / "run", ["pause", "continue", "pause"]
    result = train(make_config(ONE_DEVICE), run, listeners=[asks(run, *(("bad", 2, "bad", what) for what in wanted))])
    told = events_of(run, "adapter-changed")
    assert len({row["slot"] for row in told}) == 1
    assert [row["action"] for row in told] == wanted
    assert result.adapters["bad"].status == run_numbers(run)["adapters"]["bad"]["status"] == "paused"


def test_an_adapter_that_finishes_takes_the_step_that_it_has_begun(make_config, healthy, tmp_path):
    run = tmp_path / "run"
    result = train(make_config(ONE_DEVICE), run, listeners=[asks(run, ("bad", 2, "bad", "finish"))])
    bad = result.adapters["bad"]
    assert (bad.status, bad.step) == ("done", bad.num_steps)
    assert 2 <= bad.step < 6
    assert losses_of(run, "bad").keys() == set(range(1, bad.step + 1))
    losses, expected = losses_of(run, "bad"), losses_of(healthy(ONE_DEVICE), "bad")
    np.testing.assert_allclose(list(losses.values()), [expected[step] for step in losses], rtol=0, atol=2e-4)
    assert_same_numbers(run, healthy(ONE_DEVICE), WELL)


def test_a_weight_changes_who_is_first(make_config, healthy, tmp_path):
    run = tmp_path / "run"
    result = train(make_config(ONE_DEVICE), run, listeners=[asks(run, ("bad", 1, "bad", "weight", 8.0))])
    last = {name: slot for slot, name, _ in result.plan.batches_ending()}
    assert last["bad"] < min(last[name] for name in WELL)
    assert_same_numbers(run, healthy(ONE_DEVICE), NAMES)


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("cancel", "replanned"), nightly("cancel", "adapter-changed"), nightly("cancel", "saved"),
        nightly("pause", "replanned"), nightly("pause", "adapter-changed"), ("pause", "saved"),
    ],
)  # fmt: skip
def test_a_request_outlives_a_kill_and_is_carried_out_once(kind, action, make_config, healthy, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    config = make_config(ONE_DEVICE, save=OFTEN)
    requests = [("bad", 2, "bad", action)] + ([("law", 5, "bad", "continue")] if action == "pause" else [])
    expected = train(config, straight, listeners=[asks(straight, *requests)])
    listeners = [asks(killed, *requests), crash_after(kind, 3 if kind == "saved" else 1)]
    with pytest.raises(KeyboardInterrupt):
        train(config, killed, listeners=listeners)
    result = resume(killed, listeners=listeners[:1])
    assert result.adapters == expected.adapters
    for name in NAMES:
        assert losses_of(killed, name) == losses_of(straight, name)  # bitwise
        for key, array in weights_of(killed, name).items():
            np.testing.assert_array_equal(array, weights_of(straight, name)[key], err_msg=f"{name} {key}")
    told = [(row["slot"], row["action"]) for row in events_of(killed, "adapter-changed")]
    assert told == [(row["slot"], row["action"]) for row in events_of(straight, "adapter-changed")]
    assert request_files(killed) == []


def test_a_change_after_the_checkpoint_comes_with_what_is_asked_before_the_resume(make_config, tmp_path):
    """The kill came between a change and the next checkpoint; the plan is made again before the slot of the change."""
    run = tmp_path / "run"
    listeners = [asks(run, ("bad", 3, "bad", "cancel")), crash_after("adapter-changed")]
    with pytest.raises(KeyboardInterrupt):
        train(make_config(ONE_DEVICE, save=OFTEN), run, listeners=listeners)
    (before,) = [change for move in RunFolder(run).moves() for change in move["changes"]]
    newest = max(int(slot.name) for slot in (run / "state").iterdir())
    if newest == before["slot"]:
        shutil.rmtree(run / "state" / str(newest))
    write_request(run, "weight", "law", 2.0)
    assert statuses(resume(run)) == {"law": "done", "bad": "cancelled"}
    recorded = [change for move in RunFolder(run).moves() for change in move["changes"]]
    told = [(row["slot"], row["adapter"], row["action"]) for row in events_of(run, "adapter-changed")]
    assert told == [(change["slot"], change["adapter"], change["action"]) for change in recorded]
    assert recorded[0]["slot"] < before["slot"]


def test_what_cannot_be_done_is_said_and_the_run_goes_on(make_config, healthy, tmp_path):
    run = tmp_path / "run"
    listener = asks(run, ("law", 2, "bad", "continue"), ("law", 2, "nobody", "pause"))

    def scribbles(event):
        if event.kind == "step" and (event.adapter, event.step) == ("law", 3):
            (run / "control" / "note.json").write_text("cancel everything")

    result = train(make_config(ONE_DEVICE), run, listeners=[listener, scribbles])
    assert set(statuses(result).values()) == {"done"}
    told = [row["text"] for row in events_of(run, "request-refused")]
    assert len(told) == 3
    assert "bad is running, not paused" in told[0]
    assert "no adapter 'nobody'" in told[1]
    assert "note.json is not a request" in told[2]
    assert_same_numbers(run, healthy(ONE_DEVICE), NAMES, atol=0)  # bitwise: nothing was planned again


@pytest.mark.parametrize("left", ["a plan that is not in force", "the plan and the request"])
def test_a_kill_while_a_request_is_carried_out(left, make_config, healthy, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        if left == "a plan that is not in force":
            written = RunFolder.write_record

            def killed(self, record):
                if "moves" in record:
                    raise KeyboardInterrupt
                written(self, record)

            patch.setattr(RunFolder, "write_record", killed)
        else:

            def killed(self, names):
                if list(filter(None, names)):
                    raise KeyboardInterrupt

            patch.setattr(Revisions, "_remove_requests", killed)
        with pytest.raises(KeyboardInterrupt):
            train(make_config(ONE_DEVICE, save=OFTEN), run, listeners=[asks(run, ("bad", 2, "bad", "cancel"))])
    assert len(request_files(run)) == 1
    result = resume(run)
    assert statuses(result) == {"law": "done", "bad": "cancelled"}
    assert [row["action"] for row in events_of(run, "adapter-changed")] == ["cancel"]
    assert [len(move["changes"]) for move in RunFolder(run).moves()] == [1]
    assert request_files(run) == []
    assert_same_numbers(run, healthy(ONE_DEVICE), WELL)


def test_a_run_moves_to_other_devices_after_a_request(make_config, healthy, tmp_path):
    run = tmp_path / "run"
    listeners = [asks(run, ("bad", 2, "bad", "pause")), crash_after("saved", 4)]
    with pytest.raises(KeyboardInterrupt):
        train(make_config(ONE_DEVICE, save=OFTEN), run, listeners=listeners)
    for slot in sorted(int(slot.name) for slot in (run / "state").iterdir())[1:]:  # back to before the request
        shutil.rmtree(run / "state" / str(slot))
    assert statuses(resume(run, ["mesh.stages=2", "mesh.data=2"])) == {"law": "done", "bad": "paused"}
    write_request(run, "continue", "bad")
    assert set(statuses(resume(run)).values()) == {"done"}
    assert_same_numbers(run, healthy(ONE_DEVICE), NAMES)


def test_parts_of_killed_processes_go_and_others_stay(tmp_path):
    """A request that is being written has the number of a process that lives."""
    folder = tmp_path / "control"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    names = [f".{'7' * 20}-{ended.pid}.json.part", f".{'7' * 20}-{os.getpid()}.json.part", ".mine.json.part", "7.json"]
    for name in names:
        (folder / name).write_text("{")
    remove_parts(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == sorted(names[1:])
    remove_parts(tmp_path / "elsewhere")
