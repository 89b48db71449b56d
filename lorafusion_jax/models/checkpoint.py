"""Reads named tensors of a Hugging Face model directory by byte range."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from lorafusion_jax.errors import CheckpointError, LoraFusionError, first_few, raise_all
from lorafusion_jax.families import joined
from lorafusion_jax.families.hf_config import one_of_each
from lorafusion_jax.families.joined import RowsOf
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.readable import RECORD, check_regular, read_text
from lorafusion_jax.weights.checkpoint_formats import INDEX, SINGLE, two_sets

SHOWN = 20  # tensors that a message names
READABLE = ("F32", "F16", "BF16")
DTYPES: Mapping[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I8": np.int8,
    "I32": np.int32,
    "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Location, shape and dtype of a tensor, from a file's header.

    Attributes:
        start, stop: byte range in the file.
        renamed: the file has it under another name, or as rows of a larger tensor.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    renamed: bool = False


def list_tensors(model_dir: str | os.PathLike[str]) -> dict[str, Stored]:
    """Reads the headers of a single safetensors file, or of all shards in the index.

    Raises:
        CheckpointError: there are no weights; a shard is missing, truncated or corrupt; a tensor of the index is in
            no shard. Several problems come as an `ErrorList`.
    """
    directory = Path(model_dir)
    if (directory / INDEX).is_file():
        return _read_index(directory)
    if (directory / SINGLE).is_file():
        return _header(directory / SINGLE)
    pickled = sorted(file.name for file in directory.glob("*.bin")) if directory.is_dir() else []
    raise CheckpointError(
        "model.no-weights",
        f"there is neither {SINGLE} nor {INDEX}.",
        where=str(directory),
        why=f"{pickled[0]} is a pickle, which is not read because it can run code" if pickled else "",
        fix="save the model with safetensors" if pickled else "base.model: a folder with safetensors weights",
    )


def as_published(stored: Mapping[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """The tensors of a checkpoint under the names of its family, one for each projection."""
    tensors = joined.as_published({name: entry.shape for name, entry in stored.items()}, config)
    return {name: _rows_of(stored[rows.name], rows, name) for name, rows in tensors.items()}


def _rows_of(stored: Stored, rows: RowsOf, name: str) -> Stored:
    if (name, stored.shape) == (rows.name, rows.shape):
        return stored
    row_bytes = (stored.stop - stored.start) // max(stored.shape[0], 1) if stored.shape else 0
    start = stored.start + rows.first * row_bytes
    stop = start + rows.shape[0] * row_bytes if rows.shape != stored.shape else stored.stop
    return replace(stored, shape=rows.shape, start=start, stop=stop, renamed=True)


def read_slice(stored: Stored, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Reads one rectangle of a tensor from disk; nothing else of the file is touched.

    Whole rows come without the interpreter's lock, so that several threads read at once while others compile. Columns
    of bytes are cut out of whole rows, because their shape need not be that in the file; and so are those of renamed
    tensors.
    """
    full_rows = all(part == slice(0, size) for part, size in zip(index[1:], stored.shape[1:], strict=True))
    if index and stored.dtype in DTYPES and (full_rows or stored.renamed or stored.dtype not in READABLE):
        return _rows(stored, index[0])[:, *index[1:]]
    with safe_open(stored.file, framework="numpy") as file:
        return file.get_slice(name)[index] if index else file.get_tensor(name)


def plain_index(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices with a beginning and an end; of the whole tensor without an index."""
    everything = (slice(None),) * len(shape)
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index or everything, shape, strict=True))


def _rows(stored: Stored, rows: slice) -> np.ndarray:
    array = np.empty((rows.stop - rows.start, *stored.shape[1:]), DTYPES[stored.dtype])
    row_bytes = math.prod(stored.shape[1:]) * array.itemsize
    buffer = memoryview(array.reshape(-1).view(np.uint8))
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.start + rows.start * row_bytes)
        while buffer:
            if not (count := file.readinto(buffer)):
                raise CheckpointError(
                    "model.broken-file",
                    "a weight file was truncated while it was read.",
                    where=str(stored.file),
                )
            buffer = buffer[count:]
    return array


def _read_index(directory: Path) -> dict[str, Stored]:
    index = directory / INDEX
    weight_map = _weight_map(index)
    tensors: dict[str, Stored] = {}
    shards = sorted(set(weight_map.values()))
    errors: list[LoraFusionError] = [error] if (error := two_sets(directory, shards)) else []
    for shard in shards:
        try:
            tensors |= _header(directory / shard)
        except CheckpointError as error:
            errors.append(error)
    raise_all(errors)
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise CheckpointError(
            "model.missing-tensor",
            f"{len(absent)} tensors of the index are missing from its files: {first_few(absent, SHOWN)}.",
            where=str(index),
            fix="download the model again",
        )
    return tensors


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map: Any = json.loads(read_text(index, RECORD))["weight_map"]
        if all(isinstance(shard, str) and shard == Path(shard).name for shard in weight_map.values()):
            return weight_map
        why = "weight_map holds something other than names of files in its folder"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    raise CheckpointError("model.bad-index", "the index of the weights cannot be read.", where=str(index), why=why)


def _header(file: Path) -> dict[str, Stored]:
    """Reads the header: 8 bytes for its length, then JSON (the safetensors format)."""
    try:
        check_regular(file)
        with safe_open(file, framework="numpy"):  # checks that the tensors fill the file and do not overlap
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length), object_pairs_hook=one_of_each)
        return {
            name: Stored(
                file=file,
                shape=tuple(entry["shape"]),
                dtype=entry["dtype"],
                start=8 + length + entry["data_offsets"][0],
                stop=8 + length + entry["data_offsets"][1],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError:
        raise CheckpointError(
            "model.missing-file", "a weight file is missing.", where=str(file), fix="download the model again"
        ) from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "model.broken-file",
            "a weight file is truncated or corrupt.",
            where=str(file),
            why=str(error),
            fix="download the file again",
        ) from None
