"""Models and adapters drawn from names and shapes, the same in numpy wherever they are needed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import numpy as np
from safetensors.numpy import save_file

Shapes = Mapping[str, Sequence[int]]
CASES_FILE = "drawn_families.jsonl"
TOKENS = 40
FACTOR = 0.5  # of the load-balancing loss of routers
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
        return noise - np.float32(3 if ".linear_attn." in name else 1)  # delta nets remember up to some hundred rows
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


def distances(stored: Mapping, values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Differences of the loss and of probes, relative to the loss and to the length of what they probe."""
    probes = stored["probes"]
    # A window of one row leaves q and k without a gradient.
    least = 1e-3 * max(length for name, (length, *_) in probes.items() if name.startswith("grad"))
    errors = {}
    for name, array in values.items():
        if name == "loss":
            errors[name] = abs(float(array) / stored["loss"] - 1)
            continue
        length = max(probes[name][0], least) if name.startswith("grad") else probes[name][0]
        errors[name] = float(np.abs(np.subtract(probe(name, array), probes[name])).max()) / length
    return errors


def write(row: Mapping, folder: Path) -> Path:
    """The model folder and the PEFT folder of a row that tests/peers/drawn_families.py has written."""
    for part, prefix in (("", ""), ("adapter", "adapter_")):
        (folder / part).mkdir(parents=True, exist_ok=True)
        arrays = adapter(row["adapter"]) if part else weights(row["tensors"], row["share"])
        save_file(arrays, folder / part / f"{prefix}model.safetensors", {"format": "pt"})
        (folder / part / f"{prefix}config.json").write_text(json.dumps(row[f"{prefix}config"]))
    return folder


def read_rows(file: Path) -> dict[str, dict]:
    return {row["case"]: row for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())}


MODELS = Path(__file__).parent / "models"
GOLDEN = read_rows(MODELS / "golden.jsonl")
DRAWN = read_rows(MODELS / CASES_FILE)  # of other families
HOME = TemporaryDirectory(prefix="golden-models-")  # of this process


@cache
def golden(case: str) -> Path:
    """The folder of a model of either file, with `adapter`, which is drawn where a process first asks for it."""
    return write((GOLDEN | DRAWN)[case], Path(HOME.name) / case)


def golden_tokens(case: str) -> np.ndarray:
    return tokens(GOLDEN[case]["count"], GOLDEN[case]["config"]["vocab_size"])
