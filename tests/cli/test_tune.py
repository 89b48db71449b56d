"""lorafusion tune on layers small enough for interpreted kernels."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from more_cases import nightly

from benchmarks.saved_model import config_json
from lorafusion_jax.cli import job_calls
from lorafusion_jax.cli.job_calls import LayerCalls
from lorafusion_jax.cli.tune import layer_specs
from lorafusion_jax.config import load_config
from lorafusion_jax.models import ModelConfig
from pallas_kernels import arg_specs, config_store, device
from pallas_kernels.arg_specs import LinearSpec
from pallas_kernels.policy import LinearShape
from pallas_kernels.tuning import store
from pallas_kernels.tuning import tune as tuner
from pallas_kernels.tuning.timing import time_calls

SMALL = LayerCalls(
    model=ModelConfig(
        family="llama", vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=16,
    ),
    rows=64, dtype="float32",
    linears={"o": LinearShape(
        rows=64, in_features=64, out_features=(64,), ranks=(8,), tile=16, adapters=2, dropout=True, dtype="float32"
    )},
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _forget_programs(forget_programs):
    """What is traced here does not know that it is interpreted."""
    yield
    forget_programs()


@pytest.fixture(autouse=True)
def no_table():
    """No test leaves its table in use."""
    yield
    config_store.forget(device.device_kind())


@pytest.fixture
def wide_job(job):
    """A job over a model of 256 features: only its config.json is read."""
    config = ModelConfig(
        family="llama", vocab_size=64, hidden_size=256, intermediate_size=256, num_layers=1, num_heads=4,
        num_kv_heads=4, head_dim=64,
    )  # fmt: skip
    base = job.folder / "wide"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config_json(config)))
    job.values["base"]["model"] = str(base)
    job.values["batch"] = {"capacity_tokens": 256, "tile_tokens": 128}
    return job.write()


def keep_candidates(monkeypatch, count, kernels=None):
    """The first ones of each kernel, timed once: interpreting them all takes long, and tells nothing of a GPU."""
    groups = tuner._groups

    def first_ones(spec, quick):
        by_kernel = groups(spec, quick)
        return {kernel: by_kernel[kernel][:count] for kernel in kernels or by_kernel}

    monkeypatch.setattr(tuner, "time_calls", lambda calls, **_: time_calls(calls, rounds=1, round_s=0.0))
    monkeypatch.setattr(tuner, "_groups", first_ones)


def test_every_projection_and_every_group_of_siblings_is_tuned_once(wide_job):
    model = ModelConfig(
        family="llama", vocab_size=64, hidden_size=256, intermediate_size=512, num_layers=1, num_heads=8,
        num_kv_heads=2, head_dim=64,
    )  # fmt: skip
    specs = layer_specs(load_config(wide_job, ()), model)
    assert {(s.in_features, s.out_features, s.rank) for s in specs} == {
        (256, 512, 16), (256, 128, 16), (512, 256, 16),  # q, gate and up; k and v; o and down
        (256, 512, 64), (256, 512, 32),  # q,k,v with 48 ranks together, gate,up with 32
    }  # fmt: skip
    assert len(specs) == len(set(specs))
    assert {(s.tokens, s.tile, s.adapters, s.rate) for s in specs} == {(256, 128, 2, 0.1)}


def load_table(path: Path) -> store.Table:
    table = store.load(path)
    assert table is not None
    return table


def test_tune_writes_a_table_and_can_be_continued(lorafusion, wide_job, tmp_path, monkeypatch):
    keep_candidates(monkeypatch, 1, ["down", "da"])  # the next test tunes all kernels
    path, settings = tmp_path / "table.json", ("lora.targets=[o_proj]",)
    first = lorafusion("tune", wide_job, *settings, "--quick", "--out", path)
    assert first.code == 0, first.err
    assert first.last_line == f"next: lorafusion train {wide_job} --out runs/jobs"
    table = load_table(path)
    kernels = {entry.kernel for entry in table.entries}
    assert kernels == {"down", "da"}
    store.save(store.Table(device=table.device, conditions=table.conditions, entries=table.entries[:-1]), path)
    again = lorafusion("tune", wide_job, *settings, "--quick", "--out", path, "--json")
    assert again.code == 0, again.err
    assert load_table(path).entries[:-1] == table.entries[:-1]  # kept, not measured again
    best = json.loads(again.out)["best"]
    assert {row["kernel"] for row in best} == kernels
    assert all(row["best_us"] <= row["worst_us"] for row in best)


@pytest.mark.parametrize("rates", [(0.1,), nightly((0.1, 0.0))], ids=["dropout", "both"])
def test_without_a_job_the_named_shapes_are_tuned_where_there_is_a_gpu(lorafusion, tmp_path, monkeypatch, rates):
    path = tmp_path / "table.json"
    refused = lorafusion("tune", "--out", path)
    assert (refused.code, refused.errors) == (2, ["tune.interpreted"])
    assert lorafusion("tune", "--no-tiles", "--out", path).errors == ["tune.interpreted"]
    small = [LinearSpec(tokens=256, in_features=256, out_features=256, rate=rate) for rate in rates]
    monkeypatch.setattr(arg_specs, "tuning_specs", lambda quick: small)
    monkeypatch.setattr(device, "interprets", lambda: False)
    keep_candidates(monkeypatch, 1)
    monkeypatch.setattr(job_calls, "named_calls", lambda quick: [SMALL])
    outcome = lorafusion("tune", "--quick", "--out", path)
    assert outcome.code == 0, outcome.err
    assert outcome.last_line == "next: lorafusion doctor"
    shown = [line.split()[0] for line in outcome.out.splitlines() if "256 ×" in line]
    without_dropout = ["da", "down", "triton_dx"] if 0.0 in rates else []
    assert sorted(shown) == sorted(["da", "down", "dsdb", "triton_dx", "triton_fwd", *without_dropout])
    assert "failed" not in outcome.out
    table = load_table(path)
    assert table.device == device.device_kind()
    ran = {row.call.op: set(row.median_us) for row in table.ops}
    assert {"xla", "pallas_triton"} <= ran["linear"]
    assert "pallas_mosaic_gpu" not in ran["linear"]
    assert outcome.out.count("default") == len(table.ops)
    again = lorafusion("tune", "--no-tiles", "--out", path, "--json")
    assert again.code == 0, again.err
    assert load_table(path) == table  # nothing is measured twice
    listed = json.loads(again.out)
    assert (listed["best"], len(listed["implementations"])) == ([], len(table.ops))


@pytest.mark.parametrize("works", [True, False])
def test_what_failed_is_shown_with_the_first_reasons(lorafusion, wide_job, tmp_path, monkeypatch, works):
    groups = tuner._groups

    def broken(inputs, config, large, w):
        raise RuntimeError("too much shared memory")

    def some_break(spec, quick):
        groups_by_kernel = groups(spec, quick)
        return {
            kernel: [
                c if works and i == 0 else dataclasses.replace(c, run=broken)
                for i, c in enumerate(groups_by_kernel[kernel])
            ]
            for kernel in ("down", "da")
        }

    monkeypatch.setattr(tuner, "_groups", some_break)
    path, settings = tmp_path / "table.json", ("lora.targets=[o_proj]",)
    outcome = lorafusion("tune", wide_job, *settings, "--quick", "--out", path)
    assert (outcome.code, outcome.errors) == ((0, []) if works else (1, ["tune.all-failed"]))
    assert "candidates failed" in outcome.out
    assert outcome.out.count("RuntimeError: too much shared memory") == 5
    assert "more; --json lists all" in outcome.out
    listed = json.loads(lorafusion("tune", wide_job, *settings, "--quick", "--out", path, "--json").out)
    assert len(listed["failed"]) > 5
    assert {failure["reason"] for failure in listed["failed"]} == {"RuntimeError: too much shared memory"}
    assert {row["tried"] for row in listed["best"]} == ({1} if works else set())
    assert path.exists() == works


def test_a_job_without_supported_kernels_is_an_error(lorafusion, job):
    outcome = lorafusion("tune", job.path)
    assert outcome.code == 2
    assert outcome.errors == ["tune.nothing-fits"]
