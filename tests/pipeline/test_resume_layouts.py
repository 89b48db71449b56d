"""A checkpoint belongs to no layout: a run that stops on one goes on with another."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from mixed import assert_equal, read_trained, write_mixed_job
from more_cases import nightly

from lorafusion_jax.checkpoint.folder import NEXT
from lorafusion_jax.config import load_config
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import CheckpointError, ConfigError
from lorafusion_jax.planning.training_plan import plan_training
from lorafusion_jax.report.record import check_record, make_record
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import RunFolder, resume, train
from lorafusion_jax.training.relayout import apply_resume_overrides, plan_for_mesh

TOLERANCE = 1e-5  # as in test_layouts
NAMES = ("law", "code")  # code has batches of 8 samples in 3 or more slots, so a save falls into the middle of one
SIMILAR = [  # to law, so that they share programs
    "adapters.code.lora.targets=[q_proj, down_proj]", "adapters.code.lora.rank=4", "adapters.code.optim.name=adamw",
]  # fmt: skip


class PowerCut(RuntimeError):
    pass


def power_cut(after: str):
    """A listener that ends the run as a power cut would: at the first step after some event."""
    seen = set()

    def listen(event):
        if event.kind == "step" and after in seen:
            raise PowerCut
        seen.add(event.kind)

    return listen


@pytest.fixture(scope="module")
def cut_runs(tmp_path_factory, deep_base, kept_programs, saves_wait):
    """cut_runs(mesh, uncut) → a fresh run, cut when its newest checkpoint is amid a batch; an uncut one elsewhere."""
    wholes = {}

    def make(mesh: dict, uncut: dict):
        folder = tmp_path_factory.mktemp("cut")
        write = partial(write_mixed_job, folder, deep_base(True), NAMES, save={"every_steps": 1})
        if str(uncut) not in wholes:
            assert train(load_config(write(mesh=uncut), SIMILAR), folder / "whole").exit_code == 0
            wholes[str(uncut)] = read_trained(folder / "whole")
        run = folder / "run"

        def power_cut(event):
            if event.kind == "step" and in_the_middle_of_a_batch(run):  # sums are under way
                raise PowerCut

        with pytest.raises(PowerCut):
            train(load_config(write(mesh=mesh), SIMILAR), run, listeners=[power_cut])
        return run, wholes[str(uncut)]

    return make


def checkpoints(run) -> list[int]:
    return [int(path.name) for path in (run / "state").glob("*") if path.name.isdigit()]


def in_the_middle_of_a_batch(run) -> bool:
    """Whether the newest checkpoint lies between two microbatches of one global batch."""
    if not checkpoints(run):
        return False
    plan, slot = RunFolder(run).read_plan(), max(checkpoints(run))
    batches = [
        {(ref.adapter, ref.batch) for slot in part for ref in slot.samples}
        for part in (plan.slots[:slot], plan.slots[slot:])
    ]
    return bool(batches[0] & batches[1])


REPLICAS = ["mesh.data=2", "mesh.fsdp=2", "train.remat=nothing"]
HALVES = {"stages": 2, "data": 2, "layers": [1.5, 3.5]}
TO_HALVES = ["mesh.stages=2", "mesh.data=2", "mesh.layers=[1.5, 3.5]"]


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        nightly(HALVES, []),
        nightly(HALVES, ["mesh.data=1", "mesh.stages=1"]),
        nightly({}, REPLICAS),
        ({}, TO_HALVES),
        nightly({}, ["mesh.stages=3", "mesh.layers=[1.5, 2.5, 1]", "train.remat=nothing"]),
    ],
    ids=lambda value: " ".join(value).replace("mesh.", "") if isinstance(value, list) else None,
)
def test_a_run_goes_on_elsewhere(cut_runs, mesh, overrides):
    run, whole = cut_runs(mesh, {} if overrides else mesh)
    assert in_the_middle_of_a_batch(run), "no sums are under way, so the comparison says less"
    before = RunFolder(run).read_plan()
    assert resume(run, overrides).exit_code == 0
    assert_equal(whole, read_trained(run), TOLERANCE if overrides else 0.0)
    settings, after = RunFolder(run).read_config(), RunFolder(run).read_plan()
    moves = [row for row in read_rows(run / "events.jsonl") if row["kind"] == "moved"]
    if before.layouts[0][1:] == (settings.mesh.stages, settings.mesh.replicas):
        assert (after, moves) == (before, [])
    else:
        (move,) = moves
        assert after.slots[: move["slot"]] == before.slots[: move["slot"]] != ()
        assert after.num_slots == move["slot"] + move["slots_left"]
        assert max(row["slot"] for row in read_rows(run / "metrics.jsonl")) == after.num_slots
    for override in overrides:  # and stays there
        section, key = override.partition("=")[0].split(".")
        value = getattr(getattr(settings, section), key)
        assert str(list(value) if isinstance(value, tuple) else value) == override.partition("=")[2]
    started = [row["mesh"] for row in read_rows(run / "events.jsonl") if row["kind"] == "started"]
    assert [row["stages"] for row in started] == [mesh.get("stages", 1), settings.mesh.stages]
    assert resume(run).exit_code == 0  # nothing is left to do, there as here


def test_a_move_may_be_cut_anywhere(cut_runs, monkeypatch):
    """Killed after each file that a move puts in its place, then after a step that no checkpoint has seen."""
    run, whole = cut_runs({}, {})
    folder, overrides = RunFolder(run), TO_HALVES
    slot = max(int(path.name) for path in folder.state.iterdir())
    old = folder.read_config(), folder.read_plan()
    settings = apply_resume_overrides(old[0], overrides)
    new = settings, plan_for_mesh(old[1], settings, prepare(settings), slot)
    (run / "timeline.json").write_text("of the sitting before")

    rename = Path.replace

    def killed(again: list[str], last: str) -> list[str]:
        """Resumes, and kills that after the rename that puts `last` in place. Returns what was put in place."""
        placed: list[str] = []

        def rename_and_die(path, target):
            moved = rename(path, target)
            if Path(target).parent == run and Path(target).name != "start.json":  # the phase of the start
                placed.append(_kind(Path(target).name))
                if placed[-1] == last:
                    raise PowerCut
            return moved

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", rename_and_die)
            with pytest.raises(PowerCut):
                resume(run, again)
        return placed

    prepared, places = ["next plan.json", "next config.yaml"], ["plan.json", "config.yaml"]
    for count, last in enumerate(prepared, 1):
        assert killed(overrides, last) == prepared[:count]
        assert (folder.read_config(), folder.read_plan()) == old, "what is prepared is not the run's yet"
    assert killed(overrides, "run.json") == [*prepared, "run.json"]
    assert (folder.read_config(), folder.read_plan()) == new, "run.json is the whole move"
    assert not (run / "timeline.json").exists(), "its slots are not those of this plan"
    for count, last in enumerate(places):
        assert killed([], last) == [places[count]]
        assert (folder.read_config(), folder.read_plan()) == new

    with pytest.raises(PowerCut):
        resume(run, listeners=[power_cut(after="started")])
    assert resume(run).exit_code == 0
    assert (folder.read_config(), folder.read_plan()) == new
    assert not list(run.glob(f".*{NEXT}"))
    assert_equal(whole, read_trained(run), TOLERANCE)


def _kind(name: str) -> str:
    """The file of a name; "next" is before one that is only prepared."""
    if not name.endswith(NEXT):
        return name
    return "next " + next(file for file in ("plan.json", "config.yaml") if name.startswith(f".{file}."))


@pytest.fixture(scope="module")
def planned(tmp_path_factory, deep_base):
    """Configuration, data and plan of a job for 2 stages and 2 replicas; nothing is trained."""
    config = load_config(
        write_mixed_job(tmp_path_factory.mktemp("planned"), deep_base(True), mesh={"stages": 2, "data": 2})
    )
    prepared = prepare(config)
    return config, prepared, plan_training(config, prepared)


def test_a_plan_changes_only_where_it_must(planned):
    config, prepared, plan = planned
    assert (
        plan_for_mesh(
            plan, apply_resume_overrides(config, ["mesh.data=1", "mesh.fsdp=2", "train.remat=nothing"]), prepared, 3
        )
        is plan
    )
    elsewhere = apply_resume_overrides(config, ["mesh.stages=1"])
    moved = plan_for_mesh(plan, elsewhere, prepared, 3)
    assert moved.slots[:3] == plan.slots[:3]
    assert plan_for_mesh(moved, elsewhere, prepared, 3) is plan_for_mesh(moved, elsewhere, prepared, 5) is moved
    ended = plan_for_mesh(moved, config, prepared, moved.num_slots)
    assert ended.slots == moved.slots, "nothing is left to plan"
    assert (ended.num_stages, ended.data_parallel) == (plan.num_stages, plan.data_parallel)  # of what requests add
    assert plan_for_mesh(ended, config, prepared, moved.num_slots) is ended
    assert plan_for_mesh(moved, elsewhere, prepared, moved.num_slots) is moved
    back = plan_for_mesh(
        moved, elsewhere, prepared, 2
    )  # slot 2 was run for 2 stages, and the checkpoint after it is gone
    assert [layout.end for layout in back.layouts] == [2, back.num_slots]


def test_a_checkpoint_goes_on_with_its_plan_or_a_later_one(planned):
    config, prepared, plan = planned
    moved = plan_for_mesh(plan, apply_resume_overrides(config, ["mesh.stages=1"]), prepared, 3)
    record = make_record(config, prepared, plan, {}, {})
    check_record(record, prepared, plan, plan.digest)
    for of_run, saved_with in ((moved, plan), (moved, moved), (plan, moved)):
        with pytest.raises(CheckpointError, match=r"run\.other-plan"):
            check_record(record, prepared, of_run, saved_with.digest)
    record |= {"moves": [{"plan": moved.digest}]}
    check_record(record, prepared, moved, plan.digest)
    check_record(record, prepared, moved, moved.digest)
    for saved_with in (plan, moved):  # run.json names a plan only once it is there, so no kill leaves the old one
        with pytest.raises(CheckpointError, match=r"run\.other-plan"):
            check_record(record, prepared, plan, saved_with.digest)


@pytest.mark.parametrize(
    ("overrides", "code", "fix"),
    [
        (["batch.capacity_tokens=128"], "resume.fixed", "start a new run"),
        (["adapters.law.optim.lr=1"], "resume.fixed", "start a new run"),
        (["mesh.stage=1"], "resume.fixed", "mesh.stages"),
        (["train.max_steps=60"], "resume.fixed", "lorafusion extend RUN ADAPTER --steps"),
        (["mesh.stages=none"], "config.override", ""),
        (["train.remat=all"], "config.override", ""),
        (["train.keep=nothing"], "config.renamed-key", "train.remat"),
    ],
)
def test_what_a_begun_run_cannot_change(planned, overrides, code, fix):
    with pytest.raises(ConfigError) as caught:
        apply_resume_overrides(planned[0], overrides)
    assert caught.value.code == code
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["batch.tile_tokens=64"], "batch.tile_tokens is {config.batch.tile_tokens} and would be 64"),
        (["optim.lr=0.5"], "adapters.{name}.optim.lr is {config.adapters[0].optim.lr} and would be 0.5"),
        (["seed=7"], "adapters.{name}.seed is {config.adapters[0].seed} and would be 7"),
    ],
)
def test_a_setting_that_cannot_change_comes_with_both_values(planned, overrides, said):
    config = planned[0]
    with pytest.raises(ConfigError) as caught:
        apply_resume_overrides(config, overrides)
    assert said.format(config=config, name=config.adapters[0].name) in caught.value.where


def test_layers_belong_to_their_number_of_stages(planned):
    config = apply_resume_overrides(planned[0], ["mesh.layers=[1, 4]"])
    assert config.mesh.layers == (1, 4)
    assert apply_resume_overrides(config, ["mesh.stages=1"]).mesh.layers is None
    assert apply_resume_overrides(config, ["train.remat=nothing"]).mesh.layers == (1, 4)
