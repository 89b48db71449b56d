"""An adapter fails alone, whatever it has: the others' weights and metrics are bitwise those of the healthy run, the
run ends with exit code 3, and it can be resumed from a checkpoint before or after the failure.
"""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import small_jobs
from more_cases import nightly
from sick_adapters import ALWAYS, ALWAYS_ON_A_MESH, CASES, Case, install, with_optim

from lorafusion_jax.config import load_config
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import RunFolder, resume, train

NAMES = ("bad", "law")
ONE_DEVICE = {"stages": 1, "data": 1}
TWO_BY_TWO = {"stages": 2, "data": 2}
LORA = {"rank": 4, "dropout": 0.1}
WORDS_OF = {"bad": (1, 2), "law": (8, 9)}  # of a prompt and a completion: a tile, and the three that are left


def of(cases, always):
    """The cases as parameters; those that are not always run are marked."""
    marks = {False: [pytest.mark.nightly], True: []}
    return [pytest.param(case, id=case.name, marks=marks[case.name in always]) for case in cases]


@pytest.fixture(scope="module")
def make_config(tmp_path_factory, tiny_base):
    """make_config(mesh, optim, kind) → the job, with these optimizer settings of the sick adapter, and its base
    stored so."""
    folder = tmp_path_factory.mktemp("job")
    for name in NAMES:
        draw = random.Random(name)
        asked, said = WORDS_OF[name]
        words = (*small_jobs.WORDS, *["numbers"] * 20) if name == "bad" else small_jobs.WORDS
        rows = [
            {
                "prompt": " ".join(draw.choices(words, k=asked)),
                "completion": " " + " ".join(draw.choices(words, k=said)),
            }
            for _ in range(9)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entries = [
        {"name": name, "data": {"train": f"{name}.jsonl"}, "lora": LORA, "seed": seed}
        for seed, name in enumerate(NAMES)
    ]

    def make(mesh, optim=None, kind="none"):
        sections = {
            # programs as in tests/cli; of three samples, one shares a microbatch of two replicas with the other adapter
            "batch": {"capacity_tokens": 64, "tile_tokens": 16, "global_samples": 3},
            "optim": {"lr": 1e-3},
            "save": {"every_steps": 1 if mesh == TWO_BY_TWO else 2, "keep": 20},
        }
        config = load_config(small_jobs.write_job(folder, tiny_base, entries, mesh=mesh, **sections))
        stored = config.base.model_copy(update={"quantize": kind})
        return with_optim(config.model_copy(update={"base": stored}), "bad", optim or {})

    return make


def weights_of(run, name, step=None):
    folder = RunFolder(run)
    arrays = read_adapter(folder.latest(name) if step is None else folder.adapter_step(name, step))[1]
    return {f"{path} {part}": array for path, pair in arrays.items() for part, array in zip("AB", pair, strict=True)}


def steps_of(run, name):
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "step" and row["adapter"] == name]
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def assert_the_other_is_well(run, reference):
    weights, expected = weights_of(run, "law"), weights_of(reference, "law")
    assert weights.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(weights[key], array, err_msg=key)
    assert steps_of(run, "law") == steps_of(reference, "law")
    assert len(steps_of(run, "law")) == 3


def assert_failed_alone(result, case: Case):
    assert result.exit_code == 3
    assert {name: adapter.status for name, adapter in result.adapters.items()} == {
        "bad": "failed",
        "law": "done",
    }
    bad = result.adapters["bad"]
    assert case.reason in bad.reason
    assert len(steps_of(result.folder, "bad")) == bad.step
    refused = [row for row in read_rows(result.folder / "events.jsonl") if row["kind"] == "export-failed"]
    assert {row["code"] for row in refused} == ({"export.not-finite"} if case.hurt and bad.step else set())
    exported = RunFolder(result.folder).latest("bad")
    assert exported is not None or case.hurt or not bad.step
    if exported is not None:
        assert all(np.isfinite(array).all() for array in weights_of(result.folder, "bad").values())
        record = json.loads((exported / "run.json").read_text())
        assert (record["step"], record["failed"]) == (bad.step, None if case.hurt else bad.reason)


@pytest.mark.parametrize("case", of(CASES, ALWAYS))
def test_one_device(case, make_config, healthy, tmp_path, monkeypatch):
    reference = healthy(ONE_DEVICE)
    install(monkeypatch, case)
    run = tmp_path / "run"
    assert_failed_alone(train(make_config(ONE_DEVICE, case.optim), run), case)
    assert_the_other_is_well(run, reference)


