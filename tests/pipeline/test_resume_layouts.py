"""A checkpoint belongs to no layout: a run that stops on one goes on with another."""

from __future__ import annotations

import pytest
from mixed import assert_equal, read_trained, write_mixed_job

from lorafusion_jax.config import load_config
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import RunFolder, resume, train
from lorafusion_jax.training.relayout import go_on_with

TOLERANCE = 1e-5  # as in test_layouts
NAMES = ("law", "code")  # code has batches of 8 samples in 3 or more slots, so a save falls into the middle of one
SMALL = {"block_layers": 1}


class PowerCut(RuntimeError):
    pass


def cut_at(step: int):
    """A listener that ends the run as a power cut would, some steps after a checkpoint."""

    def listen(event):
        if event.kind == "step" and event.adapter == "law" and event.step == step:
            raise PowerCut

    return listen


@pytest.fixture(scope="module")
def cut_runs(tmp_path_factory, deep_base, quick_compiles):
    """cut_runs(mesh) → a fresh run on that mesh that was cut after a checkpoint, and what it had become uncut."""
    whole = {}

    def make(mesh: dict):
        key = str(mesh)
        folder = tmp_path_factory.mktemp("cut")
        job = write_mixed_job(folder, deep_base(True), NAMES, mesh=mesh, train=SMALL, save={"every_steps": 1})
        config = load_config(job)
        if key not in whole:
            assert train(config, folder / "whole").exit_code == 0
            whole[key] = read_trained(folder / "whole")
        with pytest.raises(PowerCut):
            train(config, folder / "run", listeners=[cut_at(2)])
        return folder / "run", whole[key]

    return make


def in_the_middle_of_a_batch(run) -> bool:
    """Whether the newest checkpoint lies between two microbatches of one global batch."""
    plan, slot = RunFolder(run).read_plan(), max(int(path.name) for path in (run / "state").iterdir())
    batches = [
        {(ref.adapter, ref.batch) for slot in part for ref in slot.samples}
        for part in (plan.slots[:slot], plan.slots[slot:])
    ]
    return bool(batches[0] & batches[1])


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        ({"stages": 2, "layers": [3, 2]}, []),
        ({"stages": 2, "layers": [3, 2]}, ["mesh.layers=[1, 4]"]),
        ({"stages": 2, "layers": [3, 2]}, ["mesh.stages=1", "train.keep=nothing"]),
        ({"stages": 2, "data": 2}, ["mesh.data=1", "mesh.fsdp=2", "mesh.stages=1"]),
        ({"fsdp": 2}, ["mesh.data=2", "mesh.fsdp=1"]),
    ],
    ids=lambda value: " ".join(value).replace("mesh.", "") if isinstance(value, list) else None,
)
def test_a_run_goes_on_elsewhere(cut_runs, mesh, overrides):
    run, whole = cut_runs(mesh)
    assert in_the_middle_of_a_batch(run), "no sums are under way, so the comparison says less"
    assert resume(run, overrides).exit_code == 0
    assert_equal(whole, read_trained(run), TOLERANCE if overrides else 0.0)
    settings = RunFolder(run).read_config()
    for override in overrides:  # and stays there
        section, key = override.partition("=")[0].split(".")
        value = getattr(getattr(settings, section), key)
        assert str(list(value) if isinstance(value, tuple) else value) == override.partition("=")[2]
    started = [row["mesh"] for row in read_rows(run / "events.jsonl") if row["kind"] == "started"]
    assert [row["stages"] for row in started] == [mesh.get("stages", 1), settings.mesh.stages]
    assert resume(run).exit_code == 0  # nothing is left to do, there as here


@pytest.fixture(scope="module")
def planned(tmp_path_factory, deep_base):
    """Configuration and plan of a job for 2 stages and 2 replicas; nothing is trained."""
    from lorafusion_jax.data.prepare import plan_training, prepare

    config = load_config(
        write_mixed_job(tmp_path_factory.mktemp("planned"), deep_base(True), mesh={"stages": 2, "data": 2})
    )
    return config, plan_training(config, prepare(config))


def test_a_plan_for_few_stages_is_not_run_on_more(planned):
    config, plan = planned
    with pytest.raises(ConfigError) as caught:
        go_on_with(config, plan, ["mesh.stages=5"])
    assert caught.value.code == "resume.stages"
    most = int(caught.value.fix.rsplit(" ", 1)[1])
    assert 2 <= most < 5
    assert go_on_with(config, plan, [f"mesh.stages={most}"]).mesh.stages == most
    assert go_on_with(config, plan, ["mesh.stages=1"]).mesh.stages == 1


@pytest.mark.parametrize(
    ("overrides", "code", "fix"),
    [
        (["mesh.data=4"], "resume.replicas", "mesh.data · mesh.fsdp = 2"),
        (["mesh.data=1"], "resume.replicas", "lora.init_from"),
        (["batch.capacity_tokens=128"], "resume.fixed", "starts a new run"),
        (["adapters.law.optim.lr=1"], "resume.fixed", "starts a new run"),
        (["mesh.stage=1"], "resume.fixed", "mesh.stages"),
        (["mesh.stages=none"], "config.override", ""),
        (["train.keep=all"], "config.override", ""),
    ],
)
def test_what_a_begun_run_cannot_change(planned, overrides, code, fix):
    with pytest.raises(ConfigError) as caught:
        go_on_with(*planned, overrides)
    assert caught.value.code == code
    assert fix in caught.value.fix


def test_layers_belong_to_their_number_of_stages(planned):
    config, plan = planned
    config = go_on_with(config, plan, ["mesh.layers=[1, 4]"])
    assert config.mesh.layers == (1, 4)
    assert go_on_with(config, plan, ["mesh.stages=1"]).mesh.layers is None
    assert go_on_with(config, plan, ["train.keep=nothing"]).mesh.layers == (1, 4)
