"""Bases that come packed give the logits of transformers, which unpacks them."""

import json
import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from benchmarks.saved_model import load_decoder, load_frozen
from lorafusion_jax.models import Segments
from lorafusion_jax.models.forward import logits
from lorafusion_jax.weights.table import stored_kind

HERE, PEERS = Path(__file__).parent, os.environ.get("LORAFUSION_PEERS", "")
UNPACKERS = Path(PEERS).parents[1] / "unpackers" if PEERS else Path()  # gptqmodel, optimum, compressed-tensors
FORMS = {  # → base.quantize
    **dict.fromkeys(("awq", "awq_groups_of_32", "gptq", "gptq_2_bits", "gptq_8_bits_one_group"), "none"),
    **dict.fromkeys(("gptq_by_activation", "gptq_v2", "gptq_v2_8_bits"), "none"),
    **dict.fromkeys(("pack_quantized", "pack_quantized_8_bits", "pack_quantized_zeros"), "none"),
    "int_quantized": "int8",
    "float_quantized_blocks": "fp8_blocks",
}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PEERS, reason="LORAFUSION_PEERS names no Python with torch; make test-peers"),
]


def widened(folder, kind, to):
    """The base with the kernels of its stored kind as plain numbers."""
    frozen = load_frozen(folder, dtype=jnp.float32, quantize=kind)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        kernels = [name for name in file.keys() if name.endswith("_proj.weight")]  # noqa: SIM118, it is no mapping
        scales = [f"{name}_scale" for name in kernels]
        tensors = {name: file.get_tensor(name) for name in {*file.keys()} - {*kernels, *scales}}
    for name in kernels:
        leaf = f"{name.removeprefix('model.').removesuffix('.weight')}.kernel"
        tensors[name] = np.asarray(stored_kind(kind).dequantise(frozen[leaf], jnp.float32)).T.copy()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    to.mkdir()
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors")
    return to


def difference(folder, expected):
    """The largest difference of the logits, of the largest."""
    (expected,) = load_file(expected).values()
    model, count = load_decoder(folder, dtype=jnp.float32), len(expected)
    hidden = model.hidden(jnp.arange(3, 3 + count), jnp.arange(count), Segments.from_lengths([count], count))
    values = logits(hidden, model.head(), model.config)
    assert np.ptp(expected) > 0.5, "the model says nothing"
    return np.abs(values - expected).max() / np.abs(expected).max()


def test_an_fp8_base_computes_what_transformers_does(tmp_path):
    subprocess.run([PEERS, HERE / "packed_bases.py", tmp_path], check=True)
    assert difference(tmp_path, tmp_path / "expected") < 1e-3


@pytest.fixture(scope="module")
def unpacked_bases(tmp_path_factory):
    if not UNPACKERS.is_dir():
        pytest.skip(f"{UNPACKERS} is not there; make test-peers")
    folder = tmp_path_factory.mktemp("bases")
    subprocess.run(
        [PEERS, HERE / "unpacked_bases.py", folder], check=True, env={**os.environ, "PYTHONPATH": str(UNPACKERS)}
    )
    assert {entry.name for entry in folder.iterdir()} == {*FORMS}
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_packed_bases_compute_what_transformers_does(form, unpacked_bases, tmp_path):
    folder = unpacked_bases / form
    base = widened(folder, FORMS[form], tmp_path / "plain") if FORMS[form] != "none" else folder
    assert difference(base, folder / "expected") < 2e-5
