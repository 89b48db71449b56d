"""lorafusion tune on layers small enough for interpreted kernels."""

from __future__ import annotations

import json

import pytest

from lorafusion_jax.cli.tune import layer_specs
from lorafusion_jax.config import load_config
from lorafusion_jax.models import ModelConfig
from pallas_kernels.tuning import store


@pytest.fixture
def wide_job(job):
    """A job over a model of 256 features: only its config.json is read."""
    config = ModelConfig(
        family="llama", vocab_size=64, hidden_size=256, intermediate_size=256, num_layers=1, num_heads=4,
        num_kv_heads=4, head_dim=64,
    )  # fmt: skip
    base = job.folder / "wide"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config.to_hf()))
    job.values["base"]["model"] = str(base)
    job.values["batch"] = {"capacity_tokens": 256, "tile_tokens": 128}
    return job.write()


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


def test_tune_writes_a_table_and_goes_on_where_it_stopped(lorafusion, wide_job, tmp_path):
    path = tmp_path / "table.json"
    first = lorafusion("tune", wide_job, "--quick", "--out", path)
    assert first.code == 0, first.err
    assert first.last_line == f"next: lorafusion train {wide_job} --out runs/jobs"
    table = store.load(path)
    kernels = {entry.kernel for entry in table.entries}
    assert {"down", "da", "dsdb"} <= kernels
    store.save(store.Table(device=table.device, conditions=table.conditions, entries=table.entries[:-1]), path)
    again = lorafusion("tune", wide_job, "--quick", "--out", path, "--json")
    assert again.code == 0, again.err
    assert store.load(path).entries[:-1] == table.entries[:-1]  # kept, not measured again
    best = json.loads(again.out)["best"]
    assert {row["kernel"] for row in best} == kernels
    assert all(row["best_us"] <= row["worst_us"] for row in best)


def test_a_job_that_no_kernel_divides_is_refused(lorafusion, job):
    outcome = lorafusion("tune", job.path)
    assert outcome.code == 2
    assert outcome.errors == ["tune.nothing-fits"]
