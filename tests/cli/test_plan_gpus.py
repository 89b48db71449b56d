"""lorafusion plan --gpus: meshes and sizes of microbatches are compared."""

from __future__ import annotations

import json
import shutil

import pytest
import small_jobs

LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip


@pytest.fixture(scope="module")
def large(tiny_base, tmp_path_factory):
    """A job on a base of 69 G parameters, of which only the configuration is there."""
    folder = tmp_path_factory.mktemp("large")
    for file in tiny_base.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | LARGE))
    rows = small_jobs.write_rows(folder, "law", 24)
    (folder / "jobs.yaml").write_text(
        f"base: {{model: {folder}}}\ndata: {{max_length: 256}}\nbatch: {{global_samples: 8}}\n"
        f"adapters: [{{name: law, data: {{train: {rows}}}}}]\n"
    )
    return folder / "jobs.yaml"


def compare(lorafusion, *arguments):
    outcome = lorafusion("plan", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_every_mesh_of_all_devices_is_there_and_the_fastest_that_fits_is_first(lorafusion, large):
    compared = compare(lorafusion, large, "--gpus", 4, "--device", "h200")
    rows = compared["choices"]
    meshes = {(row["stages"], row["data"], row["fsdp"]) for row in rows if row["tensor"] == 1}
    assert meshes == {(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)}
    shared = {(row["stages"], row["data"], row["fsdp"], row["tensor"]) for row in rows if row["tensor"] > 1}
    assert shared == {(2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 1, 4)}
    fitting = [row for row in compared["choices"] if row["fits"]]
    assert compared["choices"][: len(fitting)] == fitting
    assert fitting[0]["seconds"] <= 1.01 * min(row["seconds"] for row in fitting)
    assert not any(
        row["fits"] for row in compared["choices"] if row["stages"] * row["fsdp"] * row["tensor"] == 1
    )  # 138 GB of weights
    assert {row["quantize"] for row in compared["choices"]} == {"none"}
    assert "next best mesh takes" in compared["why"]
    # rows have 60 tokens, the job allows 256
    assert {row["capacity_tokens"] for row in rows} == {128, 1024, 2048, 4096}
    assert {row["capacity_tokens"] for row in rows if "batch.capacity_tokens=auto" in row["settings"]} == {128}


def test_the_proposed_settings_predict_the_same_memory(lorafusion, large):
    best = compare(lorafusion, large, "--gpus", 2, "--device", "h200")["choices"][0]
    planned = json.loads(lorafusion("plan", large, *best["settings"], "--device", "h200", "--json").out)
    assert max(stage["total"] for stage in planned["memory"]["stages"]) == best["memory_bytes"]
    assert planned["memory"]["fits"] is True


def test_devices_of_a_layer_are_as_the_job_says(lorafusion, large):
    compared = compare(lorafusion, large, "mesh.tensor=2", "--gpus", 4, "--device", "h200")
    assert {row["stages"] * row["data"] * row["fsdp"] * row["tensor"] for row in compared["choices"]} == {4}
    assert {row["tensor"] for row in compared["choices"]} == {2}
    odd = lorafusion("plan", large, "mesh.tensor=2", "--gpus", 3)
    assert odd.code == 2
    assert "mesh.tensor=2" in odd.err


def test_devices_share_layers_where_a_pipeline_would_wait(lorafusion, large):
    """One adapter with one sample in a batch: neither replicas nor stages have anything to do beside each other."""
    compared = compare(lorafusion, large, "batch.global_samples=1", "--gpus", 4, "--device", "h200")
    best, rest = compared["choices"][0], compared["choices"][1:]
    assert (best["stages"], best["tensor"]) == (1, 4)
    assert best["settings"][0] == "mesh.tensor=4"
    assert compared["why"].startswith("4 devices compute each layer, and adding up their results costs less than")
    stages = [row["seconds"] for row in rest if row["stages"] == 4 and row["seconds"]]
    assert best["seconds"] < min(stages)
    settings = ["batch.global_samples=1", *best["settings"]]
    planned = json.loads(lorafusion("plan", large, *settings, "--device", "h200", "--json").out)
    assert max(stage["total"] for stage in planned["memory"]["stages"]) == best["memory_bytes"]


def test_the_base_is_quantised_only_if_it_fits_nowhere(lorafusion, large):
    compared = compare(lorafusion, large, "--gpus", 1, "--device", "l40s")
    first = compared["choices"][0]
    assert (first["fits"], first["quantize"]) == (True, "nf4")
    assert all(row["fits"] is False for row in compared["choices"] if row["quantize"] in ("none", "fp8"))
    assert "base.quantize=nf4" in first["settings"]
    own_comparison = compare(lorafusion, large, "base.quantize=fp8", "--gpus", 1, "--device", "l40s")
    assert {row["quantize"] for row in own_comparison["choices"]} == {"fp8"}  # what the job says stays
    assert own_comparison["why"] == ""


def test_screen_ends_with_a_command(lorafusion, large):
    outcome = lorafusion("plan", large, "--gpus", 2, "--device", "h200")
    lines = outcome.out.strip().splitlines()
    assert lines[0] == "2 × h200, default rates, nothing measured"
    assert lines[-1].startswith(f"next: lorafusion train {large} mesh.tensor=2 ")
