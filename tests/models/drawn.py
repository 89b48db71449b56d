"""Models and adapters drawn from names and shapes, the same in numpy wherever they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np

Shapes = Mapping[str, Sequence[int]]
CASES_FILE = "drawn_families.jsonl"
TOKENS = 40
PROBES = 2  # directions in which an array is stored


def draw(name: str, shape: Sequence[int], salt: int = 0) -> np.ndarray:
    """Normal values that depend on a tensor's name."""
    return np.random.default_rng([salt, crc32(name.encode())]).standard_normal((1, *shape), np.float32)[0]


def weights(shapes: Shapes, share: float) -> dict[str, np.ndarray]:
    """Weights of a model: matrices of size `share`, norms around 1, biases, so that each of them changes the logits."""
    return {name: _weight(name, shape, share) for name, shape in shapes.items()}


def _weight(name: str, shape: Sequence[int], share: float) -> np.ndarray:
    noise = np.asarray(draw(name, shape))
    if not shape:  # of xIELU
        return np.asarray(0.5 + 0.1 * noise if name.endswith("beta") else -0.01 * np.abs(noise), np.float32)
    if name.endswith("e_score_correction_bias"):
        return np.float32(0.3) * noise
    if name.endswith("A_log"):
        return noise - np.float32(1)
    if len(shape) == 1:
        return np.float32(1) + np.float32(0.2) * noise
    return np.float32(share) * noise


def adapter(shapes: Shapes) -> dict[str, np.ndarray]:
    """Tensors of an adapter, by their names in a PEFT folder."""
    return {name: np.float32(0.2) * draw(name, shape, 1) for name, shape in shapes.items()}


def tokens(count: int, vocabulary: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, vocabulary, count).astype(np.int32)


def probe(name: str, array: np.ndarray) -> list[float]:
    """A few numbers that an error of the array changes: its length, and its products with directions of its shape."""
    flat = np.asarray(array, np.float64).reshape(-1)
    directions = [draw(name, flat.shape, 2 + number).astype(np.float64) for number in range(PROBES)]
    return [float(np.linalg.norm(flat)), *(float(flat @ direction) for direction in directions)]
