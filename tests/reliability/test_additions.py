"""Adapters that join a run, and adapters that train longer than planned: nothing of the others moves, nothing is lost.

Bitwise before the slot at which the run is planned again, equal to rounding after it, as for every other request; where
nobody else has anything left to train, and from one kill to the next, all is bitwise.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import small_jobs
from more_cases import nightly
from watched_runs import asks, assert_same_numbers, crash_after, events_of, losses_of, statuses, weights_of

from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.checkpoint.requests import request_files, write_request
from lorafusion_jax.checkpoint.verify_folder import verify_folder
from lorafusion_jax.config import load_config
from lorafusion_jax.config.data_sources import read_sources
from lorafusion_jax.config.join import read_joining
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.session.session import Session
from lorafusion_jax.training import RunFolder, resume, train
from lorafusion_jax.training.verify import verify_exports

ONE_DEVICE = {"stages": 1, "data": 1}
TWO_BY_TWO = {"stages": 2, "data": 2}
FIRST = ("law", "med")
ROWS = {"law": 5, "med": 10, "tax": 6}  # the last global batch of law has one sample
SAME = {"optim": {"lr": 1e-3, "schedule": "constant", "warmup": 0.0}, "data": {"max_length": 64}}
LORA = {"rank": 4, "dropout": 0.1}
TAX = {"rank": 8, "dropout": 0.1, "targets": ["q_proj", "v_proj"]}  # a larger rank, and a projection that is new
OFTEN = {"every_steps": 2, "keep": 20}  # of runs that are cut


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    for name, count in ROWS.items():
        small_jobs.write_rows(folder, name, count, longest=8)
    small_jobs.write_rows(folder, "held", 3, longest=8)
    return folder


@pytest.fixture(scope="module")
def make_config(folder, tiny_base):
    """make_config(mesh, epochs of med, save) → law and med."""

    def make(mesh, epochs=1, save=None):
        entries = [{"name": n, "data": {"train": f"{n}.jsonl"}, "lora": LORA, "seed": s} for s, n in enumerate(FIRST)]
        entries[1]["epochs"] = epochs
        batch = {"capacity_tokens": 64, "tile_tokens": 16, "global_samples": 2}  # programs as in tests/cli
        sections = SAME | {"mesh": mesh, "batch": batch, "save": save or {"every_steps": 100}}
        return load_config(small_jobs.write_job(folder, tiny_base, entries, **sections))

    return make


@pytest.fixture(scope="module")
def tax(folder, make_config):
    """Settings of the adapter that joins, from a job file of its own."""
    data = {"train": "tax.jsonl", "eval": "held.jsonl"}
    entry = {"name": "tax", "data": data, "lora": TAX, "seed": 2, "batch": {"global_samples": 2}}
    (folder / "more.yaml").write_text(json.dumps({"adapters": [entry], **SAME}))
    return read_joining(folder / "more.yaml", make_config(ONE_DEVICE))


@pytest.fixture(scope="module")
def asked(make_config, tax, tmp_path_factory):
    """A run that tax joins, in which law is extended when it is done; whoever uses it takes a copy."""
    run = tmp_path_factory.mktemp("asked") / "run"
    assert train(make_config(ONE_DEVICE, save=OFTEN), run, listeners=[asks(run, *requests(tax))]).exit_code == 0
    return run


@pytest.fixture(scope="module")
def with_tax(make_config, tax, tmp_path_factory):
    """A run that has tax from the start: the programs of one that it joins."""
    run, config = tmp_path_factory.mktemp("three") / "run", make_config(ONE_DEVICE)
    (joining,) = tax
    joining = joining.model_copy(update={"data": joining.data.model_copy(update={"eval": None})})
    train(config.model_copy(update={"adapters": (*config.adapters, joining)}), run)
    return run


def steps_of(run):
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "step"]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def requests(tax):
    return ("med", 1, tax, "add"), ("law", 3, "law", "extend", {"epochs": 1})


def cut_to(run, count):
    """Takes all but the oldest checkpoints away."""
    for slot in sorted(int(slot.name) for slot in (run / "state").iterdir())[count:]:
        shutil.rmtree(run / "state" / str(slot))


def assert_bitwise(run, expected, names):
    for name in names:
        assert losses_of(run, name) == losses_of(expected, name)
        for key, array in weights_of(run, name).items():
            np.testing.assert_array_equal(array, weights_of(expected, name)[key], err_msg=f"{name} {key}")


@pytest.mark.parametrize("mesh", [ONE_DEVICE, nightly(TWO_BY_TWO)], ids=["one device", "two by two"])
def test_an_adapter_joins_while_others_train(mesh, make_config, tax, healthy, with_tax, tmp_path):
    run = tmp_path / "run"
    result = train(make_config(mesh), run, listeners=[asks(run, ("law", 1, tax, "add"))])
    assert (result.exit_code, statuses(result)) == (0, dict.fromkeys(ROWS, "done"))
    assert_same_numbers(run, healthy(ONE_DEVICE), FIRST)
    assert_same_numbers(run, with_tax, ["tax"])
    (news,) = events_of(run, "adapter-changed")
    assert (news["action"], news["adapter"], news["num_steps"]) == ("add", "tax", 3)
    if mesh == ONE_DEVICE:
        before = [row for row in steps_of(run) if row["slot"] <= news["slot"]]
        assert before
        assert before == steps_of(healthy(mesh))[: len(before)]  # bitwise
    assert request_files(run) == []
    assert [adapter.name for adapter in RunFolder(run).read_config().adapters] == list(ROWS)
    assert run_numbers(run)["adapters"]["tax"]["status"] == "done"
    assert not [damage for verdict in verify_folder(run) for damage in verdict.damage]
    assert resume(run).adapters == result.adapters  # nothing left to do


def test_what_joined_is_read_back_like_the_others(asked):
    assert verify_exports(asked)["tax"].same
    assert "1 and 5 samples" in (RunFolder(asked).latest("law") / "README.md").read_text()
    assert {name: row["steps"] for name, row in run_numbers(asked)["adapters"].items()} == {
        "law": 6,
        "med": 5,
        "tax": 3,
    }


@pytest.mark.parametrize(("kind", "count"), [nightly("replanned", 1), ("adapter-changed", 2), ("saved", 4)])
def test_an_addition_outlives_a_kill(kind, count, make_config, tax, asked, tmp_path):
    run = tmp_path / "run"
    ask = asks(run, *requests(tax))
    with pytest.raises(KeyboardInterrupt):
        train(make_config(ONE_DEVICE, save=OFTEN), run, listeners=[ask, crash_after(kind, count)])
    assert statuses(resume(run, listeners=[ask])) == dict.fromkeys(ROWS, "done")
    assert_bitwise(run, asked, ROWS)
    told = [(row["slot"], row["adapter"], row["action"]) for row in events_of(run, "adapter-changed")]
    assert told == [(row["slot"], row["adapter"], row["action"]) for row in events_of(asked, "adapter-changed")]
    assert request_files(run) == []


@pytest.mark.parametrize("kept", [0, 1], ids=["from the start", "from the oldest checkpoint"])
def test_a_run_comes_to_its_additions_again(kept, asked, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(asked, run, symlinks=True)
    cut_to(run, kept)
    assert statuses(resume(run)) == dict.fromkeys(ROWS, "done")
    assert_bitwise(run, asked, ROWS)


def test_what_joins_after_the_checkpoint_begins_with_what_it_began_with(make_config, tax, with_tax, tmp_path):
    run, start = tmp_path / "run", tmp_path / "start"
    shutil.copytree(RunFolder(with_tax).latest("tax"), start)
    (start / "SHA256SUMS").unlink()  # edits are allowed
    warm = [
        adapter.model_copy(update={"lora": adapter.lora.model_copy(update={"init_from": str(start)})})
        for adapter in tax
    ]
    config = make_config(ONE_DEVICE, save=OFTEN)
    assert train(config, run, listeners=[asks(run, ("law", 3, warm, "add"))]).exit_code == 0
    before = weights_of(run, "tax")
    cut_to(run, 1)
    settings = start / "adapter_config.json"
    content = settings.read_text()

    def edit(event=None):
        if event is None or event.kind == "started":
            settings.write_text(content + "\n")

    for moments in [edit], []:  # changed after it was checked, and changed before
        with pytest.raises(LoraFusionError, match=r"run\.init-changed.*\n.*\n.*restore it"):
            resume(run, listeners=moments)
    settings.write_text(content)
    assert statuses(resume(run)) == dict.fromkeys(ROWS, "done")
    for key, array in weights_of(run, "tax").items():
        np.testing.assert_array_equal(array, before[key])


def test_what_cannot_join_changes_nothing(make_config, tax, healthy, tmp_path, monkeypatch):
    run, config = tmp_path / "run", make_config(ONE_DEVICE)
    (new,) = tax
    nowhere = new.model_copy(update={"data": new.data.model_copy(update={"train": read_sources("/nowhere.jsonl")})})
    folder_gone = new.model_copy(update={"lora": new.lora.model_copy(update={"init_from": "/nowhere"})})
    large = new.model_copy(update={"name": "large"})
    refused = [
        ([new.model_copy(update={"name": "LAW"})], "LAW"),
        ([new, nowhere.model_copy(update={"name": "geo"})], "/nowhere.jsonl"),
        ([folder_gone], "there is no folder /nowhere"),
        ([large], "memory for more adapters. stage 0 needs 9 GB"),
    ]
    monkeypatch.setattr(
        Session, "lacks_memory", lambda self, c: "stage 0 needs 9 GB" * (c.adapters[-1].name == "large")
    )
    result = train(config, run, listeners=[asks(run, *(("law", 1, adapters, "add") for adapters, _ in refused))])
    told = [row["text"] for row in events_of(run, "request-refused")]
    assert len(told) == len(refused)
    for text, (_, expected) in zip(told, refused, strict=True):
        assert expected in text
    assert RunFolder(run).read_config() == config
    assert RunFolder(run).moves() == []
    assert result.plan == RunFolder(healthy(ONE_DEVICE)).read_plan()
    assert_bitwise(run, healthy(ONE_DEVICE), FIRST)


def test_more_epochs_are_those_of_a_longer_run(make_config, healthy, tmp_path):
    run, longer = tmp_path / "run", tmp_path / "longer"
    ask = asks(run, ("med", 2, "med", "extend", {"epochs": 1}))
    assert train(make_config(ONE_DEVICE), run, listeners=[ask]).adapters["med"].step == 10
    train(make_config(ONE_DEVICE, epochs=2), longer)
    assert_same_numbers(run, longer, ["med"])
    assert_same_numbers(run, healthy(ONE_DEVICE), ["law"])


def test_a_finished_adapter_goes_on_from_its_last_state(asked, healthy, tmp_path):
    assert losses_of(asked, "law").keys() == set(range(1, 7))  # 2, 2 and 1 samples, and once more
    run = tmp_path / "run"
    shutil.copytree(healthy(ONE_DEVICE), run, symlinks=True)
    before = weights_of(run, "med")
    write_request(run, "extend", "law", steps=2)
    result = resume(run)
    law = result.adapters["law"]
    assert (law.status, law.step, law.num_steps) == ("done", 5, 5)
    assert [size for _, size in result.plan.job_of["law"].batch_sizes()] == [2, 2, 1, 2, 2]
    losses, first = losses_of(run, "law"), losses_of(healthy(ONE_DEVICE), "law")
    assert {step: losses[step] for step in first} == first
    assert sorted(path.name for path in RunFolder(run).exported("law"))[-1] == "step-000005"
    for key, array in weights_of(run, "med").items():
        np.testing.assert_array_equal(array, before[key])
    write_request(run, "cancel", "law")
    write_request(run, "extend", "med", epochs=1)
    assert resume(run).adapters["med"].step == 10
    (text,) = [row["text"] for row in events_of(run, "request-refused")]
    assert "law is done" in text


@pytest.mark.parametrize("mesh", [{"data": 2}, nightly(TWO_BY_TWO)], ids=str)
def test_an_adapter_that_joined_moves_to_other_devices_with_the_others(mesh, asked, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(asked, run, symlinks=True)
    cut_to(run, 1)  # before anybody joined: they join on the other devices
    overrides = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    assert statuses(resume(run, overrides)) == dict.fromkeys(ROWS, "done")
    assert_same_numbers(run, asked, ROWS)


def test_requests_of_one_moment_come_one_after_the_other(make_config, tax, tmp_path):
    run = tmp_path / "run"
    ask = asks(run, ("law", 1, tax, "add"), ("law", 1, "tax", "cancel"), ("law", 1, tax, "add"))
    result = train(make_config(ONE_DEVICE), run, listeners=[ask])
    assert statuses(result) == {"law": "done", "med": "done", "tax": "cancelled"}
    assert result.adapters["tax"].step == 0
    (text,) = [row["text"] for row in events_of(run, "request-refused")]
    assert "the run has an adapter 'tax' already" in text
