"""A base in FP8 blocks, with its experts, gives the logits of transformers, which widens it itself."""

import os
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from lorafusion_jax.models import Segments, load_decoder
from lorafusion_jax.models.forward import logits

PEERS = os.environ.get("LORAFUSION_PEERS", "")


@pytest.mark.nightly
@pytest.mark.skipif(not PEERS, reason="LORAFUSION_PEERS names no Python with torch; make test-peers")
def test_an_fp8_base_computes_what_transformers_does(tmp_path):
    subprocess.run([PEERS, Path(__file__).with_name("packed_bases.py"), tmp_path], check=True)
    (expected,) = load_file(tmp_path / "expected").values()
    model, count = load_decoder(tmp_path, dtype=jnp.float32), len(expected)
    hidden = model.hidden(jnp.arange(3, 3 + count), jnp.arange(count), Segments.from_lengths([count], count))
    values = logits(hidden, model.head(), model.config)
    assert np.ptp(expected) > 0.5, "the model says nothing"
    assert np.abs(values - expected).max() < 1e-3 * np.abs(expected).max()
