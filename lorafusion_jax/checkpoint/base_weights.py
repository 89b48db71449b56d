"""Checks the weight files of a base model without a device: broken headers and indexes, NaN and infinity."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from lorafusion_jax.checkpoint.base_files import WHOLE_BYTES
from lorafusion_jax.errors import CheckpointError, LoraFusionError, first_few

INDEX = "model.safetensors.index.json"
# NaN and infinity have all bits of the exponent set: (type of the bits, these bits). This 8-bit float has no infinity,
# and one NaN, of all bits but the sign.
_EXPONENTS = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F),
}
_BLOCK = 1 << 22  # weights looked at together
_SHOWN = 4  # tensors that a message names


def weight_problems(directory: Path) -> list[LoraFusionError]:
    """Finds problems of the weight files. Values are only checked if the files hold less than 4 GB in total."""
    files = sorted(directory.glob("*.safetensors"))
    small = sum(file.stat().st_size for file in files) < WHOLE_BYTES
    problems: list[LoraFusionError] = list(_index_problems(directory / INDEX))
    for file in files:
        try:
            with safe_open(file, "np"):  # checks that the tensors fill the file and do not overlap
                pass
            bad = list(_not_finite(file)) if small else []
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
            what = "a weight file is truncated or corrupt."
            fix = "download the file again"
            problems.append(CheckpointError("model.broken-file", what, where=str(file), why=str(problem), fix=fix))
            continue
        if bad:
            problems.append(
                CheckpointError(
                    "model.not-finite",
                    f"the base model holds NaN or infinity: {first_few(bad, _SHOWN)}.",
                    where=str(file),
                    why="every token's loss would be NaN",
                    fix="download the file again, or convert the weights without overflow",
                )
            )
    return problems


def _index_problems(index: Path) -> Iterator[LoraFusionError]:
    if not index.is_file():
        return
    try:
        if isinstance(json.loads(index.read_text(encoding="utf-8"))["weight_map"], dict):
            return
        why = "weight_map is not an object"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        why = f"{type(problem).__name__}: {problem}"
    yield CheckpointError("model.bad-index", "the index of the weights cannot be read.", where=str(index), why=why)


def _not_finite(file: Path) -> Iterator[str]:
    """Yields the names of tensors with NaN or infinity."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] not in _EXPONENTS:
                continue
            kind, exponent = _EXPONENTS[entry["dtype"]]
            start, stop = entry["data_offsets"]
            if _any_all_ones(content[8 + length + start : 8 + length + stop], kind, exponent):
                yield name


def _any_all_ones(content: bytes, kind: type, exponent: int) -> bool:
    bits = np.frombuffer(content, kind)
    blocks = (bits[first : first + _BLOCK] for first in range(0, len(bits), _BLOCK))
    return any(((block & exponent) == exponent).any() for block in blocks)
