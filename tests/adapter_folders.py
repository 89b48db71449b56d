"""The tensors of adapters in run folders, and how far they are apart."""

from __future__ import annotations

import numpy as np

from lorafusion_jax.checkpoint.folder import RunFolder
from lorafusion_jax.peft.folder import read_adapter


def weights(folder: RunFolder, name: str) -> dict[str, np.ndarray]:
    """Tensors of an adapter's newest folder: "layers.0.mlp.up_proj 1" is its B there."""
    latest = folder.latest(name)
    assert latest is not None
    _, arrays = read_adapter(latest)
    return {f"{path} {number}": array for path, tensors in arrays.items() for number, array in enumerate(tensors)}


def distance(actual: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest of all tensors, each relative to its norm."""
    assert actual.keys() == other.keys()
    return max(
        float(np.linalg.norm(actual[key] - other[key]) / max(np.linalg.norm(actual[key]), 1e-9)) for key in actual
    )
