"""Settings that a job leaves to the planner: chosen once, as `plan --gpus` compares them, and written into the run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import jsonschema
import pytest
import small_jobs
import yaml
from campaigns.quick_runs import quick_runs

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config import load_config
from lorafusion_jax.config.json_schema import job_schema
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.planning.auto import resolve_auto
from lorafusion_jax.planning.choices import CLOSE, Choice, Mesh, _reason, compare_choices
from lorafusion_jax.planning.network import network_of
from lorafusion_jax.planning.prediction import predicted_costs
from lorafusion_jax.training import resume, train
from scheduling.cost_parts import SUM_SPEED

LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip


@pytest.fixture(scope="module")
def write(tiny_base, tmp_path_factory):
    """write(large, **sections) → job file; of the large base, with 69 G parameters, only the configuration exists."""
    folder = tmp_path_factory.mktemp("auto")
    shutil.copytree(tiny_base, folder / "large")
    settings = json.loads((folder / "large" / "config.json").read_text())
    (folder / "large" / "config.json").write_text(json.dumps(settings | LARGE))
    rows = small_jobs.write_rows(folder, "law", 24, longest=8)

    def make(large, **sections):
        job = {"base": {"model": str(folder / "large" if large else tiny_base)}, "data": {"max_length": 64}}
        law = {"name": "law", "data": {"train": rows}, "lora": {"rank": 4}, "batch": {"global_samples": 8}}
        job |= {"adapters": [law]}
        for name, section in sections.items():
            job[name] = job.get(name, {}) | section if isinstance(section, dict) else section
        (folder / "jobs.yaml").write_text(yaml.safe_dump(job))
        return folder / "jobs.yaml"

    return make


def resolved(job, **options):
    config = load_config(job)
    return config, *resolve_auto(config, prepare(config), **options)


def test_auto_takes_what_the_comparison_proposes(write):
    job = write(True, mesh="auto", batch={"capacity_tokens": "auto", "global_samples": 8})
    config, chosen, why = resolved(job, device="h200", gpus=4)
    assert config.auto == ("batch.capacity_tokens", "mesh")
    compared = compare_choices(
        config, ModelConfig.from_hf(base_directory(config)), prepare(config), device="h200", gpus=4, vary=config.auto
    )
    best = compared.best
    assert (chosen.mesh.stages, chosen.mesh.data, chosen.mesh.fsdp) == (best.stages, best.data, best.fsdp)
    assert chosen.mesh.stages * chosen.mesh.stage_devices == 4
    assert chosen.batch.capacity_tokens == best.capacity_tokens
    assert chosen.base.quantize == "none"
    assert chosen.auto == ()
    assert why.startswith(f"batch.capacity_tokens={best.capacity_tokens}, mesh={best.stages} × ")
    assert why.endswith(f"{compared.why} (predicted)")


def test_auto_lets_devices_share_layers_in_one_process_only(write):
    job = write(True, mesh="auto", batch={"capacity_tokens": 1024, "global_samples": 1})
    _, chosen, why = resolved(job, device="h200", gpus=4)
    assert (chosen.mesh.stages, chosen.mesh.tensor) == (1, 4)
    assert "mesh=1 × 1 × 1 × 4: 4 devices compute each layer" in why
    assert resolved(job, device="h200", gpus=4, network=network_of("h200", 2))[1].mesh.tensor == 1


def test_layers_that_devices_cannot_share_have_no_such_mesh(write):
    job = write(True, mesh="auto", batch={"capacity_tokens": 1024, "global_samples": 1})
    config = load_config(job)
    model = ModelConfig.from_hf(base_directory(config))
    models = model, replace(model, num_kv_heads=1), replace(model, num_heads=63, num_kv_heads=63)
    rows = prepare(config)
    compared = [compare_choices(config, model, rows, device="h200", gpus=4) for model in models]
    assert [max(choice.tensor for choice in comparison.choices) for comparison in compared] == [4, 1, 1]


def test_devices_of_a_layer_add_up_their_results_over_the_link(write, monkeypatch):
    """Two all-reduces of a row in each pass of a layer: of two devices, each sends and receives a whole row in one."""
    config = load_config(write(True, mesh={"tensor": 2}))
    model = ModelConfig.from_hf(base_directory(config))
    costs = predicted_costs(config, model, "h200")
    monkeypatch.setattr("lorafusion_jax.planning.prediction.shared_parts", lambda parts, devices: parts)
    alone = predicted_costs(config, model, "h200")
    row_s = 2 * LARGE["hidden_size"] / 112e9 / SUM_SPEED
    assert costs.stages[0].backward.token_s - alone.stages[0].backward.token_s == pytest.approx(80 * 2 * row_s)
    assert costs.stages[0].forward.token_s - alone.stages[0].forward.token_s == pytest.approx((80 * 2 + 2) * row_s)


def test_a_quantised_base_is_on_no_such_mesh(write):
    config = load_config(write(True, mesh="auto", base={"quantize": "nf4"}, batch={"capacity_tokens": 1024}))
    model = ModelConfig.from_hf(base_directory(config))
    compared = compare_choices(config, model, prepare(config), device="h200", gpus=4)
    assert {choice.tensor for choice in compared.choices} == {1}


def test_only_what_is_auto_is_chosen(write):
    job = write(True, mesh={"stages": 2}, base={"quantize": "auto"}, batch={"capacity_tokens": 1024})
    _, chosen, _ = resolved(job, device="h200", gpus=8)
    assert (chosen.mesh.stages, chosen.batch.capacity_tokens, chosen.base.quantize) == (2, 1024, "none")
    _, smaller, _ = resolved(job, device="l40s", gpus=8)
    assert smaller.base.quantize in ("fp8", "nf4")


def test_what_fits_nowhere_is_an_error(write):
    job = write(True, mesh="auto", base={"quantize": "auto"})
    with pytest.raises(LoraFusionError, match=r"auto\.memory") as caught:
        resolved(job, device="l40s", gpus=1, memory_bytes=8 << 30)
    assert "no choice for mesh, base.quantize fits into the memory of 1 × l40s" in str(caught.value)


def test_the_schema_for_editors_knows_auto(write):
    job = yaml.safe_load(write(False, mesh="auto", batch={"capacity_tokens": "auto"}).read_text())
    jsonschema.validate(job, job_schema())


@pytest.mark.parametrize("section", [{"mesh": "automatic"}, {"batch": {"tile_tokens": "auto"}}, {"save": "auto"}])
def test_other_keys_have_no_auto(write, section):
    with pytest.raises(LoraFusionError, match=r"config\.(value|type)"):
        load_config(write(False, **section))


def test_capacities_hold_the_longest_sample_of_the_data_and_no_more(write):
    file = write(False, batch={"capacity_tokens": "auto", "tile_tokens": 16})
    held_out = small_jobs.write_rows(file.parent, "held", 6, longest=24)

    def smallest(*settings):
        config = load_config(file, settings)
        data = prepare(config)
        model = ModelConfig.from_hf(base_directory(config))
        compared = compare_choices(config, model, data, device="h200", gpus=1, vary=config.auto)
        size = min(choice.capacity_tokens for choice in compared.choices)
        law = data.adapters["law"]
        longest = max(int(samples.lengths.max()) for samples in (law.train, law.eval) if samples is not None)
        assert longest <= size < longest + 16
        return size

    assert smallest() == smallest("data.max_length=4096") < smallest(f"data.eval={held_out}")


def test_a_run_keeps_what_was_chosen(write, tmp_path, monkeypatch):
    job = write(
        False,
        batch={"capacity_tokens": "auto", "tile_tokens": 16},
        base={"quantize": "auto", "dtype": "float32"},
        train={"max_steps": 2},
    )
    phases = []
    with quick_runs():
        train(load_config(job), tmp_path / "run", listeners=[lambda event: phases.append(getattr(event, "text", ""))])
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert kept["batch"]["capacity_tokens"] < kept["adapters"][0]["data"]["max_length"]  # as the data needs
    assert kept["base"]["quantize"] == "none"
    assert "auto" not in kept
    assert json.loads((tmp_path / "run" / "run.json").read_text())["auto"].startswith("batch.capacity_tokens=")
    assert any(text.startswith("chosen batch.capacity_tokens=") for text in phases)
    monkeypatch.setattr("lorafusion_jax.training.start.resolve_auto", None)
    with quick_runs():
        assert resume(tmp_path / "run").exit_code == 0


@pytest.mark.parametrize(
    ("other_s", "sentence"),
    [
        (10.2, "the next best mesh takes 1.02 × the time"),
        (9.95, "another mesh takes 0.995 × the time, and this one is simpler"),
    ],
)
def test_the_reason_does_not_call_a_faster_mesh_the_next_best(other_s, sentence):
    """Of meshes that are as fast within a percent the simplest is proposed."""
    assert CLOSE * other_s >= 10
    simple, other = (
        Choice(
            **Mesh(stages, 1, 1, 1)._asdict(),
            capacity_tokens=1024,
            of_data=False,
            quantize="none",
            remat="everything",
            memory_bytes=stages,
            fits=True,
            seconds=seconds,
        )
        for stages, seconds in ((1, 10.0), (2, other_s))
    )
    assert sentence in _reason(sorted([simple, other], key=lambda choice: choice.seconds))
