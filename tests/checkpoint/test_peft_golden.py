"""A folder that HF PEFT wrote, with PEFT's logits (made by benchmarks/peft_proof.py --golden)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from benchmarks.saved_model import load_decoder
from lorafusion_jax.models import Segments
from lorafusion_jax.modules import LoRAContext
from lorafusion_jax.peft.folder import export_adapter, put_adapter, read_adapter
from lorafusion_jax.peft.merge import merge_adapter

GOLDEN = Path(__file__).parent / "golden"
# float32 sums in another order on the two sides: errors of 1e-6 measured, wrong weights give 0.6
LIMIT = 1e-4


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "logits.safetensors")


@nnx.jit
def computed(model, inputs, context):
    return model(*inputs, context)


def relative_error(model, context, golden):
    rows = len(golden["tokens"])
    inputs = golden["tokens"], np.arange(rows), Segments.from_lengths([rows], rows)
    logits = np.asarray(computed(model, inputs, context))
    return np.abs(logits - golden["logits"]).max() / np.abs(golden["logits"]).max()


def test_logits_with_the_folder_are_those_of_peft(golden):
    spec, arrays = read_adapter(GOLDEN / "adapter")
    model = load_decoder(GOLDEN / "base", [spec], dtype=jnp.float32)
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    for name, value in put_adapter({name: leaf[...] for name, leaf in leaves.items()}, 0, arrays).items():
        leaves[name][...] = jnp.asarray(value)
    assert relative_error(model, LoRAContext.of([spec], [0]), golden) < LIMIT


def test_logits_of_the_merged_model_are_those_of_peft(golden, tmp_path):
    merge_adapter(GOLDEN / "base", GOLDEN / "adapter", tmp_path / "merged")
    model = load_decoder(tmp_path / "merged", dtype=jnp.float32)
    assert relative_error(model, None, golden) < LIMIT
    assert relative_error(load_decoder(GOLDEN / "base", dtype=jnp.float32), None, golden) > 100 * LIMIT


def test_our_export_of_the_folder_holds_the_tensors_that_peft_wrote(tmp_path):
    spec, arrays = read_adapter(GOLDEN / "adapter")
    leaves = {
        f"{path}.{leaf}": array[None]
        for path, pair in arrays.items()
        for leaf, array in zip(("lora_a", "lora_b"), pair, strict=True)
    }
    export_adapter(leaves, spec, 0, "tiny-qwen2", tmp_path / "out")
    ours = load_file(tmp_path / "out" / "adapter_model.safetensors")
    theirs = load_file(GOLDEN / "adapter" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(ours[key], tensor)
