"""Adapters that stop improving end early, halving keeps the best of a sweep, and their slots go to the others."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from rich.console import Console
from small_jobs import exported, largest_difference

from lorafusion_jax import open_run
from lorafusion_jax.api.plan_screen import show_plan
from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.checkpoint.saved_states import slots_of
from lorafusion_jax.cli.running import show_result
from lorafusion_jax.config import load_config
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.planning.planned import make_planned
from lorafusion_jax.planning.training_plan import plan_training
from lorafusion_jax.planning.turns import turns
from lorafusion_jax.report.data_notes import data_notes
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.session.assembler import Batches
from lorafusion_jax.session.steps import Steps
from lorafusion_jax.training import resume, train
from lorafusion_jax.training.changes import Change, revise
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.revisions import extended
from lorafusion_jax.training.state import Progress
from scheduling import Plan, replan

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def job(folder, tiny_base):
    """Four adapters on the same data at very different rates, and one with data of its own."""
    import small_jobs

    rows, held_out = (
        small_jobs.write_rows(folder, "law", 24, longest=8),
        small_jobs.write_rows(folder, "held", 6, longest=8),
    )
    other = small_jobs.write_rows(folder, "tax", 24, seed=1, longest=8)
    rates = {"lazy": 1e-5, "best": 0.02, "idle": 1e-4, "slow": 0.002}
    adapters = [
        {"name": name, "data": {"train": rows, "eval": held_out}, "optim": {"lr": lr, "schedule": "constant"}}
        for name, lr in rates.items()
    ]
    adapters.append(
        {"name": "alone", "data": {"train": other}, "optim": {"lr": 0.01}, "early_stop": {"patience": None}}
    )

    def write(**sections):
        chosen = sections.pop("adapters", adapters)
        batch = {"global_samples": 4, "capacity_tokens": 128, "tile_tokens": 16}
        shared = {"batch": batch, "epochs": 2, "lora": {"targets": ["down_proj"]}}
        return small_jobs.write_job(folder, tiny_base, chosen, **(shared | sections))

    return write


@pytest.fixture(scope="module")
def whole(job, folder, kept_programs):
    """The run without any stop."""
    config = load_config(job(train={"eval_every_steps": 2}))
    train(config, folder / "whole")
    return folder / "whole"


@pytest.fixture(scope="module")
def stopping(job):
    return load_config(
        job(train={"eval_every_steps": 2}, early_stop={"patience": 2}, halving={"first_step": 3, "factor": 2})
    )


@pytest.fixture(scope="module")
def stopped(stopping, folder, kept_programs):
    """The run in which halving and patience end adapters."""
    return train(stopping, folder / "stopped")


def losses(run, name):
    return {
        row["step"]: row["loss"]
        for row in read_rows(run / "metrics.jsonl")
        if row["kind"] == "step" and row["adapter"] == name
    }


def test_bad_members_end_and_their_slots_are_spared(stopped, whole):
    adapters = stopped.adapters
    assert {name for name, adapter in adapters.items() if adapter.num_steps == STEPS} == {"best", "alone"}
    assert {adapter.status for adapter in adapters.values()} == {"done"}
    assert all(adapters[name].reason.startswith("halved at step 3 of 12: eval_loss ") for name in ("idle", "lazy"))
    assert adapters["slow"].reason.startswith("halved at step 6 of 12: eval_loss ")
    assert [adapters[name].step for name in ("idle", "lazy")] == [3, 3]
    assert stopped.plan.num_slots < RunFolder(whole).read_plan().num_slots


def test_the_others_train_as_if_nothing_had_ended(stopped, whole):
    run = stopped.folder
    for name in ("best", "alone"):
        assert largest_difference(exported(run, name), exported(whole, name)) < 1e-5
    for name, adapter in stopped.adapters.items():
        before = losses(whole, name)
        ours = losses(run, name)
        assert list(ours) == list(range(1, adapter.step + 1))
        assert ours == pytest.approx({step: before[step] for step in ours}, rel=1e-5)


def test_best_links_to_the_step_with_the_lowest_held_out_loss(stopped):
    run = open_run(stopped.folder)
    rows = read_rows(stopped.folder / "metrics.jsonl")
    for name, adapter in stopped.adapters.items():
        held_out = {
            row["step"]: row["eval_loss"]
            for row in rows
            if row["kind"] == "eval" and row["adapter"] == name and row["step"] and row["eval_loss"] is not None
        }
        if not held_out:
            assert RunFolder(stopped.folder).best(name) is None
            continue
        step = min(held_out, key=lambda step: held_out[step])
        folder = run.adapter(name, best=True)
        assert folder.name == f"step-{step:06d}"
        assert (stopped.folder / "adapters" / name / "best" / "adapter_model.safetensors").is_file()
        assert json.loads((folder / "run.json").read_text())["step"] == step == adapter.best_step


def test_screens_say_who_ended_early_and_what_it_spared(stopped, capsys):
    console = Console(width=160)
    show_result(console, stopped)
    text = capsys.readouterr().out
    assert "best: best, held-out loss" in text
    assert "idle: ended early, halved at step 3 of 12: eval_loss" in text
    numbers = open_run(stopped.folder).numbers
    steps = sum(STEPS - adapter.num_steps for adapter in stopped.adapters.values())
    assert (numbers["spared_steps"], numbers["spared_slots"] > 0) == (steps, True)
    assert f"early stops spared {steps} steps and {numbers['spared_slots']} microbatches, about" in text
    assert "NAME/best" in text
    assert f"early stops spared {steps} steps" in str(open_run(stopped.folder))


@pytest.mark.parametrize(
    ("cut", "saved_every"),
    [(("eval", "lazy", 3), 1), (("step", "best", 5), 1), (("step", "best", 8), None)],
    ids=["after the evaluation", "between the stops", "after the stops, with nothing saved"],
)
def test_a_resumed_run_stops_the_same_adapters_at_the_same_slots(
    stopping, stopped, folder, cut, saved_every, saves_wait, request
):
    run = folder / f"cut {request.node.callspec.id}"
    kind, name, at = cut
    save = {"every_steps": saved_every, "every_minutes": None}
    config = stopping.model_copy(update={"save": stopping.save.model_copy(update=save)})

    class Cut(Exception):
        pass

    def listen(event):
        if event.kind == kind and (event.adapter, event.step) == (name, at):
            raise Cut

    with pytest.raises(Cut):
        train(config, run, listeners=[listen])
    assert bool(slots_of(RunFolder(run).state)) == (saved_every is not None)  # a stop alone saves nothing
    again = resume(run)
    assert {name: (a.step, a.reason) for name, a in again.adapters.items()} == {
        name: (a.step, a.reason) for name, a in stopped.adapters.items()
    }
    for name in stopped.adapters:
        ours, theirs = exported(run, name), exported(stopped.folder, name)
        assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)


@pytest.fixture(scope="module")
def batches(folder, job):
    """Two rates with four steps each, and two with twelve: as a sweep of batch sizes.

    A fifth is in no comparison, so that programs are those of the jobs above.
    """
    data = {"train": str(folder / "law.jsonl"), "eval": str(folder / "held.jsonl")}
    other = {"name": "alone", "data": {"train": str(folder / "tax.jsonl")}, "optim": {"lr": 0.01}}
    return [
        {"name": f"{word}{size}", "data": data, "optim": {"lr": lr, "schedule": "constant"},
         "batch": {"global_samples": size}}
        for size in (2, 6)
        for word, lr in (("fast", 0.02), ("slow", 1e-5))
    ] + [other | {"early_stop": {"patience": None}}]  # fmt: skip


def test_adapters_with_unequal_steps_are_compared_after_a_share_of_their_own(job, folder, batches, kept_programs):
    config = load_config(job(adapters=batches, halving={"first_share": 0.5}, epochs=1))
    adapters = train(config, folder / "shares").adapters
    assert {name: adapter.step for name, adapter in adapters.items() if name.startswith("fast")} == {
        "fast2": 12,
        "fast6": 4,
    }
    assert [adapters[name].reason.partition(":")[0] for name in ("slow2", "slow6")] == [
        "halved at step 6 of 12",
        "halved at step 2 of 4",
    ]
    rows = [row for row in read_rows(folder / "shares" / "metrics.jsonl") if row["kind"] == "eval"]
    evaluated = [(row["adapter"], row["step"]) for row in rows]
    assert len(set(evaluated)) == len(evaluated), "who ended at a comparison has its result"


def test_who_fails_last_before_a_comparison_does_not_put_it_off(job, folder, batches, kept_programs, monkeypatch):
    """Nobody is evaluated after it before the next comparison, and all would train on until then."""
    config = load_config(job(adapters=batches, halving={"first_share": 0.25}, epochs=2))
    compared_at = {name: 6 if name.endswith("2") else 2 for name in ("fast2", "slow2", "fast6", "slow6")}
    plan = plan_training(config, prepare(config))
    ends = {name: (slot, at) for at, (slot, name, batch) in enumerate(plan.batches_ending())
            if compared_at.get(name) == batch + 1}  # fmt: skip
    last, read_step = max(ends, key=lambda name: ends[name]), Steps._read_step

    def read(steps, issued):
        if (issued.task.name, issued.step) == (last, compared_at[last]) and issued.task.status == "running":
            steps._fail(issued)
        else:
            read_step(steps, issued)

    monkeypatch.setattr(Steps, "_read_step", read)
    adapters = train(config, folder / "fails last").adapters
    assert adapters[last].status == "failed"
    halved = {name for name, adapter in adapters.items() if adapter.reason.startswith("halved")}
    assert any(adapters[name].step == compared_at[name] for name in halved)


def test_check_says_that_a_step_is_no_measure_for_unequal_batches(job, batches):
    config = load_config(job(adapters=batches, halving={"first_step": 2}, epochs=1))
    (note,) = [note for note in data_notes(config, prepare(config)) if "halving" in note]
    assert "adapters that take 4 steps in all with such that take 12" in note
    assert "halving.first_share" in note


def test_a_plan_predicts_what_halving_spares(job, batches):
    many = [
        entry | {"name": f"{entry['name']}-{twin}"} for entry in batches if "eval" in entry["data"] for twin in "ab"
    ]

    def predicted(**halving):
        config = load_config(job(adapters=many, halving=halving, epochs=1))
        return make_planned(config, prepare(config), device="h200").to_json()["predicted"]

    seldom, often = predicted(first_share=0.5, factor=2), predicted(first_share=0.25, factor=8)
    assert seldom["seconds"] > seldom["halved_s"] > often["halved_s"]
    assert predicted()["halved_s"] is None


def test_a_plan_says_why_halving_spares_little_and_what_spares_more(job, batches, capsys):
    """An adapter has one batch in a microbatch, so those that go on need as many as before."""
    alike = [batches[0] | {"name": name} for name in ("a", "b", "c", "d")]

    def screen(tokens: int | list[int]) -> str:
        batch = {"capacity_tokens": tokens, "tile_tokens": 16}
        config = load_config(job(adapters=alike, batch=batch, halving={"first_share": 0.5}, epochs=1))
        show_plan(Console(width=500), make_planned(config, prepare(config), device="h200"))
        return capsys.readouterr().out

    assert "hardly less than without" in (large := screen(1024))
    assert "try batch.capacity_tokens=[256,1024]" in large
    assert all("hardly less than without" not in screen(tokens) for tokens in ([256, 1024], 64))
    assert "hardly less than without" not in screen([1024, 2048])  # it has several sizes


def test_no_later_plan_waits_for_a_program(job, batches):
    """Those that go on fill microbatches of a size that holds less of the first plan."""
    batch = {"capacity_tokens": [80, 128], "tile_tokens": 16}
    config = load_config(job(adapters=batches, batch=batch, halving={"first_share": 0.25}, epochs=1))
    prepared = prepare(config)
    plan = plan_training(config, prepared)
    microbatches = Batches.of_job(config, prepared, plan, [0])
    compiled = [shapes_of(rows) for rows in microbatches.empty()]
    for ended in (["slow2", "slow6"], ["slow2", "slow6", "fast6", "alone"]):
        later = replan(plan, at_slot=2, finish=ended, **turns(config, prepared, plan.jobs))
        microbatches.replace_plan(config, prepared, later)
        assert all(shapes_of(microbatches.of(slot)) in compiled for slot in range(later.num_slots))


def test_nobody_rests_for_who_is_extended_after_an_early_end(job, batches):
    """No comparison waits for it, so the next steps of the others do not, either."""
    alike = [batches[0] | {"name": name} for name in "abcd"]
    config = load_config(job(adapters=alike, mesh={"stages": 4}, halving={"first_step": 2}, epochs=4))
    prepared = prepare(config)
    plan = plan_training(config, prepared)
    progress = Progress.first({name: plan.job_of[name].num_batches for name in "abcd"}, stage_devices=1, plan="")
    begun = Job(config=config, prepared=prepared, plan=plan)

    def after(plan: Plan, step: int, names: str) -> int:
        return 1 + max(slot for slot, name, batch in plan.batches_ending() if name in names and batch == step - 1)

    for step, name in ((2, "d"), (4, "c")):
        progress.adapters[name].stop = f"halved at step {step}"
        slot = after(begun.plan, step, "abc")
        begun.plan, _ = revise(
            begun, slot, [Change(action="stop", adapter=name, slot=slot)], not_awaited=progress.not_awaited
        )
    longer, slot = extended(begun, "c", epochs=2, steps=None), after(begun.plan, 7, "ab")
    extension = [Change(action="extend", adapter="c", slot=slot)]
    waiting, _ = revise(longer, slot, extension)
    going_on, _ = revise(longer, slot, extension, not_awaited=progress.not_awaited)
    assert after(going_on, 9, "ab") < after(going_on, 8, "c") <= after(waiting, 9, "ab")
    progress.adapters["c"].extend(20)
    assert progress.not_awaited == ["c", "d"]


def shapes_of(rows):
    return [np.shape(leaf) for leaf in jax.tree.leaves(rows)]


def test_patience_alone(job, folder, kept_programs):
    config = load_config(job(train={"eval_every_steps": 1}, early_stop={"patience": 3, "min_delta": 0.01}))
    result = train(config, folder / "patience")
    lazy = result.adapters["lazy"]
    assert lazy.step == 4
    assert lazy.reason.startswith("at step 4 of 12: eval_loss no better than ")
    assert lazy.reason.endswith(" in 3 evaluations")
    assert result.adapters["best"].step > lazy.step
    assert result.adapters["alone"].step == STEPS


@pytest.mark.parametrize(
    ("sections", "code", "says"),
    [
        ({"early_stop": {"metric": "eval_los"}}, "config.metric", "did you mean 'eval_loss'?"),
        ({"early_stop": {"metric": "eval_rewards/accuracies"}}, "config.metric", "objective sft has eval_loss"),
        ({"early_stop": {"patience": 2}}, "config.early-stop", "train.eval_every_steps: 20"),
        (
            {
                "early_stop": {"patience": 2},
                "train": {"eval_every_steps": 2},
                "adapters": [{"name": "tax", "data": {"train": "tax.jsonl"}}],
            },
            "config.early-stop",
            "tax: early_stop.patience needs held-out",
        ),
        ({"halving": {"first_step": 4, "factor": 1}}, "config.value", "factor"),
        ({"early_stop": {"patience": 0}}, "config.value", "patience"),
        ({"halving": {"first": 4}}, "config.unknown-key", "first_step"),
        ({"halving": {"first_step": 4, "first_share": 0.5}}, "config.value", "give one of them"),
        ({"halving": {"first_share": 1.0}}, "config.value", "first_share"),
    ],
)
def test_what_cannot_decide_is_refused(job, sections, code, says):
    with pytest.raises(LoraFusionError) as caught:
        load_config(job(**sections))
    text = str(caught.value)
    assert code in text
    assert says in text
