"""lorafusion profile measures costs for plan; timeline draws a run with or without its prediction."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
from cli_helpers import make_job

from lorafusion_jax.cli.main import run
from lorafusion_jax.layout.extent import counts_of
from lorafusion_jax.planning.rebalance import Moved
from lorafusion_jax.report.measured import read_timeline, settled_slots
from lorafusion_jax.report.recorder import read_rows
from scheduling import AdapterJob, CostModel, Plan, Span, Timeline, make_plan

TWO = "mesh.stages=2"


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory, tiny_base, kept_programs):
    """(job, costs, run folder) of a pipeline of two simulated devices."""
    job = make_job(tmp_path_factory.mktemp("two"), tiny_base)
    costs, out = job.folder / "measured" / "costs.json", job.folder / "run"
    assert run(["profile", str(job.path), TWO, "-o", str(costs), "--repeats", "1"]) == 0
    assert run(["train", str(job.path), TWO, "--out", str(out)]) == 0
    return job, costs, out


def test_profile_writes_costs_of_every_stage_that_plan_takes(lorafusion, two_stages):
    job, costs, _ = two_stages
    model = CostModel.from_json(costs.read_text())
    assert len(model.stages) == 2
    for stage in model.stages:
        assert 0 < stage.forward.seconds(64, 64 * 64) < 10
        assert 0 < stage.backward.seconds(64, 64 * 64) < 10
        assert stage.update_s > 0
    numbers = json.loads(lorafusion("plan", job.path, TWO, "--cost-model", costs, "--json").out)
    assert numbers["predicted"]["costs"] == model.source
    assert re.match(r"measured: tiny, 2 stages, cpu", model.source)


def test_profile_shows_times_and_the_command_that_uses_them(lorafusion, two_stages):
    job, _, _ = two_stages
    to = job.folder / "again.json"
    outcome = lorafusion("profile", job.path, TWO, "train.max_steps=1", "-o", to, "--repeats", "1")
    assert outcome.code == 0, outcome.err
    assert [line.split()[0] for line in outcome.out.splitlines() if " ms" in line] == ["0", "1"]
    filled = re.search(r"64 tokens as the plan fills it: attention as with samples of (\d+)", outcome.out)
    assert filled is not None
    assert 0 < int(filled[1]) <= 64
    assert outcome.last_line == f"next: lorafusion plan {job.path} {TWO} train.max_steps=1 --cost-model {to}"


def test_profile_says_how_layers_should_lie(lorafusion, two_stages, monkeypatch):
    job, _, _ = two_stages
    asked = []

    def rebalanced(layers, seconds, costs, *, most):
        asked.append((counts_of(layers), seconds, most))
        return Moved([1.5, 0.5], 0.25)

    monkeypatch.setattr("lorafusion_jax.planning.prediction.rebalanced", rebalanced)
    to = job.folder / "third.json"
    outcome = lorafusion("profile", job.path, TWO, "train.max_steps=1", "-o", to, "--repeats", "1")
    assert "with 'mesh.layers=[1.5,0.5]' the slowest would take 25.0 % less" in outcome.out
    ((layers, seconds, most),) = asked
    assert layers == [1, 1]
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert most[1] == 2  # the last stage is the fullest, by its logits: it gets no half more
    assert most[0] > 2


def test_timeline_says_how_layers_should_lie(lorafusion, two_stages, tiny_base, tmp_path):
    """The run as if it had six layers in two stages, and the first GPU were thrice as fast."""
    shutil.copytree(two_stages[2], tmp_path / "run")
    shutil.copytree(tiny_base, tmp_path / "six")
    shape = json.loads((tiny_base / "config.json").read_text())
    (tmp_path / "six" / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 6}))
    config = tmp_path / "run" / "config.yaml"
    config.write_text(re.sub(r"^(  model: ).*$", rf"\g<1>{tmp_path / 'six'}", config.read_text(), count=1, flags=re.M))
    events = tmp_path / "run" / "events.jsonl"
    rows = [row | ({"layers": [3, 3]} if row["kind"] == "started" else {}) for row in read_rows(events)]
    events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    timeline = read_timeline(tmp_path / "run")
    spans = [span._replace(end_s=span.start_s + (0.1, 0.3)[span.stage]) for span in timeline.spans]
    (tmp_path / "run" / "timeline.json").write_text(replace(timeline, spans=tuple(spans)).to_json())
    outcome = lorafusion("timeline", tmp_path / "run", "-o", tmp_path / "t.html")
    assert "stages took unequal times: with 'mesh.layers=[" in outcome.out
    numbers = json.loads(lorafusion("timeline", tmp_path / "run", "-o", tmp_path / "t.html", "--json").out)
    first, second = numbers["better_layers"]["layers"]
    assert first + second == 6
    assert first > second
    assert 0.2 < numbers["better_layers"]["saving"] < 0.6


def test_timeline_needs_no_base_model(lorafusion, two_stages, tmp_path):
    _, _, finished = two_stages
    shutil.copytree(finished, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(re.sub(r"^(  model: ).*$", r"\1/elsewhere", config.read_text(), count=1, flags=re.M))
    outcome = lorafusion("timeline", tmp_path / "run", "-o", tmp_path / "t.html")
    assert outcome.code == 0, outcome.err
    assert "measured" in outcome.out


def test_costs_of_one_mesh_are_refused_for_another(lorafusion, two_stages, finished):
    job, costs, _ = two_stages
    for arguments in (("plan", job.path, "--cost-model", costs), ("timeline", finished[1], "--cost-model", costs)):
        outcome = lorafusion(*arguments)
        assert (outcome.code, outcome.errors) == (2, ["plan.cost"])
        assert "measure again with this mesh.stages" in outcome.err


def test_costs_of_other_layers_or_microbatches_are_refused(lorafusion, two_stages, tmp_path):
    """A file of one stage has a cost for each of any number of stages, so counting stages is not enough."""
    job, costs, run_folder = two_stages
    model = CostModel.from_json(costs.read_text())
    assert model.layers is not None
    alone, moved = tmp_path / "alone.json", tmp_path / "moved.json"
    alone.write_text(replace(model, stages=model.stages[:1], layers=(sum(model.layers),)).to_json())
    moved.write_text(replace(model, layers=(model.layers[0] + 0.5, model.layers[1] - 0.5)).to_json())
    for file in (alone, moved):
        for arguments in (("plan", job.path, TWO), ("timeline", run_folder)):
            outcome = lorafusion(*arguments, "--cost-model", file)
            assert (outcome.code, outcome.errors) == (2, ["plan.cost"])
            assert "measure again with mesh.stages=2 'mesh.layers=[" in outcome.err
    larger = tmp_path / "larger.json"
    larger.write_text(replace(model, capacity_tokens=4096).to_json())
    outcome = lorafusion("timeline", run_folder, "--cost-model", larger)
    assert (outcome.code, outcome.errors) == (2, ["plan.cost"])


def test_costs_of_another_model_remat_or_fsdp_are_refused(lorafusion, two_stages, tmp_path):
    job, costs, run_folder = two_stages
    model = CostModel.from_json(costs.read_text())
    parameters = model.measured_with["base parameters"]
    assert model.measured_with | {"base parameters": 0} == {
        "base.dtype": "float32",
        "base.quantize": "none",
        "base parameters": 0,
        "mesh.fsdp": 1,
        "train.remat": "everything",  # what auto came to on a CPU
    }
    other, file = {"base parameters": 8, "mesh.fsdp": 2, "train.remat": "nothing"}, tmp_path / "other.json"
    file.write_text(replace(model, measured_with=model.measured_with | other).to_json())
    for arguments in (("plan", job.path, TWO, "train.remat=everything"), ("timeline", run_folder)):
        outcome = lorafusion(*arguments, "--cost-model", file)
        assert (outcome.code, outcome.errors) == (2, ["plan.cost"])
        output = " ".join(outcome.err.split())
        measured, wanted = (
            f"base parameters={count}, mesh.fsdp={fsdp}, train.remat={remat}"
            for count, fsdp, remat in ((8, 2, "nothing"), (parameters, 1, "everything"))
        )
        assert f"the costs were measured with {measured}, the job has {wanted}" in output
        assert "lorafusion profile JOBS mesh.fsdp=1 train.remat=everything" in output


def test_remat_auto_accepts_costs_of_any_policy(lorafusion, two_stages, tmp_path):
    job, costs, run_folder = two_stages
    model, file = CostModel.from_json(costs.read_text()), tmp_path / "nothing.json"
    file.write_text(replace(model, measured_with=model.measured_with | {"train.remat": "nothing"}).to_json())
    for remat, code in (("auto", 0), ("nothing", 0), ("gemm_inputs", 2)):
        assert lorafusion("plan", job.path, TWO, f"train.remat={remat}", "--cost-model", file).code == code
    outcome = lorafusion("timeline", run_folder, "--cost-model", file)  # which was told auto and kept everything
    assert (outcome.code, outcome.errors) == (2, ["plan.cost"])
    assert "the costs were measured with train.remat=nothing, the job has train.remat=everything" in outcome.err


def test_costs_without_measured_with_are_accepted(lorafusion, two_stages, tmp_path):
    job, costs, run_folder = two_stages
    values, file = json.loads(costs.read_text()), tmp_path / "old.json"
    del values["measured_with"]
    file.write_text(json.dumps(values))
    for arguments in (("plan", job.path, TWO), ("timeline", run_folder, "-o", tmp_path / "t.html")):
        outcome = lorafusion(*arguments, "--cost-model", file)
        assert outcome.code == 0, outcome.err


def test_a_run_leaves_a_timeline_of_every_event_of_its_plan(two_stages):
    _, _, out = two_stages
    plan, timeline = Plan.from_json((out / "plan.json").read_text()), read_timeline(out)
    passes = {(span.kind, span.stage, span.slot) for span in timeline.spans if span.kind != "update"}
    assert passes == {
        (kind, stage, slot) for kind in ("forward", "backward") for stage in (0, 1) for slot in range(len(plan.slots))
    }
    steps = sum(job.num_batches for job in plan.jobs)
    updates = [span.adapters for span in timeline.spans if span.kind == "update"]
    assert {len(names) for names in updates} == {1}
    assert len(updates) == 2 * 2 * steps  # on each stage, a batch is closed and the adapter steps


def test_a_run_shows_measured_and_predicted_bubbles(lorafusion, job):
    def told(*settings) -> tuple[float | None, list[float | None]]:
        out = job.folder / f"run-{len(settings)}"
        assert lorafusion("train", job.path, "--out", out, "save.every_steps=1000", *settings).code == 0
        started = next(row for row in read_rows(out / "events.jsonl") if row["kind"] == "started")
        rows = [row for row in read_rows(out / "metrics.jsonl") if row["kind"] == "slot"]
        return started["predicted_bubble_share"], [row["bubble_share"] for row in rows]

    predicted, measured = told(TWO)
    plan = json.loads(lorafusion("plan", job.path, TWO, "--json").out)
    assert predicted == plan["predicted"]["bubble_share"] > 0
    assert any(share is not None and 0 < share < 1 for share in measured)
    predicted, measured = told()
    assert predicted is None
    assert set(measured) == {None}


def test_timeline_compares_with_a_prediction(lorafusion, two_stages, tmp_path):
    _, costs, out = two_stages
    page = tmp_path / "new" / "timeline.html"
    outcome = lorafusion("timeline", out, "--cost-model", costs, "-o", page)
    assert outcome.code == 0, outcome.err
    assert re.search(r"^predicted .*%.*\nmeasured .*%", outcome.out, re.MULTILINE)
    assert re.search(r"measured / predicted: \d+\.\d{3}; time in passes, per stage: [\d.]+  [\d.]+$", outcome.out, re.M)
    assert outcome.last_line == f"next: lorafusion status {out}"
    assert page.read_text().count("<section>") == 2
    shown = json.loads(lorafusion("timeline", out, "--cost-model", costs, "-o", page, "--json").out)
    whole = json.loads(lorafusion("timeline", out, "--cost-model", costs, "-o", page, "--whole", "--json").out)
    assert shown["wall_ratio"] == pytest.approx(shown["measured"]["seconds"] / shown["predicted"]["seconds"], rel=0.2)
    assert whole["slots"] == [0, Plan.from_json((out / "plan.json").read_text()).num_slots - 1]
    assert shown["slots"][0] > 0
    assert shown["slots"][1] == whole["slots"][1]


def test_timeline_of_a_run_resumed_with_fewer_stages(lorafusion, two_stages, tmp_path):
    _, costs, finished = two_stages
    shutil.copytree(finished, tmp_path / "run")
    state = tmp_path / "run" / "state"
    latest = max(state.iterdir(), key=lambda folder: int(folder.name))
    shutil.rmtree(latest)
    assert lorafusion("resume", tmp_path / "run", "mesh.stages=1").code == 0
    outcome = lorafusion("timeline", tmp_path / "run", "--cost-model", costs, "-o", tmp_path / "t.html")
    assert (outcome.code, outcome.errors) == (2, ["plan.cost"])  # those of two stages
    one_stage = tmp_path / "one.json"
    one_stage.write_text(CostModel(stages=CostModel.from_json(costs.read_text()).stages[:1]).to_json())
    outcome = lorafusion("timeline", tmp_path / "run", "--cost-model", one_stage, "-o", tmp_path / "t.html", "--json")
    assert outcome.code == 0, outcome.err
    numbers = json.loads(outcome.out)
    assert numbers["slots"][0] > 0  # the last sitting began later
    assert len(numbers["predicted"]["bubble_shares"]) == 1


def test_timeline_of_one_device_needs_no_prediction(lorafusion, finished, tmp_path):
    _, out = finished
    trace = tmp_path / "trace.json"
    outcome = lorafusion("timeline", out, "-o", trace)
    assert outcome.code == 0, outcome.err
    assert "predicted" not in outcome.out
    assert "ui.perfetto.dev" in outcome.out
    drawn = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(drawn) >= len(read_timeline(out).spans)


def test_the_page_has_the_title_of_its_run(lorafusion, two_stages, tmp_path):
    _, costs, out = two_stages
    page = tmp_path / "timeline.html"
    for arguments, title in ((), "measured"), (("--cost-model", costs), "predicted and measured"):
        assert lorafusion("timeline", out, "-o", page, *arguments).code == 0
        assert f"<title>{out}: {title}</title>" in page.read_text()
        assert "<p></p>" not in page.read_text()


def test_wrong_output_suffix_is_an_error(lorafusion, finished, tmp_path):
    job, out = finished
    page = tmp_path / "page.txt"
    for command in (("timeline", out, "-o", page), ("plan", job.path, "--timeline", page)):
        outcome = lorafusion(*command)
        assert (outcome.code, outcome.errors) == (2, ["output.ending"])
        assert "page.html" in outcome.err
    assert not page.exists()


def test_a_run_without_a_timeline_is_an_error(lorafusion, finished, tmp_path):
    assert lorafusion("timeline", tmp_path / "nope").errors == ["run.missing"]
    shutil.copytree(finished[1], tmp_path / "run")
    (tmp_path / "run" / "timeline.json").unlink()
    outcome = lorafusion("timeline", tmp_path / "run")
    assert (outcome.code, outcome.errors) == (2, ["run.no-timeline"])
    (tmp_path / "run" / "timeline.json").write_text("{}")
    outcome = lorafusion("timeline", tmp_path / "run")
    assert (outcome.code, outcome.errors) == (2, ["plan.timeline-format"])


def test_status_shows_mesh_and_devices(lorafusion, two_stages, finished):
    _, _, out = two_stages
    numbers = json.loads(lorafusion("status", out, "--json").out)
    assert (numbers["mesh"], numbers["layers"]) == ({"stages": 2, "data": 1, "fsdp": 1, "tensor": 1}, [1, 1])
    assert "cpu  ·  2 stages (1 + 1 layers)" in lorafusion("status", out).out
    assert "stages" not in lorafusion("status", finished[1]).out


def test_settled_slots_come_after_each_adapters_first_step():
    plan = make_plan(
        [AdapterJob("law", [60] * 40, 4), AdapterJob("med", [60] * 40, 8)], capacity_tokens=128, num_stages=2
    )
    ends = {name: min(slot for slot, other, _ in plan.batches_ending() if other == name) for name in ("law", "med")}

    def sitting(first: int) -> Timeline:
        spans = tuple(Span("forward", 0, slot, slot, slot + 1) for slot in range(first, plan.num_slots))
        return Timeline(spans=spans, num_stages=2)

    whole = settled_slots(plan, sitting(0))
    assert (whole.start, whole.stop) == (max(ends.values()) + 3, plan.num_slots)
    resumed = settled_slots(plan, sitting(12))
    assert resumed.start > max(12 + 2, whole.start)
    late = plan.num_slots - 4  # too few are left: nothing is left out
    assert settled_slots(plan, sitting(late)) == range(late, plan.num_slots)
    assert not settled_slots(plan, Timeline(spans=(), num_stages=2))
