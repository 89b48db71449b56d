"""The references of a run's adapters in its folder: `references/NAME.safetensors`, with digests in run.json.

They are computed once, at an adapter's start, and never again: with `reference: start` the weights that they come from
are gone after the first step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.files import PART, sync
from lorafusion_jax.tensor_file import write_tensors

KEY = "references"  # the folder in the run folder, and the entry of run.json


def reference_file(run: Path, name: str) -> Path:
    """The file of an adapter."""
    return run / KEY / f"{name}.safetensors"


def write_references(
    run: Path, references: Mapping[str, Mapping[str, np.ndarray]], sources: Mapping[str, str]
) -> dict[str, Any]:
    """Writes the arrays of each adapter atomically. Returns what run.json records of them.

    Args:
        sources: what the reference of each adapter is, in words.
    """
    (run / KEY).mkdir(parents=True, exist_ok=True)
    noted = {}
    for name, arrays in references.items():
        file = reference_file(run, name)
        part = file.with_name(f".{file.name}{PART}")
        write_tensors(part, {key: _bits(array) for key, array in arrays.items()})
        sync(part)
        part.replace(file)
        noted[name] = {"of": sources[name], "digest": _digest(file)}
    return noted


def reference_damage(run: Path, record: Mapping[str, Any]) -> list[str]:
    """Lists the files that are not as run.json records them."""
    damage = []
    for name, noted in record.get(KEY, {}).items():
        file = reference_file(run, name)
        if not file.is_file():
            damage.append(f"{KEY}/{file.name}: it is missing")
        elif _digest(file) != noted.get("digest"):
            damage.append(f"{KEY}/{file.name}: its content differs from its digest")
    return damage


def read_reference(
    run: Path, record: Mapping[str, Any], name: str, shapes: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, np.ndarray]:
    """Reads the arrays of one adapter.

    Args:
        record: of the run.
        shapes: shapes and dtypes of the arrays.

    Raises:
        CheckpointError: `reference.missing`, `reference.damaged`.
    """
    file, noted = reference_file(run, name), record.get(KEY, {}).get(name)
    fix = "restore the file from a copy, or start a new run with lorafusion train"
    if noted is None or not file.is_file():
        raise CheckpointError(
            "reference.missing",
            f"{name}: the run has no stored reference of its samples.",
            where=str(file),
            why="it is computed once, at the adapter's start, and the weights of then may be gone",
            fix=fix,
        )
    try:
        if _digest(file) != noted["digest"]:
            raise ValueError("its content differs from the digest in run.json")
        arrays = {
            key: array.view(ml_dtypes.bfloat16) if shapes.get(key, ((), ""))[1] == "bfloat16" else array
            for key, array in safetensors.numpy.load_file(file).items()
        }
        stored = {key: (array.shape, array.dtype.name) for key, array in arrays.items()}
        if stored != dict(shapes):
            raise ValueError(f"it holds {stored}, and the samples need {dict(shapes)}")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as problem:
        raise CheckpointError(
            "reference.damaged",
            f"{name}: the stored reference of its samples cannot be used.",
            where=str(file),
            why=str(problem),
            fix=fix,
        ) from None
    return arrays


def _bits(array: np.ndarray) -> np.ndarray:
    """Returns bfloat16 numbers as uint16, because the reader of safetensors for numpy knows no bfloat16."""
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