@pytest.mark.parametrize("case", of(CASES, ALWAYS_ON_A_MESH))
def test_two_stages_by_two_replicas(case, make_config, healthy, tmp_path, monkeypatch):
    reference = healthy(TWO_BY_TWO)
    install(monkeypatch, case)
    run = tmp_path / "run"
    result = train(make_config(TWO_BY_TWO, case.optim), run)
    assert_failed_alone(result, case)
    assert_the_other_is_well(run, reference)
    step = result.adapters["bad"].step
    if case.wound is not None and case.at:  # no stage has a step that another refused
        assert step == 1
        expected = weights_of(reference, "bad", step)
        for key, array in weights_of(run, "bad", step).items():
            wounded = np.abs(array) > 1e38  # a finite number that the wound itself wrote
            assert not wounded.any() or case.name == "A 3e38"
            np.testing.assert_array_equal(np.where(wounded, expected[key], array), expected[key], err_msg=key)


@pytest.fixture(scope="module")
def healthy_on(make_config, tmp_path_factory):
    """healthy_on(kind) → a run in which nobody is sick, on a base that is stored so."""
    runs = {}

    def run(kind):
        if kind not in runs:
            runs[kind] = tmp_path_factory.mktemp("healthy") / kind
            assert train(make_config(ONE_DEVICE, kind=kind), runs[kind]).exit_code == 0
        return runs[kind]

    return run


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["int8", "nf4", "fp8"])
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_quantised_base(kind, case, make_config, healthy_on, tmp_path, monkeypatch):
    reference = healthy_on(kind)
    install(monkeypatch, case)
    run = tmp_path / "run"
    assert_failed_alone(train(make_config(ONE_DEVICE, case.optim, kind), run), case)
    assert_the_other_is_well(run, reference)


@pytest.mark.parametrize("mesh", [nightly(ONE_DEVICE), TWO_BY_TWO], ids=["one device", "two by two"])
def test_a_run_goes_on_after_a_failure(mesh, make_config, healthy, tmp_path):
    """The oldest checkpoint knows of no failure, the newest but one does."""
    reference, run = healthy(mesh), tmp_path / "run"
    assert train(make_config(mesh, {"eps": 1e-50, "schedule": "constant"}), run).exit_code == 3
    for cut in (-1, 1):
        slots = sorted(int(slot.name) for slot in (run / "state").iterdir())
        for slot in slots[cut:]:
            shutil.rmtree(run / "state" / str(slot))
        result = resume(run)
        assert result.exit_code == 3
        assert result.adapters["bad"].status == "failed"
        assert_the_other_is_well(run, reference)


def test_a_failed_adapter_can_be_dropped(make_config, healthy, tmp_path):
    run = tmp_path / "run"
    assert train(make_config(ONE_DEVICE, {"eps": 1e-50, "schedule": "constant"}), run).exit_code == 3
    before = RunFolder(run).read_plan()
    slots = sorted(int(slot.name) for slot in (run / "state").iterdir())
    for slot in slots[1:]:
        shutil.rmtree(run / "state" / str(slot))
    result = resume(run, drop=["bad"])
    assert result.exit_code == 3
    assert result.plan.num_slots < before.num_slots
    assert result.plan.slots[: slots[0]] == before.slots[: slots[0]]
    assert not any(ref.adapter == "bad" for slot in result.plan.slots[slots[0] :] for ref in slot.samples)
    assert result.adapters["law"].status == "done"
    for key, array in weights_of(healthy(ONE_DEVICE), "law").items():
        np.testing.assert_allclose(weights_of(run, "law")[key], array, rtol=0, atol=2e-5)
    assert resume(run).exit_code == 3  # nothing left to do, nothing forgotten


def test_an_adapter_that_still_trains_can_be_dropped(make_config, tmp_path):
    run = tmp_path / "run"
    assert train(make_config(ONE_DEVICE), run).exit_code == 0
    slots = sorted(int(slot.name) for slot in (run / "state").iterdir())
    for slot in slots[1:]:
        shutil.rmtree(run / "state" / str(slot))
    result = resume(run, drop=["bad"])
    bad = result.adapters["bad"]
    assert (bad.status, bad.reason) == ("failed", f"dropped by hand at slot {slots[0]}")
    assert bad.step < 3
    assert result.adapters["law"].status == "done"
    told = [row for row in read_rows(run / "events.jsonl") if row["kind"] == "adapter-failed"]
    assert [row["adapter"] for row in told] == ["bad"]


@pytest.mark.parametrize(("name", "code"), [("nobody", "resume.unknown-adapter"), ("law", "resume.done")])
def test_what_cannot_be_dropped_is_refused(name, code, healthy):
    run = healthy(ONE_DEVICE)
    before = RunFolder(run).plan_file.read_bytes()
    with pytest.raises(ConfigError) as caught:
        resume(run, drop=[name])
    assert caught.value.code == code
    assert RunFolder(run).plan_file.read_bytes() == before
