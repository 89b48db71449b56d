"""Predictions of plan: memory per stage, advice, times, and the source of the costs."""

from __future__ import annotations

import json
import re
from typing import get_args, get_type_hints

import pytest
from shapes import LLAMA_8B, LLAMA_70B

from benchmarks.saved_model import config_json
from lorafusion_jax.cli.plan import command
from lorafusion_jax.cli.running import compare_with_prediction
from lorafusion_jax.log_file import read_rows
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning import prediction
from lorafusion_jax.planning.memory import GIB, USABLE, memory_problem, stage_memory
from lorafusion_jax.planning.prediction import DEVICES
from pallas_kernels.cost import H200
from scheduling import CostModel, CostParts, PassCost, StageCost


@pytest.fixture
def job(job):
    job.values["train"].pop("layers", None)
    job.write()
    return job


@pytest.fixture
def large(job, tmp_path):
    """The job over a base of Llama-3.1-8B's shape: no weights are read when planning."""
    base = tmp_path / "large"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config_json(LLAMA_8B)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((job.folder / job.values["base"]["model"] / name).read_bytes())
    job.values.update({"base": {"model": str(base)}, "batch": {"capacity_tokens": 8192}})
    job.write()
    return job


def plan(lorafusion, job, *arguments):
    outcome = lorafusion("plan", job.path, *arguments, "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_memory_is_that_of_the_model_in_whole_and_in_parts(lorafusion, large):
    from lorafusion_jax.config import load_config

    memory = plan(lorafusion, large, "mesh.stages=4", "--device", "h200")["memory"]
    problem = memory_problem(
        load_config(large.path, ["mesh.stages=4"]), ModelConfig.from_hf(large.values["base"]["model"])
    )
    assert [row["total"] for row in memory["stages"]] == [stage.total for stage in stage_memory(problem)]
    for row in memory["stages"]:
        assert row["total"] == sum(size for name, size in row.items() if name != "total")
    assert memory["layers"] == [8, 8.5, 8.5, 7]
    assert (memory["remat"], memory["fits"], memory["advice"]) == ("everything", True, "")


def test_evaluations_and_saves_are_predicted_and_stand_beside_what_they_took(lorafusion, job, tmp_path):
    predicted = plan(lorafusion, job, "save.every_steps=2")["predicted"]
    run = tmp_path / "run"
    outcome = lorafusion("train", job.path, "save.every_steps=2", "--out", run)
    assert outcome.code == 0, outcome.err
    assert predicted["evaluations"] == sum(row["kind"] == "eval" for row in read_rows(run / "metrics.jsonl"))
    saved = [row for row in read_rows(run / "events.jsonl") if row["kind"] == "saved"]
    assert predicted["saves"] == len(saved)
    assert all(0 < row["paused_s"] <= row["seconds"] for row in saved)
    parts = [predicted[key] for key in ("seconds", "evaluation_s", "saving_s")]
    assert predicted["wall_s"] == pytest.approx(sum(parts), rel=1e-12)
    assert min(parts) > 0
    assert re.search(r"training \S+( s)?  ·  held-out losses \S+( s)?  ·  saving \S+( s)?$", outcome.out, re.M)
    events = run / "events.jsonl"
    unsigned = re.sub(r', "crc": "\w{8}"', "", events.read_text())
    events.write_text(unsigned.replace('"device": "cpu"', '"device": "NVIDIA H200"'))  # it has measured rates
    assert re.fullmatch(
        r"training .* predicted\)  ·  held-out losses .* predicted\)  ·  saving .* predicted\)",
        compare_with_prediction(run) or "",
    )
    text = lorafusion("plan", job.path, "save.every_steps=2").out
    assert re.search(r"with \d+ evaluations \(.*\) and \d+ saves \(.*\) .*, without start-up", text)


@pytest.mark.parametrize("setting", ["train.resident=1", "train.places={16: 2}"])
def test_places_without_rows_have_a_floor(lorafusion, large, setting):
    numbers = plan(lorafusion, large, setting, "--device", "h200")
    assert 0 < numbers["floor_s"] < numbers["predicted"]["seconds"]


def test_screen_shows_memory_and_fit(lorafusion, large):
    text = lorafusion("plan", large.path, "mesh.stages=2", "--device", "h100").out
    assert re.search(r"^memory/stage  s0 \d+\.\d  s1 \d+\.\d GiB of 79   fits$", text, re.MULTILINE)
    assert "layers 17 + 15, saved for backward: everything" in text
    assert "not modelled: copies and temporaries that the compiler adds" in text


def test_auto_remat_saves_less_if_memory_is_short(lorafusion, large):
    def memory(size, *arguments):
        return plan(lorafusion, large, *arguments, "--device", "h100", "--device-memory", str(size))["memory"]

    needs = [
        memory(79, f"train.remat={keep}")["stages"][0]["total"] / USABLE / GIB for keep in ("everything", "gemm_inputs")
    ]
    keeps = [memory(f"{size:.3f}")["remat"] for size in (needs[0] + 0.01, needs[0] - 0.01, needs[1] - 0.01)]
    assert keeps == ["everything", "gemm_inputs", "nothing"]


def test_advice_names_a_capacity_that_fits(lorafusion, large):
    small = ("--device", "h100", "--device-memory", "30")
    text = lorafusion("plan", large.path, "train.remat=gemm_inputs", *small).out
    assert "does not fit" in text
    assert text.endswith(f"next: lorafusion plan {large.path} train.remat=gemm_inputs train.remat=nothing\n")
    capacity = re.search(r"to make it fit: batch.capacity_tokens: (\d+) or train.remat: nothing", text)[1]
    fitting = plan(lorafusion, large, "train.remat=gemm_inputs", f"batch.capacity_tokens={capacity}", *small)
    assert fitting["memory"]["fits"]
    assert fitting["memory"]["advice"] == ""


def test_small_sizes_are_shown_in_mib_and_weights_too_large_ask_for_devices(lorafusion, job):
    text = lorafusion("plan", job.path, "--device-memory", "0.0001").out
    assert re.search(r"^memory/stage  s0 \d+\.\d MiB of 0\.1   does not fit$", text, re.MULTILINE)
    assert text.endswith(f"next: lorafusion plan {job.path} mesh.stages=2\n")
    text = lorafusion("plan", job.path, "--device-memory", "24").out
    assert re.search(r"^memory/stage  s0 \d+\.\d MiB of 24 GiB   fits$", text, re.MULTILINE)


def test_fsdp_shares_the_weights_and_predicts_gathering(lorafusion, large):
    whole, split = (
        plan(lorafusion, large, *mesh, "--device", "h200")
        for mesh in (("mesh.data=4",), ("mesh.data=1", "mesh.fsdp=4"))
    )
    assert whole["memory"]["stages"][0]["frozen"] > 3.9 * split["memory"]["stages"][0]["frozen"]
    assert split["predicted"]["seconds"] > whole["predicted"]["seconds"]


def test_devices_of_a_layer_share_it_and_take_time_to_add_up(lorafusion, large):
    alone, split = (
        plan(lorafusion, large, "mesh.data=1", f"mesh.tensor={tensor}", "--device", "h200") for tensor in (1, 4)
    )
    assert alone["memory"]["stages"][0]["frozen"] > 3.9 * split["memory"]["stages"][0]["frozen"]
    assert alone["memory"]["stages"][0]["kept"] > split["memory"]["stages"][0]["kept"]
    assert 1 < alone["predicted"]["seconds"] / split["predicted"]["seconds"] < 4
    assert split["predicted"]["costs"].startswith("default rates of 4 h200 per stage")


def test_a_cpu_shows_memory_without_a_verdict(lorafusion, job):
    memory = plan(lorafusion, job, "--device", "cpu")["memory"]
    assert (memory["fits"], memory["advice"], memory["device_bytes"]) == (None, None, None)
    assert "MiB\n" in lorafusion("plan", job.path, "--device", "cpu").out


def test_measured_costs_replace_default_ones(lorafusion, job):
    layer = StageCost(forward=PassCost(fixed_s=1.0), backward=PassCost(fixed_s=2.0))
    file = job.folder / "cost.json"
    file.write_text(CostParts(layer=layer, source="this very machine").to_json())
    numbers = plan(lorafusion, job, "--cost-model", file)
    assert numbers["predicted"]["costs"] == "this very machine"
    assert numbers["predicted"]["seconds"] == pytest.approx(2 * 3.0 * (numbers["slots"] - numbers["noops"]))
    assert "predictions: this very machine" in lorafusion("plan", job.path, "--cost-model", file).out


def test_measured_costs_serve_microbatches_of_the_measured_size(lorafusion, job):
    cost = StageCost(forward=PassCost(fixed_s=1.0), backward=PassCost(fixed_s=2.0))
    tokens, file = plan(lorafusion, job)["capacity_tokens"], job.folder / "cost.json"
    file.write_text(CostModel(stages=(cost,), capacity_tokens=tokens).to_json())
    assert lorafusion("plan", job.path, "--cost-model", file).code == 0
    outcome = lorafusion("plan", job.path, "--cost-model", file, f"batch.capacity_tokens={2 * tokens}")
    assert (outcome.code, outcome.errors) == (2, ["plan.cost"])
    assert f"measure again with batch.capacity_tokens={2 * tokens}" in outcome.err


def test_a_file_that_is_no_cost_model_is_refused(lorafusion, job):
    file = job.folder / "cost.json"
    file.write_text("{}")
    outcome = lorafusion("plan", job.path, "--cost-model", file)
    assert (outcome.code, outcome.errors) == (2, ["plan.cost-format"])
    assert lorafusion("plan", job.path, "--cost-model", job.folder / "none.json").code == 2


def test_more_stages_than_layers_are_refused(lorafusion, job):
    outcome = lorafusion("plan", job.path, "mesh.stages=3")
    assert (outcome.code, outcome.errors) == (2, ["mesh.stages"])


def test_own_layers_are_checked_and_used(lorafusion, large):
    outcome = lorafusion("plan", large.path, "mesh.stages=2", "mesh.layers=[20, 20]")
    assert (outcome.code, outcome.errors) == (2, ["mesh.layers"])
    memory = plan(lorafusion, large, "mesh.stages=2", "mesh.layers=[20, 12]", "--device", "h200")["memory"]
    assert memory["layers"] == [20, 12]


def test_a_model_that_cannot_be_run_is_planned_without_predictions(lorafusion, large):
    config = json.loads((large.folder / "large" / "config.json").read_text())
    (large.folder / "large" / "config.json").write_text(json.dumps(config | {"hidden_act": "quick_gelu"}))
    numbers = plan(lorafusion, large)
    assert (numbers["memory"], numbers["predicted"]) == (None, None)
    assert (
        "no times and no memory are predicted: this model is not supported: hidden_act 'quick_gelu'"
        in numbers["warnings"][0]
    )


@pytest.mark.parametrize("shape", [LLAMA_8B, LLAMA_70B])
@pytest.mark.parametrize("mesh", [(), ("mesh.stages=4",), ("mesh.data=2",), ("mesh.stages=2", "mesh.fsdp=2")])
def test_the_floor_is_below_the_prediction_and_not_far(lorafusion, large, shape, mesh):
    (large.folder / "large" / "config.json").write_text(json.dumps(config_json(shape)))
    numbers = plan(lorafusion, large, *mesh, "--device", "h200")
    share = numbers["floor_s"] / numbers["predicted"]["seconds"]
    assert share < 0.9
    if numbers["stages"] == 1:  # where no stage waits
        assert share > 0.5  # attention over the empty room is predicted, too


def test_the_floor_stays_below_the_prediction_with_many_adapters_of_high_rank(lorafusion, large):
    for lora in ("lora={rank: 64, alpha: 64, dropout: 0.1}", "lora={rank: 256, alpha: 64}"):
        numbers = plan(lorafusion, large, lora, "data.loss=all", "--device", "h200")
        assert numbers["floor_s"] < numbers["predicted"]["seconds"]


def test_the_floor_is_that_of_products_at_the_ceilings(lorafusion, large):
    """4 FLOPs a token and weight; on top LoRA of rank 16 and the gate's own bytes, and the head for what is learned."""
    numbers = plan(lorafusion, large, "lora={rank: 16, alpha: 32}", "--device", "h200")
    microbatches = numbers["slots"] - numbers["noops"]
    weights = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    products = microbatches * 4 * numbers["capacity_tokens"] * weights / H200.flops
    assert products < numbers["floor_s"] < 1.08 * products
    learned = plan(lorafusion, large, "lora={rank: 16, alpha: 32}", "data.loss=all", "--device", "h200")
    assert learned["floor_s"] > numbers["floor_s"]  # more rows of the head


def test_the_floor_is_shown_for_measured_devices_only(lorafusion, large):
    text = lorafusion("plan", large.path, "--device", "h200").out
    floor = r"[\dhm.]+ s? ?at the least \(linear layers and head on H200s, no attention\)$"
    assert re.search(rf"^takes .* useful tok/s, {floor}", text, re.MULTILINE)
    text = lorafusion("plan", large.path, "--compare", "--device", "h200").out
    assert re.search(rf"^one after another .*×\n  together {floor}", text, re.MULTILINE)
    for device in ("h100", "cpu"):
        assert plan(lorafusion, large, "--device", device)["floor_s"] is None
        assert "at the least" not in lorafusion("plan", large.path, "--device", device).out


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_that_is_offered_has_plans(lorafusion, job, device):
    planned = plan(lorafusion, job, "--device", device, "--compare", "save.every_steps=2")
    assert planned["predicted"]["wall_s"] > planned["predicted"]["seconds"] > 0
    assert planned["predicted"]["costs"].startswith(f"default rates of one {device}")
    assert "this machine" not in planned["predicted"]["costs"]
    compared = plan(lorafusion, job, "--device", device, "--gpus", "2")
    assert compared["device"] == device
    assert all(choice["seconds"] > 0 for choice in compared["choices"])


def test_the_command_offers_the_known_devices():
    offered = [get_args(part) for part in get_args(get_type_hints(command)["device"])]
    assert DEVICES in offered


@pytest.mark.parametrize(("driver", "device", "note"), [
    ("NVIDIA L40S", "l40s", "this machine has NVIDIA L40S"),
    ("NVIDIA B200", "h200", "this machine has NVIDIA B200, whose rates are not known"),
    (None, "cpu", "this machine has no NVIDIA GPU"),
])  # fmt: skip
def test_a_plan_without_a_device_is_that_of_this_machine_and_names_it(
    lorafusion, job, tmp_path, monkeypatch, driver, device, note
):
    if driver is not None:
        gpu = tmp_path / "driver" / "gpus" / "0000:01:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t {driver}\nIRQ:   \t\t 42\n")
    monkeypatch.setattr(prediction, "_DRIVER", tmp_path / "driver")
    monkeypatch.setattr(prediction, "_FIRST_GPU", tmp_path / "none")
    costs = plan(lorafusion, job)["predicted"]["costs"]
    assert costs.startswith(f"default rates of one {device} ")
    assert note in costs
