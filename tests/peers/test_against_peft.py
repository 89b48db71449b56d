"""Our training, folders and templates against torch, transformers, PEFT and TRL, which run in their own environment.

`make test-peers` makes that environment and names its Python in LORAFUSION_PEERS. Versions: requirements.txt.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_jobs
from safetensors.numpy import load_file

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config import load_config
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.peft.folder import export_adapter
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import train

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PEERS = os.environ.get("LORAFUSION_PEERS", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PEERS, reason="LORAFUSION_PEERS names no Python with torch and peft; make test-peers"),
]

PLAIN = {"schedule": "cosine", "min_lr_ratio": 0.0, "warmup": 0.0, "weight_decay": 0.0, "clip": 1.0}
ADAM = {"name": "adamw", "b1": 0.9, "b2": 0.999, "momentum": 0.0, "lr": 5e-3}
SGD = ADAM | PLAIN | {"name": "sgd", "lr": 0.2, "momentum": 0.9, "schedule": "constant", "clip": 0.0}
ADAPTERS = {  # rank, alpha, rslora, targets, optimizer, samples of a global batch
    "law": (4, 8.0, False, ("q_proj", "down_proj"), ADAM | PLAIN | {"warmup": 3.0, "min_lr_ratio": 0.1}, 2),
    "med": (6, 3.0, True, ("v_proj",), ADAM | PLAIN | {"b2": 0.97, "weight_decay": 0.1, "clip": 0.05}, 3),
    "tax": (2, 4.0, False, ("q_proj", "v_proj"), SGD, 4),
}  # fmt: skip
ROWS = {"law": 13, "med": 9, "tax": 10}  # the last batch of each is short
# Float32 against float64: losses differ by the rounding of a forward pass. Adam divides by the root of its moments, so
# a weight may differ by more; both bounds are ten times what torch's own float32 shows.
LOSS, WEIGHTS = 1e-5, 2.4e-3
BASES = {
    "llama, tied": {},
    "qwen2, bias": {"family": "qwen2", "qkv_bias": True, "tie_embeddings": False},
    "qwen3, head width": {"family": "qwen3", "qk_norm": True, "head_dim": 16, "num_kv_heads": 1},
}


def peers(*arguments: object, **more: object) -> str:
    done = subprocess.run([PEERS, *map(str, arguments)], capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_versions_are_those_of_the_requirements():
    code = "import importlib.metadata as m, sys; print(*(f'{n}=={m.version(n)}' for n in sys.argv[1:]), sep='\\n')"
    wanted = [line for line in (HERE / "requirements.txt").read_text().splitlines() if "==" in line]
    versions = peers("-c", code, *[line.partition("==")[0] for line in wanted]).split()
    assert [version.partition("+")[0] for version in versions] == wanted


def write_start(folder: Path, name: str, model: ModelConfig) -> Path:
    rank, alpha, rslora, targets, _, _ = ADAPTERS[name]
    spec = AdapterSpec(name=name, rank=rank, alpha=alpha, rslora=rslora, targets=targets)
    draw, head = np.random.default_rng(len(name) + rank), model.head_dim
    sizes = {
        "q_proj": ("self_attn", model.hidden_size, model.num_heads * head),
        "v_proj": ("self_attn", model.hidden_size, model.num_kv_heads * head),
        "down_proj": ("mlp", model.intermediate_size, model.hidden_size),
    }
    leaves = {}
    for layer in range(model.num_layers):
        for target in targets:
            module, num_in, num_out = sizes[target]
            path = f"layers.{layer}.{module}.{target}"
            leaves[f"{path}.lora_a"] = draw.normal(0, num_in**-0.5, (1, num_in, rank)).astype(np.float32)
            leaves[f"{path}.lora_b"] = draw.normal(0, 0.05, (1, rank, num_out)).astype(np.float32)
    return export_adapter(leaves, spec, 0, "", folder)


@pytest.fixture(scope="module", params=BASES)
def trained(request, make_base, tmp_path_factory):
    """A run of three adapters together, its job, and what PEFT makes of each alone."""
    home = tmp_path_factory.mktemp("peers")
    base = make_base(home / "base", **BASES[request.param])
    model, entries = ModelConfig.from_hf(base), []
    for seed, (name, (rank, alpha, rslora, targets, optim, samples)) in enumerate(ADAPTERS.items()):
        start = write_start(home / f"start-{name}", name, model)
        lora = {"rank": rank, "alpha": alpha, "rslora": rslora, "targets": list(targets), "dropout": 0.0}
        ours = {key: value for key, value in optim.items() if key != "momentum" or optim["name"] == "sgd"}
        entries.append(
            {"name": name, "data": {"train": small_jobs.write_rows(home, name, ROWS[name])}, "seed": seed, "epochs": 2}
            | {"lora": lora | {"init_from": str(start), "same_base": True}, "optim": ours}
            | {"batch": {"global_samples": samples}}
        )
    config = load_config(small_jobs.write_job(home, base, entries))
    prepared = prepare(config)
    job = {"base": str(base), "adapters": {}}
    for adapter in config.adapters:
        data, size = prepared.adapters[adapter.name], adapter.global_samples
        parts = [data.train.sample(int(index)) for index in data.order]
        samples = [(tokens.tolist(), mask.astype(int).tolist()) for tokens, mask in parts]
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        start = str(home / f"start-{adapter.name}")
        job["adapters"][adapter.name] = {"start": start, "batches": batches, "optim": ADAPTERS[adapter.name][4]}
    (home / "job.json").write_text(json.dumps(job))
    peers(HERE / "peft_training.py", home / "job.json", home / "theirs.npz")
    assert train(config, home / "run").exit_code == 0
    return home, np.load(home / "theirs.npz")


@pytest.mark.parametrize("name", ADAPTERS)
def test_training_together_is_training_alone_with_peft(name, trained):
    home, theirs = trained
    rows = [
        row for row in read_rows(home / "run" / "metrics.jsonl") if row["kind"] == "step" and row["adapter"] == name
    ]
    np.testing.assert_allclose([row["loss"] for row in rows], theirs[f"{name}/losses"], rtol=LOSS)
    np.testing.assert_allclose([row["grad_norm"] for row in rows], theirs[f"{name}/norms"], rtol=10 * LOSS)
    before = load_file(home / f"start-{name}" / "adapter_model.safetensors")
    for key, tensor in small_jobs.exported(home / "run", name).items():
        moved = np.abs(theirs[f"{name}/{key}"] - before[key]).max()
        assert np.abs(tensor - theirs[f"{name}/{key}"]).max() < WEIGHTS * moved, key


def test_folders_and_merged_models_have_the_logits_of_peft(tmp_path):
    script = [sys.executable, "-m", "benchmarks.peft_proof", "--torch-python", PEERS, "--out", tmp_path / "proof.json"]
    done = subprocess.run([*map(str, script)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_templates_are_written_as_transformers_writes_them():
    """The committed reference is what these versions make."""
    code = "import json, make_template_golden as made; print(json.dumps(made.of_fixtures()['cases']))"
    cases = json.loads(peers("-c", code, cwd=ROOT / "tests" / "data").splitlines()[-1])
    assert cases == json.loads((ROOT / "tests" / "data" / "golden" / "templates.json").read_text())["cases"]


def test_an_adapter_of_some_projections_has_these_tensors_alone(make_base, tmp_path):
    """A folder of PEFT whose targets are an expression goes on, and PEFT loads what comes of it, key by key."""
    base, script = make_base(tmp_path / "base"), HERE / "peft_keys.py"
    peers(script, "make", base, tmp_path / "start")
    lora = {"init_from": str(tmp_path / "start"), "same_base": True}
    entry = {"name": "law", "data": {"train": small_jobs.write_rows(tmp_path, "law", 4)}, "lora": lora}
    job = {"adapters": [entry], "base": {"model": str(base), "dtype": "float32"}, "data": {"max_length": 64}}
    (tmp_path / "jobs.yaml").write_text(json.dumps(job | {"batch": {"capacity_tokens": 128, "tile_tokens": 16}}))
    assert train(load_config(tmp_path / "jobs.yaml"), tmp_path / "run").exit_code == 0
    folder = tmp_path / "run" / "adapters" / "law" / "latest"
    assert (
        load_file(folder / "adapter_model.safetensors").keys()
        == load_file(tmp_path / "start" / "adapter_model.safetensors").keys()
    )
    assert peers(script, "load", base, folder).split() == ["6"]
