"""Stored frozen weights from another package: int8 with a scale per output channel."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_jobs import exported, largest_difference, store_base_as, two_adapters

from lorafusion_jax.cli.main import run
from lorafusion_jax.training.verify import verify_exports

SOURCE = """
import jax.numpy as jnp

from lorafusion_jax.extend import ArraySpec, StoredKind


def arrays(k, n):
    return {"rounded": ArraySpec(shape=(k, n), dtype="int8"), "unit": ArraySpec(shape=(n,), dtype="float32")}


def quantise(kernel):
    unit = jnp.maximum(jnp.abs(kernel).max(0), 1e-30) * jnp.float32(1 / 127)
    return {"rounded": jnp.round(kernel / unit).astype(jnp.int8), "unit": unit}


def dequantise(stored, dtype):
    return (stored["rounded"] * stored["unit"]).astype(dtype)


EIGHT = StoredKind(arrays=arrays, quantise=quantise, dequantise=dequantise)
NOTHING = 5
"""
POINTS = {"lorafusion_jax.stored_weights": {"eight": "EIGHT", "nothing": "NOTHING"}}


@pytest.fixture(autouse=True)
def _installed(install, kept_programs):
    install("toy_stored", SOURCE, POINTS)


@pytest.fixture
def job(write_rows, write_job):
    adapters = two_adapters({"law": write_rows("law.jsonl", 8, 0, 12)}, ["law"])
    return lambda kind: store_base_as(kind, write_job(adapters))


def rounded_base(base, to):
    """A copy of a base whose projections have 255 values per output channel, written out in float32."""
    shutil.copytree(base, to)
    tensors = load_file(to / "model.safetensors")
    for name, w_NK in tensors.items():
        if name.endswith("_proj.weight"):
            unit = np.abs(w_NK).max(1, keepdims=True) * np.float32(1 / 127)
            tensors[name] = (np.round(w_NK / unit) * unit).astype(np.float32)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_trains_to_the_adapter_that_the_dequantised_base_gives(job, tiny_base, tmp_path, capsys):
    """From the command line; recomputing in backward dequantises once more and changes nothing."""

    def trained(name: str, kind: str, *overrides: str):
        code = run(["train", str(job(kind)), "--out", str(tmp_path / name), *overrides])
        assert code == 0, capsys.readouterr().err
        return exported(tmp_path / name, "law")

    stored = trained("stored", "eight", "train.remat=gemm_inputs")
    assert verify_exports(tmp_path / "stored")["law"].same
    none = ("none", "adapters.law.data.eval=null")  # their weights are compared: no evaluation is compiled
    explicit = trained("explicit", *none, f"base.model={rounded_base(tiny_base, tmp_path / 'rounded')}")
    plain = trained("plain", *none)
    assert largest_difference(stored, explicit) < 1e-5  # rounding, carried through optimizer steps
    assert largest_difference(stored, plain) > 1e-3  # it is another base


@pytest.mark.parametrize(("kind", "says"), [("eigth", "did you mean 'eight'"), ("nothing", "toy_stored")])
def test_what_does_not_exist_or_load_is_refused(job, capsys, kind, says):
    assert run(["check", str(job(kind))]) == 2
    shown = capsys.readouterr().err
    assert "error[" in shown
    assert says in shown
    assert "Traceback" not in shown
