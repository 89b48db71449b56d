"""Bases in four and eight bits against bitsandbytes, which stores them and reads them back; `make test-peers`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
import small_jobs
from safetensors.numpy import load_file

from lorafusion_jax.config import load_config
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import train
from lorafusion_jax.weights import nf4
from lorafusion_jax.weights.nf4 import DYNAMIC

HERE = Path(__file__).parent
PEERS = os.environ.get("LORAFUSION_PEERS", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PEERS, reason="LORAFUSION_PEERS names no Python with bitsandbytes; make test-peers"),
]
LOSS, WEIGHTS = 1e-5, 2.4e-3  # as in test_against_peft.py
KINDS = ("nf4", "nf4_single", "int8")
SGD = {"name": "sgd", "lr": 0.2, "schedule": "constant", "clip": 0.0, "warmup": 0, "weight_decay": 0.0}
LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"], "dropout": 0.0, "same_base": True}
quantise = jax.jit(nf4.quantise)
MATRICES, OUTLIERS = 30, 4


def run_script(name: str, *arguments: object) -> None:
    done = subprocess.run([PEERS, HERE / name, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def draw_matrices() -> dict[str, np.ndarray]:
    """Of many sizes, with outliers and blocks of zeros; bitsandbytes' CPU library needs rows of whole blocks."""
    draw, matrices = np.random.default_rng(5), {}
    for number in range(MATRICES):
        shape = int(draw.integers(1, 48)) * 8, int(draw.integers(1, 8)) * 64
        w = (draw.standard_t(3 + number % 5, shape) * 10.0 ** draw.uniform(-4, 1)).astype(np.float32)
        w.reshape(-1)[draw.integers(0, w.size, OUTLIERS)] *= 50
        w[draw.integers(0, shape[0])] = 0
        matrices[f"m{number}"] = w
    return matrices


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    home, matrices = tmp_path_factory.mktemp("matrices"), draw_matrices()
    np.savez(home / "matrices.npz", **matrices)
    run_script("bnb_bases.py", "matrices", home / "matrices.npz", home / "stored.npz")
    return matrices, np.load(home / "stored.npz")


def test_the_codes_of_weights_are_those_of_bitsandbytes(stored):
    matrices, theirs = stored
    for name, w in matrices.items():
        twice, once = quantise(w.T), jax.jit(nf4.quantise_single)(w.T)
        for kind, ours in {"nf4": twice, "nf4_single": once}.items():
            codes = np.asarray(ours["codes"]).reshape(-1)
            np.testing.assert_array_equal(codes, theirs[f"{name}/{kind}/codes"], err_msg=name)
        largest = theirs[f"{name}/nf4_single/absmax"]  # ours are filled up to a group of 256
        np.testing.assert_array_equal(np.asarray(once["absmax"]).reshape(-1)[: largest.size], largest, err_msg=name)
        np.testing.assert_allclose(twice["offset"], theirs[f"{name}/nf4/offset"], rtol=1e-6)
        np.testing.assert_allclose(twice["group_absmax"], theirs[f"{name}/nf4/group_absmax"], rtol=1e-5)


def test_the_codes_of_scales_are_the_same_or_nearer(stored):
    """Its library for CPUs looks codes up in a table of rounded numbers: some scales get a neighbour of the nearest."""
    matrices, theirs = stored
    total = apart = 0
    for name, w in matrices.items():
        codes, others = np.asarray(quantise(w.T)["absmax"]).reshape(-1), theirs[f"{name}/nf4/absmax"]
        codes = codes[: others.size]
        scales = np.abs(w.reshape(-1, 64)).max(1) - theirs[f"{name}/nf4/offset"]
        scaled = scales / np.repeat(theirs[f"{name}/nf4/group_absmax"], 256)[: others.size]
        differ = codes != others
        assert (np.abs(DYNAMIC[codes] - scaled) < np.abs(DYNAMIC[others] - scaled))[differ].all(), name
        total, apart = total + others.size, apart + int(differ.sum())
    assert total > 10_000
    assert apart <= 0.01 * total


@pytest.fixture(scope="module", params=KINDS)
def trained(request, make_base, tmp_path_factory):
    """A run on a base that transformers stored, and PEFT's in float64 on the numbers that bitsandbytes reads back."""
    kind, home = request.param, tmp_path_factory.mktemp("bnb")
    base = make_base(home / "base", hidden_size=64, intermediate_size=128, head_dim=16)
    run_script("bnb_bases.py", "base", base, home / kind, kind)
    run_script("hf_trainers.py", "start", base, home / "start")
    (home / "start" / "adapter_config.json").write_text(
        (home / "start" / "adapter_config.json").read_text().replace(str(base), str(home / kind))
    )
    entry = {
        "name": "law",
        "data": {"train": small_jobs.write_rows(home, "law", 9)},
        "lora": LORA | {"init_from": str(home / "start")},
        "batch": {"global_samples": 3},
        "optim": SGD | {"momentum": 0.0},
    }
    config = load_config(small_jobs.store_base_as(kind, small_jobs.write_job(home, home / kind, [entry])))
    data = prepare(config).adapters["law"]
    parts = [data.train.sample(int(index)) for index in data.order]
    samples = [(tokens.tolist(), mask.astype(int).tolist()) for tokens, mask in parts]
    batches = [samples[first : first + 3] for first in range(0, len(samples), 3)]
    adapter = {"start": str(home / "start"), "batches": batches, "optim": SGD | {"momentum": 0.0}}
    (home / "job.json").write_text(json.dumps({"base": f"{home / kind}-values", "adapters": {"law": adapter}}))
    run_script("peft_training.py", home / "job.json", home / "theirs.npz")
    assert train(config, home / "run").exit_code == 0
    return home, np.load(home / "theirs.npz")


def test_training_on_a_stored_base_is_training_on_its_numbers(trained):
    home, theirs = trained
    rows = [row for row in read_rows(home / "run" / "metrics.jsonl") if row["kind"] == "step"]
    np.testing.assert_allclose([row["loss"] for row in rows], theirs["law/losses"], rtol=LOSS)
    np.testing.assert_allclose([row["grad_norm"] for row in rows], theirs["law/norms"], rtol=10 * LOSS)
    before = load_file(home / "start" / "adapter_model.safetensors")
    for key, tensor in small_jobs.exported(home / "run", "law").items():
        moved = np.abs(theirs[f"law/{key}"] - before[key]).max()
        assert moved > 0
        assert np.abs(tensor - theirs[f"law/{key}"]).max() < WEIGHTS * moved, key


GOLDEN = """
import json, sys; sys.path.insert(0, ".")
import numpy as np, make_nf4_golden as made
from nf4_cases import cases
golden = np.load("golden/nf4.npz")
arrays = {f"{name}/{key}": array for name, w in cases().items() for key, array in made.stored(w).items()}
assert arrays.keys() == set(golden.files), (sorted(arrays), golden.files)
print(json.dumps([key for key, array in arrays.items() if not np.array_equal(array, golden[key])]))
"""


def test_the_committed_reference_is_what_this_version_makes():
    """Offsets are means, summed in an order of its own on every processor."""
    done = subprocess.run(
        [PEERS, "-c", GOLDEN], cwd=HERE.parent / "weights", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    differ = json.loads(done.stdout.splitlines()[-1])
    assert [key for key in differ if not key.endswith(("offset", "group_absmax", "float32"))] == []
