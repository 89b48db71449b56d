"""The decoder against `transformers`: stored logits always, live ones if torch is installed."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_golden import FAMILIES, GOLDEN, write_model
from safetensors.numpy import load_file

from lorafusion_jax.models import Segments, load_decoder

# The bound of the project. Seen: 1e-6, float32 rounding through two layers.
RELATIVE = 1e-4


def logits(model_dir: Path, tokens: np.ndarray) -> np.ndarray:
    model = load_decoder(model_dir, dtype=jnp.float32)
    positions, segments = np.arange(len(tokens)), Segments.from_lengths([len(tokens)], len(tokens))
    return np.asarray(jax.jit(lambda: model(tokens, positions, segments))())


def check(model_dir: Path) -> None:
    expected = load_file(model_dir / "expected.safetensors")
    wanted = expected["logits"]
    assert np.ptp(wanted) > 1, "the model says nothing"
    error = np.abs(logits(model_dir, expected["tokens"]) - wanted).max() / np.abs(wanted).max()
    assert error < RELATIVE


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family):
    check(GOLDEN / family)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_installed_transformers(family, tmp_path):
    pytest.importorskip("torch", reason="without torch the stored logits stand for it")
    pytest.importorskip("transformers", reason="without transformers the stored logits stand for it")
    write_model(family, tmp_path)
    check(tmp_path)
