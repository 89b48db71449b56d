"""Writes safetensors files tensor by tensor, and folders of arrays under names that orbax and tensorstore take.

The library's own `save` copies all tensors twice without letting other threads run: 0.6 s for an adapter of 1 GB, and a
run that saves does not dispatch meanwhile.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

# Orbax looks for its files by a pattern that begins with the folder, so in a folder `x[1]` it finds none; tensorstore
# takes a backslash for a slash.
SIGNS = frozenset("*?[]\\")
MANIFEST, UNMERGED = "manifest.ocdbt", "ocdbt.process_0"
TENSORS = "d"  # the folder of a database's contents
CODES = {
    "bool": "BOOL", "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes the file that PyTorch's libraries read; tensors of one dtype as the library's `save` orders them.

    Raises:
        TypeError: a tensor has a dtype that is not in `CODES`. Nothing is written.

    >>> import tempfile
    >>> from safetensors.numpy import load_file
    >>> file = Path(tempfile.mkdtemp()) / "two.safetensors"
    >>> write_tensors(file, {"b": np.ones(2, np.float32), "a": np.zeros((1, 3), np.float32)})
    >>> {name: tensor.shape for name, tensor in load_file(file).items()}
    {'a': (1, 3), 'b': (2,)}
    """
    in_order = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header = header_of((name, tensor.dtype, tensor.shape) for name, tensor in in_order)
    with path.open("wb") as file:
        file.write(header)
        for _, tensor in in_order:
            file.write(bytes_of(tensor))


def header_of(tensors: Iterable[tuple[str, np.dtype, tuple[int, ...]]]) -> bytes:
    """Returns the start of a file: the length of the header, and the header as JSON.

    Args:
        tensors: name, dtype and shape, in the order in which they follow.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        if dtype.name not in CODES:
            raise TypeError(f"{name} is {dtype}; tensors can be written as {', '.join(CODES)}")
        start, end = end, end + int(np.prod(shape)) * dtype.itemsize
        entries[name] = {"dtype": CODES[dtype.name], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def bytes_of(tensor: np.ndarray) -> memoryview:
    """Returns the bytes of a tensor in C order, without a copy where it has that order."""
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


@contextmanager
def plain_name(folder: Path) -> Iterator[Path]:
    """Yields a path to a folder without signs of patterns: the folder itself, or a link to it."""
    if not SIGNS & set(str(folder)):
        yield folder
        return
    parent = None if not SIGNS & set(tempfile.gettempdir()) else "/tmp"
    with tempfile.TemporaryDirectory(prefix="lorafusion-", dir=parent) as temporary:
        link = Path(temporary) / "folder"
        link.symlink_to(folder, target_is_directory=True)
        yield link


@contextmanager
def merged(arrays: Path) -> Iterator[Path]:
    """Yields a folder of arrays as it should be: one that orbax did not find again after writing lacks its last step.

    What a process has written is then a database of its own in a folder below, which is linked to where it belongs.
    """
    process = arrays / UNMERGED
    if (arrays / MANIFEST).exists() or not (process / MANIFEST).is_file():
        yield arrays
        return
    with tempfile.TemporaryDirectory(prefix="lorafusion-") as temporary:
        for path in (*arrays.iterdir(), *process.iterdir()):
            (Path(temporary) / path.name).symlink_to(path.resolve())
        yield Path(temporary)
